"""Decide: wait for a tree, verify how much of it, or take a plain step.

The model is written down in docs/policy.md.

Everything here is a comparison of rates, expected tokens per second. With T(n) the cost of a forward over n
rows, p_i the probability that node i is accepted (p_0 = 1, the root's own token is certain) and w the wait,

    rate(n, w) = (p_0 + ... + p_(n-1)) / (w + T(n)),         plain = 1 / T(1).

No clock and no drafter in here: the decode loop says what is at hand and what happened.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from starsd_edge.decoding.acceptance import AcceptanceModel
from starsd_edge.decoding.costs import CostCurve
from starsd_edge.decoding.roles import RoundHints
from starsd_edge.decoding.tree import DraftTree
from starsd_edge.decoding.waiting import WaitPlan, plan_waiting
from starsd_edge.metrics import RoundKind, RoundStats
from starsd_edge.types import Float64Array

__all__ = ["AdaptivePolicy", "Draft", "FixedPolicy", "Outlook", "PlainPolicy", "Policy", "best_size"]


def best_size(node_probabilities: Float64Array, cost_curve: CostCurve, wait_s: float = 0.0) -> int:
    """The n >= 1 for which the first n nodes give the most tokens per second; the least among equals.

    node_probabilities   float [N], in tree order, [0] the root's 1.0
    wait_s               what is spent per round besides the forward
    """
    tokens = np.cumsum(node_probabilities)
    return int(np.argmax(tokens / (wait_s + cost_curve.table(len(tokens))))) + 1


@dataclass(frozen=True, slots=True)
class Draft:
    """A tree at hand: it continues exactly what is committed.

    depth_offset  levels it lost to tokens committed since it was drafted
    age_s         from sending its update to its arrival
    """

    tree: DraftTree
    depth_offset: int
    age_s: float

    def after(self, tokens: list[int]) -> Draft | None:
        """What is left once `tokens` are committed; None when they leave the tree or use it up."""
        left = self.tree.descend(tokens)
        if left is None or len(left) == 1:
            return None
        return Draft(left, self.depth_offset + len(tokens), self.age_s)


@dataclass(frozen=True, slots=True)
class Outlook:
    """What the loop knows before a round.

    draft      the tree at hand
    elapsed_s  since the update left whose tree is awaited; None when none is under way
    behind     tokens committed since that update
    max_size   nodes the forward may have
    max_depth  draft tokens that can still be used: the tokens wanted, less the bonus
    """

    draft: Draft | None
    elapsed_s: float | None
    behind: int
    max_size: int
    max_depth: int


class Policy(Protocol):
    """What the decode loop asks. `learn` and `observe` are how it gets better at it."""

    def patience_s(self, outlook: Outlook) -> float:
        """How long to wait for an outstanding tree before this round; 0: not at all."""
        ...

    def size(self, outlook: Outlook) -> int:
        """How many nodes of the draft at hand to verify, 1: a plain step."""
        ...

    def hints(self) -> RoundHints:
        """What the drafter should know of this device's speed."""
        ...

    def wants_draft(self, rows_held: int) -> bool:
        """Whether to ask for a tree now, with `rows_held` rows not handed over yet."""
        ...

    def arrived(self, draft: Draft) -> None:
        """A tree arrived; tokens may have been committed on top of its root since."""
        ...

    def learn(self, draft: Draft, tokens: list[int]) -> None:
        """The target said `tokens` after the draft's root."""
        ...

    def observe(self, stats: RoundStats) -> None:
        """A round ended."""
        ...


class PlainPolicy:
    """Never drafts."""

    def patience_s(self, outlook: Outlook) -> float:
        return 0.0

    def size(self, outlook: Outlook) -> int:
        return 1

    def hints(self) -> RoundHints:
        return RoundHints(max_nodes=1)

    def wants_draft(self, rows_held: int) -> bool:
        return False

    def arrived(self, draft: Draft) -> None:
        pass

    def learn(self, draft: Draft, tokens: list[int]) -> None:
        pass

    def observe(self, stats: RoundStats) -> None:
        pass


@dataclass(frozen=True, slots=True)
class FixedPolicy:
    """Always waits, up to `max_wait_s`, and verifies `num_nodes` nodes: what benchmarks compare with."""

    num_nodes: int
    max_wait_s: float = 1.0

    def patience_s(self, outlook: Outlook) -> float:
        return self.max_wait_s if outlook.draft is None and outlook.elapsed_s is not None else 0.0

    def size(self, outlook: Outlook) -> int:
        return min(self.num_nodes, len(outlook.draft.tree)) if outlook.draft else 1

    def hints(self) -> RoundHints:
        return RoundHints(max_nodes=self.num_nodes)

    def wants_draft(self, rows_held: int) -> bool:
        return True

    def arrived(self, draft: Draft) -> None:
        pass

    def learn(self, draft: Draft, tokens: list[int]) -> None:
        pass

    def observe(self, stats: RoundStats) -> None:
        pass


LARGEST_TREE = 64  # no device gains from more, and EAGLE drafts 60
# Averages over rounds forget with this weight a round: about the last 20 rounds count.
SMOOTHING = 0.05
# Drafting that was off starts again when it promises this much more than plain steps, and ends when it
# promises or brings less than plain steps: between the two nothing changes.
START_GAIN = 1.05
STOP_GAIN = 1.0
# Rounds of drafting before its measured speed is believed over its promise. A promise that was not kept must
# be this much larger to be believed again; one that was kept for long clears the record.
TRIAL_ROUNDS = 24
DISTRUST = 1.15
CLEARED_ROUNDS = 200
# While off, rows are handed over every so many tokens to see what trees would bring; doubled, up to the last,
# each time it turns out not to pay. These trees are compared with the text, not verified: a look is cheap.
FIRST_LOOK_TOKENS = 16
LAST_LOOK_TOKENS = 512
# Answer times remembered: enough to see one loss in twenty, few enough to follow a changing link.
NUM_AGES = 48
# The plan for waiting is made anew after so many rounds: it takes a millisecond.
PLAN_ROUNDS = 16
# Trees are asked for this many times larger than what was verified of late, so that there is room to grow.
ROOM_TO_GROW = 2
SMALLEST_REQUEST = 8


class AdaptivePolicy:
    """Maximises expected tokens per second, from the device's curve, the drafter's answers and the text."""

    def __init__(self, cost_curve: CostCurve, acceptance: AcceptanceModel | None = None) -> None:
        self._curve = cost_curve
        self._table = cost_curve.table(LARGEST_TREE)
        self._acceptance = acceptance or AcceptanceModel()
        self._scale = 1.0  # measured forward time over the curve's
        self._typical = _TypicalTree()
        self._ages_s: deque[float] = deque(maxlen=NUM_AGES)
        self._plan = WaitPlan(1.0 / cost_curve.plain_s, ())
        self._plan_due = 0  # rounds until the plan is made anew
        self._drafting = True
        self._trial = _Trial()
        self._needed_gain = START_GAIN  # to switch drafting on
        self._look_tokens = FIRST_LOOK_TOKENS

    @property
    def drafting(self) -> bool:
        """Whether trees are asked for and verified at present."""
        return self._drafting

    @property
    def expected_gain(self) -> float:
        """Expected speed over plain decoding's."""
        return self._plan.rate * self._plain_s

    def size(self, outlook: Outlook) -> int:
        """What adds more tokens than its time is worth: waits are over, so only the forward's cost counts."""
        if outlook.draft is None or outlook.max_size < 2 or not self._drafting:
            return 1
        tree = outlook.draft.tree.first(min(outlook.max_size, LARGEST_TREE))
        p = self._acceptance.node_probabilities(tree, outlook.draft.depth_offset)
        p[tree.depths > outlook.max_depth] = 0.0
        return _worthwhile(p, self._table[: len(p)] * self._scale, self._plan.rate)

    def patience_s(self, outlook: Outlook) -> float:
        if outlook.draft is not None or outlook.elapsed_s is None or outlook.max_size < 2:
            return 0.0
        if not self._drafting or outlook.behind >= len(self._plan.until_s):
            return 0.0
        patience_s = self._plan.until_s[outlook.behind] - outlook.elapsed_s
        # A round longer than the tokens it may bring is slower than plain steps, whatever the plan.
        survival = self._typical.survival
        longest_s = (len(survival) - outlook.behind) * self._plain_s - self._typical.verify_s
        return max(0.0, min(patience_s, longest_s))

    def hints(self) -> RoundHints:
        size = self._typical.size
        max_nodes = LARGEST_TREE if size == 0 else max(SMALLEST_REQUEST, ROOM_TO_GROW * size)
        return RoundHints(
            max_nodes=min(max_nodes, LARGEST_TREE),
            verify_nodes=size,
            verify_s=self._typical.verify_s,
            plain_s=self._plain_s,
            wait_s=self._ages_s[-1] if self._ages_s else 0.0,
        )

    def wants_draft(self, rows_held: int) -> bool:
        return self._drafting or rows_held >= self._look_tokens

    def arrived(self, draft: Draft) -> None:
        """Note what may be expected of the next tree, and whether that pays."""
        self._ages_s.append(draft.age_s)
        tree = draft.tree.first(LARGEST_TREE)
        p = self._acceptance.node_probabilities(tree)
        seconds = self._table[: len(p)] * self._scale
        rate = max(self._plan.rate, 1.0 / self._plain_s)
        size = _worthwhile(p, seconds, rate)
        survival: Float64Array = np.bincount(tree.depths[:size], p[:size]).astype(np.float64)
        self._typical.add(survival, float(seconds[size - 1]), size)
        if self._plan_due <= 0 or len(self._ages_s) in FIRST_PLANS:
            self._make_plan()
        if not self._drafting:
            self._look()

    def learn(self, draft: Draft, tokens: list[int]) -> None:
        self._acceptance.learn(draft.tree, tokens, draft.depth_offset)

    def observe(self, stats: RoundStats) -> None:
        if stats.kind is RoundKind.PREFILL:
            return
        self._scale += SMOOTHING * (stats.forward_s / self._table[stats.size - 1] - self._scale)
        self._plan_due -= 1
        if not self._drafting:
            return
        self._trial.add(stats.num_tokens, stats.total_s)
        if self._trial.rounds >= TRIAL_ROUNDS and self._trial.rate * self._plain_s < STOP_GAIN:
            self._drafting = False
            self._needed_gain *= DISTRUST
        elif self._trial.rounds == CLEARED_ROUNDS:
            self._needed_gain = START_GAIN

    @property
    def _plain_s(self) -> float:
        return self._curve.plain_s * self._scale

    def _make_plan(self) -> None:
        ages_s = np.array(self._ages_s)
        typical = self._typical
        self._plan = plan_waiting(typical.survival, typical.verify_s, self._plain_s, ages_s)
        self._plan_due = PLAN_ROUNDS
        if self._drafting and self.expected_gain <= STOP_GAIN and len(self._ages_s) >= LEAST_AGES:
            self._drafting = False

    def _look(self) -> None:
        """A tree arrived while drafting was off."""
        self._make_plan()
        if self.expected_gain > self._needed_gain:
            self._drafting, self._trial, self._look_tokens = True, _Trial(), FIRST_LOOK_TOKENS
        else:
            self._look_tokens = min(2 * self._look_tokens, LAST_LOOK_TOKENS)


def _worthwhile(p: Float64Array, seconds: Float64Array, rate: float) -> int:
    """The n whose first n nodes are worth the most when a second is worth `rate` tokens."""
    return int(np.argmax(np.cumsum(p) - rate * seconds)) + 1


# A plan is made after so many trees of a context, then every PLAN_ROUNDS; none is believed before LEAST_AGES.
FIRST_PLANS = (1, 2, 4, 8)
LEAST_AGES = 4


class _TypicalTree:
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
        old = np.pad(self.survival, (0, length - len(self.survival)))
        new = np.pad(survival, (0, length - len(survival)))
        self.survival = old + weight * (new - old)
        self.verify_s += weight * (verify_s - self.verify_s)
        self._size += weight * (size - self._size)


class _Trial:
    """Measured speed since drafting was last switched on, recent rounds first."""

    def __init__(self) -> None:
        self.rounds = 0
        self._tokens = 0.0
        self._seconds = 0.0

    def add(self, tokens: int, seconds: float) -> None:
        self.rounds += 1
        self._tokens += SMOOTHING * (tokens - self._tokens)
        self._seconds += SMOOTHING * (seconds - self._seconds)

    @property
    def rate(self) -> float:
        return self._tokens / self._seconds if self._seconds > 0 else math.inf
