"""Which turns a prompt holds when a conversation outgrows the context."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from starsd_edge.chat.settings import FullWindow
from starsd_edge.chat.window import FittedPrompt, fit_window
from starsd_edge.errors import UsageError
from starsd_edge.text.prompt import PromptWriter
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
    writer = PromptWriter(TOKENIZER, ChatTemplate("chatml"))
    return fit_window(writer, messages, max_len, max_tokens=max_tokens, rule=rule)


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
