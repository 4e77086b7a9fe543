"""What the draft service is told of this device."""

import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from starsd_edge.chat.contexts import Context, Pair
from starsd_edge.chat.reporter import Board, EdgeReporter, work_of
from starsd_edge.decoding.policy import FixedPolicy, PlainPolicy
from starsd_edge.decoding.sampling import SamplingParams
from starsd_edge.link.client import RemoteDrafter
from starsd_edge.metrics import RoundKind, RoundStats, SessionStats
from starsd_edge.protocol.telemetry import BoardReading, Energy, Mode, Stage
from tests.core.chat.toys import CountingTarget
from tests.core.protocol.pair import hello


@dataclass
class Story:
    """Rounds of a decode loop."""

    stats: SessionStats = field(default_factory=SessionStats)

    def prefill(self, rows: int) -> None:
        self.stats.add(RoundStats(RoundKind.PREFILL, rows, 0, 1, 0, 0.0, 0.5, 0.5))

    def plain(self) -> None:
        self.stats.add(RoundStats(RoundKind.PLAIN, 1, 0, 1, 0, 0.0, 0.04, 0.041))

    def tree(self, accepted: int, depth: int = 4) -> None:
        self.stats.add(RoundStats(RoundKind.VERIFY, 16, accepted, accepted + 1, depth, 0.01, 0.05, 0.062))


def test_counters_mean_what_the_protocol_says() -> None:
    story = Story()
    story.prefill(20)
    for accepted in (3, 0, 1):
        story.tree(accepted)
    story.plain()
    work = work_of(story.stats)
    assert (work.num_drafts, work.draft_tokens, work.accepted_tokens) == (3, 45, 4)
    assert (work.tokens, work.plain_tokens, work.prompt_tokens) == (1 + 4 + 1 + 2 + 1, 1, 20)
    assert work.accepted_per_depth == [2, 1, 1, 0]
    assert work.tried_per_depth == [3, 2, 1, 1]
    assert work.tree_nodes.mean == 16.0


def test_stages_of_the_edge_are_timed() -> None:
    story = Story()
    story.tree(2)
    stages = work_of(story.stats).stages
    assert set(stages) == {Stage.VERIFY, Stage.SAMPLE}
    assert stages[Stage.VERIFY].mean == pytest.approx(0.05)
    assert stages[Stage.SAMPLE].mean == pytest.approx(0.002)


def test_a_loop_that_has_done_nothing_reports_nothing() -> None:
    work = work_of(SessionStats())
    assert (work.num_drafts, work.tokens, work.stages, work.accepted_per_depth) == (0, 0, {}, [])


class FakeBoard:
    """A board that uses 10 joules between any two looks."""

    def __init__(self) -> None:
        self.used = 0.0

    def latest(self) -> BoardReading:
        return BoardReading(source="fake", power_w=20.0, power_rails=["VDD_IN"])

    def joules(self) -> float:
        self.used += 10.0
        return self.used

    def close(self) -> None:
        pass


@pytest.fixture
def context() -> Iterator[Context]:
    """A context whose draft service is not there."""
    drafter = RemoteDrafter("tcp://127.0.0.1:9", hello())
    yield Context(Pair(CountingTarget(), drafter, PlainPolicy()), time.monotonic)
    drafter.close()


def say(context: Context, tokens: int) -> None:
    for _ in context.decoder.generate([1, 5, 6, 7], SamplingParams(), tokens):
        pass


def reporter_of(context: Context, board: Board | None = None) -> EdgeReporter:
    return EdgeReporter(lambda: [context], software="test", plain_tokens_per_s=20.0, board=board)


def test_an_edge_without_its_service_decodes_plainly_and_says_why(context: Context) -> None:
    reporter = reporter_of(context)
    reporter.look()
    say(context, 12)
    reporter.look()
    report = reporter.report(context.drafter)
    (session,) = report.sessions
    assert (session.mode, session.session) == (Mode.PLAIN, f"{context.drafter.session:016x}")
    assert session.reason == context.drafter.state().reason[:240] != ""
    assert session.work.fallbacks == {session.reason[:80]: 1}
    assert session.work.tokens == 12
    assert report.plain_tokens_per_s == 20.0


def test_an_edge_that_stops_talking_is_idle_and_the_next_plain_answer_is_another_fallback(
    context: Context,
) -> None:
    reporter = reporter_of(context)
    for _ in range(2):
        say(context, 5)
        reporter.look()
        reporter.look()
        assert reporter.report(context.drafter).sessions[0].mode is Mode.IDLE
    assert sum(reporter.report(context.drafter).sessions[0].work.fallbacks.values()) == 2


def test_drafting_switched_off_is_the_reason_that_is_given(context: Context) -> None:
    reporter = reporter_of(context)
    context.switch.drafting = False
    say(context, 5)
    reporter.look()
    assert reporter.report(context.drafter).sessions[0].reason == "drafting is switched off here"


def test_a_precision_without_exact_trees_is_the_reason_that_is_given(context: Context) -> None:
    context.verifies_trees = False
    reporter = reporter_of(context)
    say(context, 5)
    reporter.look()
    assert "--draft inexact" in reporter.report(context.drafter).sessions[0].reason


def test_own_drafts_are_not_taken_for_the_service_s() -> None:
    """The monitor says plain, and why; the energy is that of drafting."""
    drafter = RemoteDrafter("tcp://127.0.0.1:9", hello())
    target = CountingTarget(script="fox " * 40)
    context = Context(Pair(target, drafter, FixedPolicy(4, wants_lookup=True)), time.monotonic)
    reporter = reporter_of(context, FakeBoard())
    reporter.look()
    say(context, 40)
    reporter.look()
    report = reporter.report(drafter)
    context.close()
    assert report.sessions[0].work.accepted_tokens > 10
    assert report.sessions[0].mode is Mode.PLAIN
    assert report.sessions[0].reason
    assert report.energy == Energy(drafting_j=10.0, drafting_tokens=40)


def test_energy_goes_to_the_way_of_decoding_and_idle_time_to_nobody(context: Context) -> None:
    """Looks: the first sets the mark, the second has tokens, the third has none."""
    reporter = reporter_of(context, FakeBoard())
    reporter.look()
    say(context, 8)
    reporter.look()
    reporter.look()
    report = reporter.report(context.drafter)
    assert report.energy == Energy(plain_j=10.0, plain_tokens=8)
    assert report.board is not None
    assert report.board.power_w == 20.0


def test_a_board_that_measures_no_power_gives_no_energy(context: Context) -> None:
    reporter = reporter_of(context)
    say(context, 8)
    reporter.look()
    assert reporter.report(context.drafter).energy is None


def test_the_reporting_thread_ends(context: Context) -> None:
    reporter = reporter_of(context, FakeBoard())
    reporter.start()
    reporter.close()
    reporter.close()
