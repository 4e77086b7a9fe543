"""What is known of one drafter: how its trees fare, how long they take, and whether they pay.

`policy.AdaptivePolicy` asks; the model is written down in docs/policy.md.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

import numpy as np

from starsd_edge.decoding.acceptance import AcceptanceModel
from starsd_edge.decoding.ahead import DraftingAhead
from starsd_edge.decoding.asking import Asking
from starsd_edge.decoding.draft import Draft
from starsd_edge.decoding.waiting import WaitPlan, plan_waiting
from starsd_edge.metrics import RoundKind, RoundStats
from starsd_edge.types import Float64Array, IndexArray

__all__ = ["SMOOTHING", "DrafterRecord", "RunningRate", "TypicalTree", "worthwhile"]

# Averages over rounds forget with this weight a round: about the last 20 rounds count.
SMOOTHING = 0.05
# Drafting that was off starts again when it promises this much more than plain steps, and ends when it
# promises less than they bring: between the two nothing changes.
START_GAIN = 1.05
STOP_GAIN = 1.0
# What rounds bring is believed over their promise after so many of them, where it is slower than plain steps
# by more than the last 20 scatter; a little slower is found out by that scatter, later. A promise that was
# not kept must be DISTRUST larger to be believed again; one that was kept for long clears the record.
TRIAL_ROUNDS = 24
SLOWER = 0.9
DISTRUST = 1.15
CLEARED_ROUNDS = 200
# While off, rows are handed over every so many tokens to see what trees would bring; doubled, up to the last,
# each time it turns out not to pay. These trees are compared with the text, not verified: a look is cheap.
FIRST_LOOK_TOKENS = 16
LAST_LOOK_TOKENS = 512
# Answer times remembered: enough to see one loss in twenty, few enough to follow a changing link.
NUM_AGES = 48
# A plan for waiting is made after so many trees, then every PLAN_ROUNDS rounds: it takes a millisecond. That
# drafting does not pay is not believed before LEAST_AGES.
FIRST_PLANS = (1, 2, 4, 8)
PLAN_ROUNDS = 16
LEAST_AGES = 4


class DrafterRecord:
    """`costs_s` in what follows is T(1), T(2), ..., T(LARGEST_TREE); `alone_s` what a token takes the device
    without this drafter: T(1), or less where the context itself drafts."""

    def __init__(self, alone_s: float) -> None:
        self.acceptance = AcceptanceModel()
        self.ahead = DraftingAhead()
        self.typical = TypicalTree()
        self.asking = Asking()
        self.plan = WaitPlan(1.0 / alone_s, ())
        self.drafting = True
        self.look_tokens = FIRST_LOOK_TOKENS  # rows held at which to look, while off
        self.last_accepted = 0
        self.last_age_s = 0.0
        self._answers: deque[_Answer] = deque(maxlen=NUM_AGES)
        self._ages_s: Float64Array = np.empty(0)  # what answers would have taken, asked for as now
        self._at_once = True  # trees are asked for that come soon
        self._only_the_prompts = False  # it is longer than the next ones will be, and better than nothing
        self._plan_due = 0  # rounds until the plan is made anew
        self._trial = RunningRate()  # of what the same time would have brought without
        self._needed_gain = START_GAIN  # to switch drafting on

    @property
    def rate(self) -> float:
        """What a second is worth, in tokens: the plan's speed, and what drafting ahead adds to it."""
        return self.plan.rate * (1.0 + self.ahead.gain)

    @property
    def request(self) -> int:
        """Nodes to ask for."""
        return self.asking.size(self.typical.size, self.plan.rate, waiting=self._at_once)

    def model(self, draft: Draft) -> AcceptanceModel:
        """What is known of trees like `draft`."""
        return self.ahead.acceptance if draft.ahead else self.acceptance

    def patience_s(self, elapsed_s: float, behind: int, alone_s: float) -> float:
        """How long to wait for a tree whose update left `elapsed_s` ago, `behind` tokens ago."""
        if not self.drafting or behind >= len(self.plan.until_s):
            return 0.0
        # A round longer than the tokens it may bring is slower than plain steps, whatever the plan.
        longest_s = (len(self.typical.survival) - behind) * alone_s - self.typical.verify_s
        return max(0.0, min(self.plan.until_s[behind] - elapsed_s, longest_s))

    def gain_of_fresh(self, tokens: float, seconds: float, elapsed_s: float, behind: int) -> float:
        """Tokens by which it is better to wait for the tree under way than to verify what is at hand, which
        would bring `tokens` in `seconds` and leave the other tree as many tokens behind."""
        survival = self.typical.survival[behind:]
        left_s = self._ages_s[self._ages_s > elapsed_s] - elapsed_s
        if len(survival) < 2 or survival[0] <= 0.0 or len(left_s) == 0:
            return -math.inf
        survival = survival / survival[0]
        rate, verify_s = self.rate, self.typical.verify_s
        rest = survival[round(tokens) :]
        afterwards = max(0.0, float(rest.sum()) - rate * verify_s * float(rest[0])) if len(rest) else 0.0
        now = tokens - rate * seconds + afterwards
        return float(survival.sum()) - rate * (float(left_s.mean()) + verify_s) - now

    def arrived(self, draft: Draft, costs_s: Float64Array, alone_s: float) -> None:
        """Note what to expect of the next tree, and whether that pays."""
        p = self.acceptance.node_probabilities(draft)
        rate = max(self.plan.rate, 1.0 / alone_s)
        self.asking.learn(draft, p, costs_s, rate)
        if self._only_the_prompts:
            self._answers.clear()
        if not draft.with_prompt or not self._answers:
            usual_s = self.asking.takes_s(len(draft.tree))
            share = draft.draft_s / usual_s if usual_s > 0.0 else 0.0
            self._answers.append(_Answer(max(0.0, draft.age_s - draft.draft_s), share))
            self._only_the_prompts = draft.with_prompt
        self.last_age_s = draft.age_s
        nodes = worthwhile(p, costs_s, rate)
        survival: Float64Array = np.bincount(draft.tree.depths[nodes], p[nodes]).astype(np.float64)
        self.typical.add(survival, float(costs_s[len(nodes) - 1]), len(nodes))
        if not self.drafting or self._plan_due <= 0 or len(self._answers) in FIRST_PLANS:
            self._make_plan(alone_s)

    def observe(self, stats: RoundStats, alone_s: float) -> None:
        """A round ended."""
        self._plan_due -= 1
        if stats.kind is RoundKind.VERIFY:
            self.last_accepted = stats.num_accepted
        if not self.drafting:
            return
        self.ahead.observe(stats.num_tokens)
        # Against its own time: what the context drafts changes from passage to passage.
        self._trial.add(stats.num_tokens, stats.total_s / alone_s)
        if self._trial.rounds >= TRIAL_ROUNDS and self._trial.rate < SLOWER:
            self.drafting = False
            self._needed_gain *= DISTRUST
        elif self._trial.rounds == CLEARED_ROUNDS:
            self._needed_gain = START_GAIN

    def _make_plan(self, alone_s: float) -> None:
        typical = self.typical
        # Where an answer takes longer than a step, a step is taken meanwhile and hides what drafting takes.
        soon_s = self.asking.takes_s(self.asking.best(self.plan.rate))
        self._ages_s = self._ages_with(soon_s)
        self._at_once = float(self._ages_s.mean()) < alone_s
        if self._at_once:
            self.plan = plan_waiting(typical.survival, typical.verify_s, alone_s, self._ages_s)
            self._at_once = self.plan.until_s[0] > 0.0
        if not self._at_once:
            self._ages_s = self._ages_with(self.asking.takes_s(self.request))
            self.plan = plan_waiting(typical.survival, typical.verify_s, alone_s, self._ages_s)
        self._plan_due = PLAN_ROUNDS
        gain = self.rate * alone_s
        if self.drafting:
            self.drafting = gain > STOP_GAIN or len(self._answers) < LEAST_AGES
        elif gain > self._needed_gain:
            self.drafting, self._trial, self.look_tokens = True, RunningRate(), FIRST_LOOK_TOKENS
        else:
            self.look_tokens = min(2 * self.look_tokens, LAST_LOOK_TOKENS)

    def _ages_with(self, draft_s: float) -> Float64Array:
        """Answer times, had drafting usually taken `draft_s`."""
        return np.array([answer.other_s + answer.share * draft_s for answer in self._answers])


@dataclass(frozen=True, slots=True)
class _Answer:
    """What an answer took besides drafting, and its drafting over what such a tree usually takes."""

    other_s: float
    share: float


def worthwhile(p: Float64Array, costs_s: Float64Array, rate: float) -> IndexArray:
    """The nodes that are worth the most together when a second is worth `rate` tokens: the likeliest first.

    p        float64 [N] of all nodes, [0] the root's 1, none above its parent's
    costs_s  of 1, 2, ... nodes: no more than these are taken
    """
    order = np.argsort(-p, kind="stable")[: len(costs_s)]  # parents come first among equals: they do in p
    size = int(np.argmax(np.cumsum(p[order]) - rate * costs_s[: len(order)])) + 1
    return order[:size]


class TypicalTree:
    """Running average of what fresh trees promise.

    survival   survival[d] is the probability that d draft tokens or more are accepted; [0] is 1
    verify_s   of the size that suits
    """

    def __init__(self) -> None:
        self.survival: Float64Array = np.ones(1)
        self.verify_s = 0.0
        self._size = 0.0
        self._count = 0

    @property
    def size(self) -> int:
        """Nodes that suit, rounded up; 0 before the first tree."""
        return math.ceil(self._size)

    def add(self, survival: Float64Array, verify_s: float, size: int) -> None:
        self._count += 1
        weight = max(SMOOTHING, 1.0 / self._count)
        length = max(len(survival), len(self.survival))
        mixed = np.zeros(length)
        mixed[: len(self.survival)] = (1.0 - weight) * self.survival
        mixed[: len(survival)] += weight * survival
        self.survival = mixed
        self.verify_s += weight * (verify_s - self.verify_s)
        self._size += weight * (size - self._size)


class RunningRate:
    """Tokens over what they are measured against, recent rounds first."""

    def __init__(self) -> None:
        self.rounds = 0
        self._tokens = 0.0
        self._against = 0.0

    def add(self, tokens: float, against: float) -> None:
        self.rounds += 1
        self._tokens += SMOOTHING * (tokens - self._tokens)
        self._against += SMOOTHING * (against - self._against)

    @property
    def rate(self) -> float:
        return self._tokens / self._against if self._against > 0 else math.inf
