"""Which turns a prompt holds when a conversation outgrows the context."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from starsd_edge.chat.settings import FullWindow
from starsd_edge.chat.window import FittedPrompt, fit_window
from starsd_edge.errors import UsageError
from starsd_edge.text.prompt import Prompt, PromptWriter
from starsd_edge.text.template import ChatTemplate, Message, Role
from tests.core.chat.toys import TOKENIZER

MAX_LEN = 200


def conversation(turns: int, words: int = 4, system: bool = False) -> list[Message]:
    told = [Message(Role.SYSTEM, "be brief")] if system else []
    for turn in range(turns):
        told.append(Message(Role.USER, f"question {turn} " + "fox " * words))
        told.append(Message(Role.ASSISTANT, f"answer {turn}"))
    return [*told, Message(Role.USER, "and now?")]


def fit(
    messages: list[Message],
    rule: FullWindow = FullWindow.DROP_OLDEST,
    max_tokens: int | None = None,
    max_len: int = MAX_LEN,
) -> FittedPrompt:
    fitted = fit_window(writer(), messages, max_len, max_tokens=max_tokens, rule=rule)
    assert fitted is not None
    return fitted


def writer() -> CountingWriter:
    return CountingWriter(TOKENIZER, ChatTemplate("chatml"))


class CountingWriter(PromptWriter):
    """Counts the letters that it turned into prompts."""

    num_letters = 0

    def write(self, messages: Sequence[Message], *, add_generation_prompt: bool = True) -> Prompt:
        prompt = super().write(messages, add_generation_prompt=add_generation_prompt)
        self.num_letters += len(prompt.text)
        return prompt


def test_a_conversation_that_fits_is_left_alone() -> None:
    assert 0 == fit(conversation(1)).num_dropped


def test_the_oldest_turns_go_and_the_system_message_stays() -> None:
    fitted = fit(conversation(20, system=True))
    assert fitted.num_dropped > 0
    assert fitted.prompt.text.startswith(
        "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nquestion "
    )
    assert "question 0 " not in fitted.prompt.text
    assert fitted.prompt.text.endswith("and now?<|im_end|>\n<|im_start|>assistant\n")


@given(turns=st.integers(0, 25), words=st.integers(0, 12), system=st.booleans())
@settings(deadline=None, max_examples=40)
def test_a_prompt_always_leaves_room_for_an_answer(turns: int, words: int, system: bool) -> None:
    fitted = fit(conversation(turns, words, system))
    assert len(fitted.prompt.tokens) <= MAX_LEN - MAX_LEN // 8
    assert fitted.num_dropped % 2 == 0


def test_the_beginning_stays_the_same_for_several_turns() -> None:
    """Dropping a turn each turn would run the whole prompt again every time."""
    starts = [fit(conversation(turns), max_len=600).num_dropped for turns in range(20, 44)]
    assert starts == sorted(starts)
    assert len(set(starts)) <= len(starts) // 3


def test_refusing_is_a_choice() -> None:
    with pytest.raises(UsageError, match="start afresh"):
        fit(conversation(20), FullWindow.REFUSE)


def test_a_message_that_alone_is_too_long_is_refused() -> None:
    with pytest.raises(UsageError, match="this message takes"):
        fit([*conversation(3), Message(Role.USER, "fox " * 200)])


def test_a_short_answer_needs_less_room() -> None:
    wide = fit(conversation(5, 5), max_tokens=4)
    assert wide.num_dropped <= fit(conversation(5, 5)).num_dropped


def test_thousands_of_short_messages_are_written_a_few_times_and_not_for_every_block() -> None:
    """Writing the rest for every block took minutes for a request of 3 MB."""
    counting = writer()
    messages = conversation(3000)
    fitted = fit_window(counting, messages, MAX_LEN, max_tokens=None, rule=FullWindow.DROP_OLDEST)
    assert fitted is not None
    assert fitted.num_dropped > 5900
    assert counting.num_letters < sum(len(message.content) for message in messages)


@pytest.mark.parametrize("rule", FullWindow)
@pytest.mark.parametrize("letters", ["fox ", "x", "<|im_end|>", "abc def "])
@pytest.mark.parametrize("max_tokens", [None, 1])
def test_a_text_that_can_never_fit_is_refused_before_it_is_written(
    rule: FullWindow, letters: str, max_tokens: int | None
) -> None:
    counting = writer()
    with pytest.raises(UsageError, match=r"takes more than 1\d\d tokens"):
        fit_window(
            counting,
            [Message(Role.USER, letters * (3_000_000 // len(letters)))],
            MAX_LEN,
            max_tokens=max_tokens,
            rule=rule,
        )
    assert 0 == counting.num_letters


def test_a_long_message_that_left_the_window_hinders_nobody() -> None:
    fitted = fit([Message(Role.USER, "x" * 3_000_000), Message(Role.ASSISTANT, "no"), *conversation(2)])
    assert 2 == fitted.num_dropped


def test_a_prompt_that_nobody_waits_for_is_not_written() -> None:
    counting = writer()
    looks = iter([False] * 5)
    fitted = fit_window(
        counting,
        conversation(2000),
        MAX_LEN,
        max_tokens=None,
        rule=FullWindow.DROP_OLDEST,
        cancelled=lambda: next(looks, True),
    )
    assert fitted is None
    assert 0 == counting.num_letters


def naive(messages: list[Message]) -> FittedPrompt:
    """The rule read aloud: the first block start whose rest fits."""
    plain = PromptWriter(TOKENIZER, ChatTemplate("chatml"))
    taken, blocks, starts = 0, 1, [0]
    for i, message in enumerate(messages):
        if message.role is Role.USER and i > 0 and taken * 4 >= MAX_LEN * blocks:
            starts.append(i)
            blocks = taken * 4 // MAX_LEN + 1
        taken += len(TOKENIZER.encode(TOKENIZER.neutralise(message.content))) + 6
    for start in [*starts, len(messages) - 1]:
        prompt = plain.write(messages[start:])
        if len(prompt.tokens) <= MAX_LEN - MAX_LEN // 8:
            return FittedPrompt(prompt, start)
    raise AssertionError("the last message fits")


@given(words=st.lists(st.integers(0, 30), max_size=40))
@settings(deadline=None, max_examples=40)
def test_halving_finds_the_first_block_that_fits(words: list[int]) -> None:
    messages = [
        message
        for turn, count in enumerate(words)
        for message in (
            Message(Role.USER, f"question {turn} " + "fox " * count),
            Message(Role.ASSISTANT, f"answer {turn}"),
        )
    ] + [Message(Role.USER, "and now?")]
    assert naive(messages) == fit(messages)
