"""What the status line says of the link: what is, and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from io import StringIO

import pytest

from starsd_edge.chat.answer import AnswerEnd, Figures
from starsd_edge.chat.commands import run_command
from starsd_edge.chat.conversation import Conversation
from starsd_edge.chat.settings import ChatSettings
from starsd_edge.chat.show import Look, show_answer
from starsd_edge.chat.speaker import Speaker
from starsd_edge.chat.status import LinkState, LinkStatus, link_words, statistics
from starsd_edge.decoding.costs import CostCurve
from starsd_edge.decoding.decoder import Exactness
from starsd_edge.decoding.policy import AdaptivePolicy, FixedPolicy, PlainPolicy, Policy
from starsd_edge.decoding.roles import Drafter, DrafterState
from starsd_edge.decoding.tree import DraftTree
from starsd_edge.metrics import RoundKind, RoundStats
from starsd_edge.testing import Behaviour, FakeClock, ScriptedDrafter
from tests.core.chat.test_speaker import Rounding
from tests.core.chat.toys import TOKENIZER, CountingTarget, toy_speaker

NEVER = 10**6  # requests: never ready
LIMIT = 40  # tokens
CURVE = CostCurve((1, 64), (0.01, 0.02))
REPEATING = "the quick fox. " * 12


def drafter(ready_from: int = 0) -> Callable[[], Drafter]:
    def opened() -> Drafter:
        clock = FakeClock()
        return ScriptedDrafter(
            lambda context, count: [0] * count,
            clock,
            [Behaviour.WRONG if ready_from == 0 else Behaviour.SILENT],
            vocab_size=TOKENIZER.vocab_size,
            ready_from=ready_from,
        )

    return opened


class ShortDrafter(ScriptedDrafter):
    """Takes contexts of LIMIT tokens and no longer ones, as a head that was trained on so many does."""

    def state(self) -> DrafterState:
        if len(self.context) <= LIMIT:
            return super().state()
        return DrafterState(False, 0.0, f"at most {LIMIT} tokens", blocked=True)

    def poll(self, timeout_s: float) -> DraftTree | None:
        return super().poll(timeout_s) if self.state().ready else None


def short_drafter() -> Drafter:
    return ShortDrafter(
        lambda context, count: [0] * count, FakeClock(), [Behaviour.WRONG], vocab_size=TOKENIZER.vocab_size
    )


def own_drafts() -> Policy:
    return FixedPolicy(4, wants_lookup=True)


def speaker(
    service: Callable[[], Drafter] | None,
    policy: Callable[[], Policy] = lambda: FixedPolicy(4),
    target: type[CountingTarget] = CountingTarget,
) -> Speaker:
    return toy_speaker(
        target=target,
        script=REPEATING,
        drafter=service,
        policy=policy,
        service="tcp://there:7731",
        exactness=Exactness.EXACT,
    )


@pytest.mark.parametrize(
    ("state", "local", "chat"),
    [
        (LinkState.NONE, False, lambda: speaker(None, PlainPolicy)),
        (LinkState.NONE, True, lambda: speaker(None, own_drafts)),
        (LinkState.READY, False, lambda: speaker(drafter())),
        (LinkState.UNUSED, False, lambda: speaker(drafter(), PlainPolicy)),
        (LinkState.LOST, False, lambda: speaker(drafter(NEVER))),
        (LinkState.LOST, True, lambda: speaker(drafter(NEVER), own_drafts)),
        (LinkState.INEXACT, False, lambda: speaker(drafter(), target=Rounding)),
        (LinkState.BLOCKED, False, lambda: speaker(short_drafter)),
        (LinkState.BLOCKED, True, lambda: speaker(short_drafter, own_drafts)),
    ],
)
def test_the_link_is_what_the_last_rounds_made_of_it(
    state: LinkState, local: bool, chat: Callable[[], Speaker]
) -> None:
    backend = chat()
    events = list(Conversation(backend, ChatSettings(max_tokens=60)).ask("Go"))
    assert isinstance(events[-1], AnswerEnd)
    found = backend.link()
    assert (state, local) == (found.state, found.local)
    assert local == (state is not LinkState.READY and events[-1].figures.accepted > 0)


def test_drafting_that_is_off_is_said_to_be_off() -> None:
    backend = speaker(drafter())
    list(Conversation(backend, ChatSettings(max_tokens=20, draft=False)).ask("Go"))
    assert LinkState.OFF is backend.link().state


@pytest.mark.parametrize(
    ("words", "link"),
    [
        ("decoding plainly", LinkStatus(LinkState.NONE)),
        ("drafting from what was said before", LinkStatus(LinkState.NONE, local=True)),
        ("connected to tcp://a:1 (12 ms)", LinkStatus(LinkState.CONNECTED, "tcp://a:1", wait_s=0.012)),
        ("drafting via tcp://a:1 (12 ms)", LinkStatus(LinkState.READY, "tcp://a:1", wait_s=0.012)),
        (
            "decoding plainly: faster here than drafts from tcp://a:1 (900 ms)",
            LinkStatus(LinkState.UNUSED, "tcp://a:1", wait_s=0.9),
        ),
        ("decoding plainly: it is late", LinkStatus(LinkState.LOST, "tcp://a:1", "it is late")),
        (
            "drafting from what was said before: it is late",
            LinkStatus(LinkState.LOST, "tcp://a:1", "it is late", local=True),
        ),
        ("decoding plainly: the draft service is lost", LinkStatus(LinkState.LOST, "tcp://a:1")),
        ("the server is gone", LinkStatus(LinkState.NO_SERVER, reason="the server is gone")),
        ("decoding plainly: drafting is off", LinkStatus(LinkState.OFF, "tcp://a:1")),
        ("decoding plainly: it is too long", LinkStatus(LinkState.BLOCKED, "tcp://a:1", "it is too long")),
    ],
)
def test_words_of_a_link(words: str, link: LinkStatus) -> None:
    assert words == link_words(link)


def test_an_answer_without_trees_is_told_why_and_no_draft_is_claimed() -> None:
    figures = Figures(completion_tokens=3, plain_rounds=3)
    for link, connection, reason in [
        (
            LinkStatus(LinkState.READY, "tcp://a:1", wait_s=0.3),
            "connected to tcp://a:1 (300 ms)",
            "worth more",
        ),
        (LinkStatus(LinkState.OFF, "tcp://a:1"), "connected to tcp://a:1", "switched off"),
        (LinkStatus(LinkState.LOST, "tcp://a:1", "it is late"), "not connected: it is late", "it is late"),
        (LinkStatus(LinkState.BLOCKED, "tcp://a:1", "too long"), "connected to tcp://a:1", "too long"),
    ]:
        rows = dict(statistics(figures, link))
        assert connection == rows["link"]
        assert reason in rows["plain because"]
        assert "acceptance length" not in rows
    assert "plain because" not in dict(statistics(figures, LinkStatus(LinkState.NONE)))


def test_plain_rounds_count_in_tokens_a_round_and_not_in_the_acceptance_length() -> None:
    figures = Figures(completion_tokens=13, plain_rounds=9, verified=Counter({(4, 3): 1}))
    rows = dict(statistics(figures, LinkStatus(LinkState.READY, "tcp://a:1")))
    assert rows["tokens a round"] == "1.30"
    assert rows["acceptance length"].startswith("4.00 tokens a tree")


def test_how_far_the_draft_probabilities_were_off_is_said_where_any_were_had() -> None:
    """By depth, as soon as a drafter is there; nothing without one."""
    conversation = Conversation(
        toy_speaker(round_s=0.01, policy=lambda: AdaptivePolicy(CURVE)), ChatSettings()
    )
    list(conversation.ask("the fox?"))
    assert "calibration" not in "\n".join(run_command(conversation, "/stats").lines)
    drafted = Conversation(
        toy_speaker(drafter=drafter(), policy=lambda: AdaptivePolicy(CURVE), service="test"), ChatSettings()
    )
    list(drafted.ask("the fox?"))
    assert drafted.figures is not None
    assert len(drafted.figures.calibration_error) == 5
    figures = Figures(verified=Counter({(4, 3): 1}), calibration_error=(0.041, 0.126, 0.0, 0.0, 0.0))
    assert statistics(figures, LinkStatus(LinkState.READY))[-2] == (
        "calibration",
        "draft probabilities off by 0.04, 0.13, 0.00, 0.00, 0.00 at depth 1, 2, ...",
    )


def test_what_the_margin_guard_costs_is_said() -> None:
    figures = Figures(completion_tokens=51, generation_s=2.0)
    figures.add_round(RoundStats(RoundKind.VERIFY, 8, 2, 3, 4, 0.0, 0.1, 0.1, guarded=True))
    assert "margin guard" not in dict(statistics(figures, LinkStatus(LinkState.READY)))
    figures.add_round(RoundStats(RoundKind.PLAIN, 1, 0, 1, 0, 0.0, 0.05, 0.05, settled=1, settled_s=0.05))
    figures.add_round(RoundStats(RoundKind.VERIFY, 8, 0, 1, 4, 0.0, 0.15, 0.15, settled=1, settled_s=0.05))
    said = dict(statistics(figures, LinkStatus(LinkState.READY)))["margin guard"]
    assert said == "2 close decisions (4% of the tokens) settled by plain steps, 0.10 s (5% of the time)"


def test_drafting_is_switched_at_once() -> None:
    conversation = Conversation(speaker(drafter()), ChatSettings(max_tokens=20))
    list(conversation.ask("Go"))
    run_command(conversation, "/draft off")
    assert LinkState.OFF is conversation.link().state
    assert "decoding plainly: drafting is off" in "".join(run_command(conversation, "/show model").lines)
    list(conversation.ask("Go"))
    run_command(conversation, "/draft on")
    assert LinkState.CONNECTED is conversation.link().state


def test_a_conversation_that_outgrows_the_drafts_is_told_so_once_and_the_next_one_again() -> None:
    long, short = ChatSettings(max_tokens=60), ChatSettings(max_tokens=2)
    conversation = Conversation(speaker(short_drafter))
    out = StringIO()
    look = Look(out, live=False, colour=False)
    for told, settings in [(0, short), (1, long), (1, long), (0, short), (1, long)]:
        if settings is short:
            run_command(conversation, "/clear")
            out.truncate(0)
        conversation.settings = settings
        show_answer(conversation, conversation.ask("Go"), look)
        assert told == out.getvalue().count(f"decoding plainly: at most {LIMIT} tokens\n")


def test_every_state_has_words() -> None:
    assert all(link_words(LinkStatus(state)) for state in LinkState)
