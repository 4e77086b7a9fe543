"""Messages in, text out: streaming, stopping, reuse of the cache."""

from __future__ import annotations

from dataclasses import replace

import pytest

from starsd_edge.chat.answer import AnswerEnd, AnswerPiece, AnswerStart, Figures, FinishReason, PromptRead
from starsd_edge.chat.conversation import Conversation
from starsd_edge.chat.settings import ChatSettings
from starsd_edge.chat.speaker import PROMPT_PIECE, Speaker
from starsd_edge.decoding.decoder import Decoder, Exactness
from starsd_edge.decoding.policy import FixedPolicy
from starsd_edge.decoding.roles import Invariance
from starsd_edge.decoding.sampling import SamplingParams
from starsd_edge.errors import UsageError
from starsd_edge.testing import Behaviour, FakeClock, ScriptedDrafter
from starsd_edge.text.template import Message, Role
from tests.core.chat.toys import TOKENIZER, CountingTarget, toy_speaker

SAMPLED = ChatSettings(max_tokens=24, sampling=SamplingParams(temperature=1.0, seed=5))


def ask(conversation: Conversation, text: str) -> tuple[str, AnswerEnd]:
    events = list(conversation.ask(text))
    assert isinstance(events[0], AnswerStart)
    assert isinstance(events[-1], AnswerEnd)
    return "".join(e.text for e in events if isinstance(e, AnswerPiece)), events[-1]


def test_an_answer_comes_in_pieces_and_ends_where_the_model_stops() -> None:
    conversation = Conversation(toy_speaker(script="The quick brown fox 🙂"))
    events = list(conversation.ask("Who?"))
    pieces = [e.text for e in events if isinstance(e, AnswerPiece)]
    assert "The quick brown fox 🙂" == "".join(pieces)
    assert len(pieces) > 2
    assert FinishReason.STOP is events[-1].reason  # type: ignore[union-attr]
    assert "The quick brown fox 🙂" == conversation.last_answer


def test_the_next_turn_runs_only_what_is_new() -> None:
    targets: list[CountingTarget] = []
    conversation = Conversation(toy_speaker(targets), SAMPLED)
    for turn in range(4):
        before = targets[0].num_prefilled
        _, end = ask(conversation, "the fox?")
        new = end.figures.prompt_tokens - end.figures.cached_tokens
        assert new == targets[0].num_prefilled - before
        # The first turn is all new; later ones are the answer's last token, its end, and the question.
        assert turn == 0 or new <= len(TOKENIZER.encode("<|im_end|>\n<|im_start|>user\nthe fox?")) + 16


def test_regenerating_rolls_back_to_the_question() -> None:
    targets: list[CountingTarget] = []
    conversation = Conversation(toy_speaker(targets), SAMPLED)
    first, _ = ask(conversation, "the fox?")
    before = targets[0].num_prefilled
    second = "".join(e.text for e in conversation.regenerate() if isinstance(e, AnswerPiece))
    assert 1 == targets[0].num_prefilled - before
    assert first != second
    assert [Role.USER, Role.ASSISTANT] == [m.role for m in conversation.messages]


def test_an_edited_history_gives_what_a_fresh_model_gives() -> None:
    conversation = Conversation(toy_speaker(), SAMPLED)
    ask(conversation, "the fox?")
    ask(conversation, "the dog?")
    conversation.messages[0] = Message(Role.USER, "the fix?")
    fresh = Conversation(toy_speaker(), SAMPLED)
    fresh.messages = list(conversation.messages)
    assert ask(fresh, "now?")[0] == ask(conversation, "now?")[0]


def test_stopping_keeps_what_was_said() -> None:
    conversation = Conversation(toy_speaker(script="The quick brown fox jumps over the lazy dog"))
    said = ""
    for event in conversation.ask("Who?"):
        if isinstance(event, AnswerPiece):
            said += event.text
            if "brown" in said:
                conversation.backend.cancel()
        if isinstance(event, AnswerEnd):
            assert FinishReason.CANCELLED is event.reason
    assert said == conversation.last_answer
    assert "brown" in said
    assert "dog" not in said
    assert FinishReason.STOP is ask(conversation, "And?")[1].reason


def test_stopping_before_anything_was_said_takes_the_question_back() -> None:
    conversation = Conversation(toy_speaker(), SAMPLED)
    for event in conversation.ask("Who?"):
        if isinstance(event, AnswerStart):
            conversation.backend.cancel()
    assert [] == conversation.messages


def test_a_stop_string_ends_the_answer_and_is_not_shown() -> None:
    conversation = Conversation(toy_speaker(script="The quick brown fox"), ChatSettings(stop=("ck br",)))
    said, end = ask(conversation, "Who?")
    assert ("The qui", FinishReason.STOP) == (said, end.reason)
    assert "The qui" == conversation.last_answer


def test_max_tokens_cut_the_answer() -> None:
    conversation = Conversation(toy_speaker(script="The quick brown fox"), ChatSettings(max_tokens=2))
    _, end = ask(conversation, "Who?")
    assert (FinishReason.LENGTH, 2) == (end.reason, end.figures.completion_tokens)


def test_a_full_context_ends_the_answer() -> None:
    conversation = Conversation(toy_speaker(script="fox " * 300, max_len=100))
    _, end = ask(conversation, "Who?")
    assert FinishReason.LENGTH is end.reason


def test_a_long_prompt_is_read_in_pieces_and_can_be_stopped_between_them() -> None:
    targets: list[CountingTarget] = []
    conversation = Conversation(toy_speaker(targets, max_len=4000, script="Yes"))
    question = "fox " * (3 * PROMPT_PIECE)
    for event in conversation.ask(question):
        if isinstance(event, PromptRead):
            assert event.num_tokens == PROMPT_PIECE
            conversation.backend.cancel()
    assert PROMPT_PIECE == targets[0].num_prefilled
    said, end = ask(conversation, question)
    assert "Yes" == said
    assert end.figures.cached_tokens == PROMPT_PIECE - 1


def oracle_speaker(
    behaviours: list[Behaviour], settings: ChatSettings, drafters: list[ScriptedDrafter] | None = None
) -> Speaker:
    """A speaker whose drafter knows the text, or half of it."""
    clock = FakeClock()

    def open_drafter() -> ScriptedDrafter:
        def oracle(context: list[int], count: int) -> list[int]:
            decoder = Decoder(CountingTarget(max_len=400), None, FixedPolicy(1), clock)
            rounds = decoder.generate(context, settings.sampling, count)
            return [token for committed in rounds for token in committed.tokens]

        drafter = ScriptedDrafter(oracle, clock, behaviours, vocab_size=TOKENIZER.vocab_size)  # type: ignore[arg-type]
        if drafters is not None:
            drafters.append(drafter)
        return drafter

    return toy_speaker(drafter=open_drafter, policy=lambda: FixedPolicy(5), service="test")


@pytest.mark.parametrize("stop", [("cancel",), ()], ids=["stopped by the user", "by a stop string"])
def test_no_draft_is_wanted_for_an_answer_that_was_given_up(stop: tuple[str, ...]) -> None:
    drafters: list[ScriptedDrafter] = []
    plain = "".join(
        event.text
        for event in Conversation(toy_speaker(), SAMPLED).ask("the fox?")
        if isinstance(event, AnswerPiece)
    )
    settings = SAMPLED if stop else replace(SAMPLED, stop=(plain[8:11],))
    conversation = Conversation(oracle_speaker([Behaviour.WRONG], settings, drafters), settings)
    for event in conversation.ask("the fox?"):
        if isinstance(event, AnswerPiece) and stop:
            assert drafters[0]._under_way
            conversation.backend.cancel()
    assert [] == drafters[0]._under_way
    assert len(drafters[0].context) > 10


@pytest.mark.parametrize(
    "behaviours", [[Behaviour.PERFECT], [Behaviour.PARTLY, Behaviour.WRONG, Behaviour.SILENT]]
)
def test_drafting_changes_no_word_of_a_conversation(behaviours: list[Behaviour]) -> None:
    """On, off, and on again, with and without the last questions edited away."""
    plain = Conversation(toy_speaker(), SAMPLED)
    drafted = Conversation(oracle_speaker(behaviours, SAMPLED), SAMPLED)
    for turn, draft in enumerate([True, False, True]):
        drafted.settings = replace(SAMPLED, draft=draft)
        question = f"question {turn}"
        assert ask(plain, question)[0] == ask(drafted, question)[0]
        assert drafted.figures is not None
        assert draft or drafted.figures.tree_rounds == 0
    assert behaviours != [Behaviour.PERFECT] or drafted.figures.accepted > 0


class Rounding(CountingTarget):
    """A runtime that can verify no tree exactly."""

    def __init__(self, *options: object) -> None:
        super().__init__(*options)  # type: ignore[arg-type]
        self.spec = replace(self.spec, invariance=Invariance(bitwise=False, noise=1.0, exact_tree=False))


@pytest.mark.parametrize("exactness", Exactness)
def test_where_trees_are_inexact_drafting_is_the_user_s_choice(exactness: Exactness) -> None:
    clock = FakeClock()

    def open_drafter() -> ScriptedDrafter:
        return ScriptedDrafter(lambda context, count: [5] * count, clock, vocab_size=TOKENIZER.vocab_size)

    speaker = toy_speaker(
        target=Rounding, drafter=open_drafter, policy=lambda: FixedPolicy(5), exactness=exactness
    )
    _, end = ask(Conversation(speaker, SAMPLED), "the fox?")
    assert (exactness is Exactness.INEXACT) == (end.figures.tree_rounds > 0)


def test_log_probabilities_are_the_target_s_whatever_was_drafted() -> None:
    settings = replace(SAMPLED, logprobs=3)
    results = []
    for speaker in (toy_speaker(), oracle_speaker([Behaviour.BRANCHING], settings)):
        events = list(Conversation(speaker, settings).ask("the fox?"))
        results.append([entry for e in events if isinstance(e, AnswerPiece) for entry in e.logprobs])
    assert results[0] == results[1]
    assert 24 == len(results[0])
    for entry in results[0]:
        assert 3 == len(entry.top)
        assert entry.logprob <= entry.top[0][1] <= 0.0


def test_conversations_keep_their_own_contexts() -> None:
    targets: list[CountingTarget] = []
    speaker = toy_speaker(targets, max_contexts=2)
    one, two = (Conversation(speaker, SAMPLED) for _ in range(2))
    for _ in range(3):
        for conversation, question in ((one, "first person speaking"), (two, "second voice here")):
            _, end = ask(conversation, question)
    assert 2 == len(targets)
    assert end.figures.cached_tokens > end.figures.prompt_tokens // 2


def test_memory_is_bounded_by_the_number_of_contexts() -> None:
    targets: list[CountingTarget] = []
    speaker = toy_speaker(targets, max_contexts=2)
    for number in range(5):
        ask(Conversation(speaker, SAMPLED), f"{number} is a different conversation, quite unlike the others")
    assert 2 == len(targets)


def test_raw_text_is_continued_with_its_control_tokens() -> None:
    events = list(toy_speaker().answer_text("<|im_start|>user\nfox", ChatSettings(max_tokens=1)))
    assert isinstance(events[0], AnswerStart)
    assert len(TOKENIZER.encode("<|im_start|>user\nfox")) == events[0].prompt_tokens


def test_a_raw_prompt_that_fills_the_context_is_refused() -> None:
    with pytest.raises(UsageError, match="shorten it"):
        toy_speaker(max_len=50).answer_text("fox " * 100, ChatSettings())


def test_figures_of_a_plain_answer() -> None:
    figures = Figures(completion_tokens=11, generation_s=2.0, plain_rounds=10)
    assert (5.0, 1.0) == (figures.tokens_per_s, figures.tokens_a_round)


@pytest.mark.parametrize("letters", ["abc def ", "x"])
def test_a_raw_prompt_of_megabytes_is_refused_before_it_is_read(letters: str) -> None:
    with pytest.raises(UsageError, match="more than 400 tokens"):
        toy_speaker().answer_text(letters * (3_000_000 // len(letters)), ChatSettings())
