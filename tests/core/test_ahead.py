"""Trees drafted ahead in the decode loop: a hit waits for nothing, and what does not pay is not asked for."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace

import pytest

from starsd_edge.bench.idle_service import IdleService
from starsd_edge.bench.policy import decode
from starsd_edge.bench.trace import HARD, PROMPT_TOKENS, Trace, simulate
from starsd_edge.bench.virtual import Conditions
from starsd_edge.decoding.ahead import FIRST_PAUSE, LAST_PAUSE, TRIAL_ROUNDS, DraftingAhead
from starsd_edge.decoding.costs import load_profile
from starsd_edge.decoding.decoder import Decoder
from starsd_edge.decoding.draft import Draft
from starsd_edge.decoding.policy import AdaptivePolicy, FixedPolicy
from starsd_edge.decoding.roles import DrafterState, Update
from starsd_edge.decoding.sampling import SamplingParams
from starsd_edge.decoding.tree import DraftTree
from starsd_edge.metrics import RoundStats
from starsd_edge.testing import FakeClock, ToyTarget, plain_text
from tests.core.slow_target import SlowTarget

GREEDY = SamplingParams()
PROMPT = [3, 1, 4, 1, 5]
ANSWER_S = 0.02


@dataclass
class TwoTreeDrafter:
    """Answers with a right token after ANSWER_S, and a moment later, while that is verified, with `more`."""

    target: ToyTarget
    clock: FakeClock
    more: int
    context: list[int] = field(default_factory=list)
    under_way: deque[tuple[float, DraftTree]] = field(default_factory=deque)
    asked_s: float = 0.0
    asked_len: int = 0

    def start(self, first_token: int) -> None:
        self.context = [first_token]

    def update(self, update: Update) -> None:
        self.context += update.tokens.tolist()
        self.asked_s, self.asked_len = self.clock(), len(self.context)
        text = plain_text(self.target, GREEDY, self.context, max(1, self.more))
        for number, length in enumerate([1, self.more] if self.more else [1]):
            tree = DraftTree.chain([self.context[-1], *text[:length]], len(self.context))
            self.under_way.append((self.asked_s + ANSWER_S + 0.01 * number, tree))

    def poll(self, timeout_s: float) -> DraftTree | None:
        if not self.under_way or self.under_way[0][0] > self.clock() + timeout_s:
            self.clock.advance(timeout_s)
            return None
        due_s, tree = self.under_way.popleft()
        self.clock.advance(max(0.0, due_s - self.clock()))
        if tree.base_len == self.asked_len:
            self.asked_len = 0
        return tree

    def rollback(self, committed_len: int) -> None:
        del self.context[committed_len:]
        self.under_way.clear()

    def state(self) -> DrafterState:
        return DrafterState(True, ANSWER_S, asked_len=self.asked_len, asked_s=self.asked_s)

    def close(self) -> None:
        pass


@dataclass(frozen=True, slots=True)
class Eager(FixedPolicy):
    """Verifies what is at hand, waits when nothing is; notes whose trees it learns from."""

    learnt: list[bool] = field(default_factory=list)
    arrivals: list[bool] = field(default_factory=list)

    def learn(self, draft: Draft, tokens: list[int]) -> None:
        self.learnt.append(draft.ahead)

    def arrived(self, draft: Draft) -> None:
        self.arrivals.append(draft.ahead)


def rounds_of(more: int, policy: FixedPolicy, count: int = 60) -> list[RoundStats]:
    clock = FakeClock()
    target = SlowTarget(clock)
    decoder = Decoder(target, TwoTreeDrafter(target, clock, more), policy, clock)
    rounds = list(decoder.generate(PROMPT, GREEDY, count))
    expected = plain_text(target, GREEDY, PROMPT, count)
    assert expected == [token for round_ in rounds for token in round_.tokens]
    assert decoder.stats.ahead == sum(round_.stats.ahead for round_ in rounds)
    return [round_.stats for round_ in rounds[1:]]


def test_a_round_whose_outcome_was_foreseen_waits_for_nothing() -> None:
    """The first tree holds one token, the outcome is two; the second tree goes on from there."""
    policy = Eager(8)
    stats = rounds_of(4, policy)
    hits = [each for each in stats if each.ahead]
    assert len(hits) >= len(stats) // 2 - 1
    assert all(each.waited_s == 0.0 for each in hits)
    assert max(each.waited_s for each in stats) == pytest.approx(ANSWER_S)
    assert True in policy.learnt
    assert not any(policy.arrivals), "a tree drafted ahead answers nothing: its age means nothing"


def test_an_outcome_that_was_not_foreseen_is_waited_for_as_ever() -> None:
    """What comes ahead holds the first tree's token only."""
    stats = rounds_of(1, Eager(8))
    assert not any(each.ahead for each in stats)
    assert stats == rounds_of(0, Eager(8))


# --------------------------------------------------------------------------------------------- when it pays


def play(ahead: DraftingAhead, rounds: int, saved: float, tokens: int = 2) -> int:
    """How many of the rounds it was wanted for."""
    wanted = 0
    for _ in range(rounds):
        wanted += ahead.wanted
        if ahead.wanted:
            ahead.used(saved)
        ahead.observe(tokens)
    return wanted


def test_what_brings_nothing_is_asked_for_no_more_and_looked_at_ever_more_rarely() -> None:
    ahead = DraftingAhead()
    assert TRIAL_ROUNDS == play(ahead, FIRST_PAUSE, 0.0)
    assert not ahead.wanted
    assert ahead.gain == 0.0
    rounds = 20_000
    assert play(ahead, rounds, 0.0) <= (rounds // LAST_PAUSE + 6) * TRIAL_ROUNDS


def test_it_is_asked_for_again_when_it_pays_and_then_goes_on() -> None:
    ahead = DraftingAhead()
    play(ahead, TRIAL_ROUNDS, 0.0)
    assert not ahead.wanted
    assert play(ahead, 1000, 0.3) >= 1000 - FIRST_PAUSE
    assert ahead.wanted
    assert ahead.gain == pytest.approx(0.3 / 1.7, rel=0.05)


@pytest.fixture(scope="module")
def trace() -> Trace:
    return simulate(HARD, 200 + PROMPT_TOKENS, 0, ahead=True)


def test_an_idle_service_makes_a_device_faster_by_it(trace: Trace) -> None:
    """A calibrated head and the real decode loop in virtual time."""
    profile, conditions = load_profile("agx-orin-int4"), Conditions(10.0, 0.0, 0)
    without, ahead = (
        decode(profile, conditions, [trace], AdaptivePolicy(profile.curve, ahead=wanted), IdleService)
        for wanted in (False, True)
    )
    assert ahead.tokens_per_s > 1.12 * without.tokens_per_s
    assert ahead.rounds_per_s > 1.15 * without.rounds_per_s
    assert without.ahead_share == 0.0
    assert ahead.ahead_share > 0.4


def test_a_service_that_drafts_nothing_ahead_costs_a_device_nothing(trace: Trace) -> None:
    profile, conditions = load_profile("agx-orin-int4"), Conditions(10.0, 0.0, 0)
    alone = [replace(trace, ahead=())]
    speeds = [
        decode(profile, conditions, alone, AdaptivePolicy(profile.curve, ahead=wanted), IdleService)
        for wanted in (False, True)
    ]
    assert speeds[0] == speeds[1]


def test_a_policy_that_does_not_want_it_does_not_ask_for_it() -> None:
    curve = load_profile("agx-orin-int4").curve
    assert AdaptivePolicy(curve, ahead=False).hints().ahead_nodes == 0
    assert AdaptivePolicy(curve).hints().ahead_nodes > 200
