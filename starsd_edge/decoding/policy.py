"""Decide: wait for a tree, verify how much of it, or take a plain step.

The model is written down in docs/policy.md.

Everything here is a comparison of rates, expected tokens per second. With T(n) the cost of a forward over n
rows, p_i the probability that node i is accepted (p_0 = 1, the root's own token is certain) and w the wait,

    rate(n, w) = (p_0 + ... + p_(n-1)) / (w + T(n)),         plain = 1 / T(1).

No clock and no drafter in here: the decode loop says what is at hand and what happened.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from starsd_edge.decoding.acceptance import AcceptanceModel
from starsd_edge.decoding.costs import CostCurve
from starsd_edge.decoding.roles import RoundHints
from starsd_edge.decoding.tree import DraftTree
from starsd_edge.metrics import RoundKind, RoundStats
from starsd_edge.types import Float64Array

__all__ = ["AdaptivePolicy", "Draft", "FixedPolicy", "Outlook", "PlainPolicy", "Policy", "best_size"]


def best_size(node_probabilities: Float64Array, cost_curve: CostCurve, wait_s: float = 0.0) -> int:
    """The n >= 1 for which the first n nodes give the most tokens per second; the least among equals.

    node_probabilities   float [N], in tree order, [0] the root's 1.0
    wait_s               what is spent per round besides the forward
    """
    return _best(np.cumsum(node_probabilities), cost_curve.table(len(node_probabilities)), wait_s)


def _best(tokens: Float64Array, seconds: Float64Array, wait_s: float) -> int:
    return int(np.argmax(tokens / (wait_s + seconds))) + 1


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
    wait_s     until the oldest outstanding tree is expected; None when none is
    behind     tokens committed since the update that asked for it
    max_size   nodes the forward may have
    max_depth  draft tokens that can still be used: the tokens wanted, less the bonus
    """

    draft: Draft | None
    wait_s: float | None
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
        return self.max_wait_s if outlook.draft is None and outlook.wait_s is not None else 0.0

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
# Rounds of drafting before its measured speed is believed over its promise.
TRIAL_ROUNDS = 24
# While off, rows are handed over every so many tokens to see what trees would bring; doubled, up to the last,
# each time it turns out not to pay. These trees are compared with the text, not verified: a look is cheap.
FIRST_LOOK_TOKENS = 16
LAST_LOOK_TOKENS = 512
# A tree is waited for a little longer than it is expected to take: most that are late are so by little.
OVERTIME = 1.5


class AdaptivePolicy:
    """Maximises expected tokens per second, from the device's curve, the drafter's answers and the text."""

    def __init__(self, cost_curve: CostCurve, acceptance: AcceptanceModel | None = None) -> None:
        self._curve = cost_curve
        self._table = cost_curve.table(LARGEST_TREE)
        self._acceptance = acceptance or AcceptanceModel()
        self._scale = 1.0  # measured forward time over the curve's
        self._typical = _TypicalTree()
        self._kept_promises = 1.0  # share of waits that a tree ended in time
        self._drafting = True
        self._trial = _Trial()
        self._look_tokens = FIRST_LOOK_TOKENS

    @property
    def drafting(self) -> bool:
        """Whether trees are asked for and verified at present."""
        return self._drafting

    def size(self, outlook: Outlook) -> int:
        if outlook.draft is None or outlook.max_size < 2 or not self._drafting:
            return 1
        tokens, seconds = self._prospect(outlook)
        return _best(tokens, seconds, 0.0)

    def patience_s(self, outlook: Outlook) -> float:
        if outlook.wait_s is None or outlook.max_size < 2 or not self._drafting:
            return 0.0
        now = 1.0 / self._plain_s
        if outlook.draft is not None:
            tokens, seconds = self._prospect(outlook)
            now = float((tokens / seconds).max())
        wait_s = outlook.wait_s * OVERTIME
        plain_s = self._plain_s
        survival = self._typical.survival[min(outlook.behind, len(self._typical.survival)) :]
        if len(survival) == 0:
            return 0.0
        # Rates of: k plain steps while the tree travels, then (if it can still be followed) the tree.
        rates = [now]
        followable = max(float(survival[0]), 1e-9)
        for steps in range(min(len(survival), 1 + math.ceil(wait_s / plain_s))):
            tokens_after = float(survival[steps:].sum()) / followable
            reach = float(survival[steps]) / followable
            rest_s = max(outlook.wait_s - steps * plain_s, 0.0) + self._typical.verify_s
            rates.append((steps + tokens_after) / (steps * plain_s + reach * rest_s))
        # A wait that is not rewarded costs all of the patience and a plain step on top.
        kept = self._kept_promises
        gain = float(survival.sum()) / followable
        reward = (kept * gain + 1 - kept) / (
            kept * (outlook.wait_s + self._typical.verify_s) + (1 - kept) * (wait_s + plain_s)
        )
        rates[1] = reward
        if reward < max(rates) or reward * plain_s < 1.0:
            return 0.0
        # Beyond this the round would be slower than as many plain steps.
        return max(0.0, min(wait_s, gain * plain_s - self._typical.verify_s))

    def hints(self) -> RoundHints:
        return RoundHints(plain_s=self._plain_s)

    def wants_draft(self, rows_held: int) -> bool:
        return self._drafting or rows_held >= self._look_tokens

    def arrived(self, draft: Draft) -> None:
        """Note what may be expected of the next tree, and whether that pays."""
        p = self._acceptance.node_probabilities(draft.tree.first(LARGEST_TREE))
        seconds = self._table[: len(p)] * self._scale
        size = _best(np.cumsum(p), seconds, draft.age_s)
        survival: Float64Array = np.bincount(draft.tree.depths[:size], p[:size]).astype(np.float64)
        self._typical.add(survival, float(seconds[size - 1]))
        if self._drafting:
            return
        promise = self._typical.survival.sum() / (draft.age_s + self._typical.verify_s)
        if promise * self._plain_s > START_GAIN:
            self._drafting, self._trial, self._look_tokens = True, _Trial(), FIRST_LOOK_TOKENS
        else:
            self._look_tokens = min(2 * self._look_tokens, LAST_LOOK_TOKENS)

    def learn(self, draft: Draft, tokens: list[int]) -> None:
        self._acceptance.learn(draft.tree, tokens, draft.depth_offset)

    def observe(self, stats: RoundStats) -> None:
        if stats.kind is RoundKind.PREFILL:
            return
        scale = stats.forward_s / self._curve(stats.size)
        self._scale += SMOOTHING * (scale - self._scale)
        if stats.waited_s > 0:
            self._kept_promises += SMOOTHING * (float(stats.kind is RoundKind.VERIFY) - self._kept_promises)
        if not self._drafting:
            return
        self._trial.add(stats.num_tokens, stats.total_s)
        if self._trial.rounds >= TRIAL_ROUNDS and self._trial.rate * self._plain_s < STOP_GAIN:
            self._stop()

    @property
    def _plain_s(self) -> float:
        return self._curve.plain_s * self._scale

    def _prospect(self, outlook: Outlook) -> tuple[Float64Array, Float64Array]:
        """Expected tokens and seconds of verifying the first 1, 2, ... nodes of the draft at hand."""
        assert outlook.draft is not None
        tree = outlook.draft.tree.first(min(outlook.max_size, LARGEST_TREE))
        p = self._acceptance.node_probabilities(tree, outlook.draft.depth_offset)
        p[tree.depths > outlook.max_depth] = 0.0
        return np.cumsum(p), self._table[: len(tree)] * self._scale

    def _stop(self) -> None:
        self._drafting = False
        self._look_tokens = min(2 * self._look_tokens, LAST_LOOK_TOKENS)


class _TypicalTree:
    """Running average of what fresh trees promise.

    survival   survival[d] is the probability that d draft tokens or more are accepted; [0] is 1
    verify_s   of the size that suits
    """

    def __init__(self) -> None:
        self.survival: Float64Array = np.ones(1)
        self.verify_s = 0.0
        self._known = False

    def add(self, survival: Float64Array, verify_s: float) -> None:
        length = max(len(survival), len(self.survival))
        old = np.pad(self.survival, (0, length - len(self.survival)))
        new = np.pad(survival, (0, length - len(survival)))
        weight = SMOOTHING if self._known else 1.0
        self.survival = old + weight * (new - old)
        self.verify_s += weight * (verify_s - self.verify_s)
        self._known = True


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
