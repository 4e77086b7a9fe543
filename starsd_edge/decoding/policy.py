"""Decide: wait for a tree, verify how much of it, or take a plain step.

The model is written down in docs/policy.md.

Everything here is a comparison of rates, expected tokens per second. With T(n) the cost of a forward over n
rows, p_i the probability that node i is accepted (p_0 = 1, the root's own token is certain) and w the wait,

    rate(n, w) = (p_0 + ... + p_(n-1)) / (w + T(n)),         plain = 1 / T(1).

No clock and no drafter in here: the decode loop says what is at hand and what happened.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from starsd_edge.decoding.costs import CostCurve
from starsd_edge.decoding.record import LARGEST_TREE, SMOOTHING, DrafterRecord
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
    tokens = np.cumsum(node_probabilities)
    return int(np.argmax(tokens / (wait_s + cost_curve.table(len(tokens))))) + 1


@dataclass(frozen=True, slots=True)
class Draft:
    """A tree at hand: it continues exactly what is committed.

    depth_offset  levels it lost to tokens committed since it was drafted
    age_s         from sending its update to its arrival
    origin        who drafted it
    with_prompt   its update carried the prompt too: its age says nothing of the next one's
    """

    tree: DraftTree
    depth_offset: int
    age_s: float
    origin: str = ""
    with_prompt: bool = False

    def after(self, tokens: list[int]) -> Draft | None:
        """What is left once `tokens` are committed; None when they leave the tree or use it up."""
        left = self.tree.descend(tokens)
        if left is None or len(left) == 1:
            return None
        return Draft(left, self.depth_offset + len(tokens), self.age_s, self.origin)


@dataclass(frozen=True, slots=True)
class Outlook:
    """What the loop knows before a round.

    draft      the tree at hand
    elapsed_s  since the update left whose tree is awaited; None when none is under way
    behind     tokens committed since that update
    max_size   nodes the forward may have
    max_depth  draft tokens that can still be used: the tokens wanted, less the bonus
    origin     who drafts now
    """

    draft: Draft | None
    elapsed_s: float | None
    behind: int
    max_size: int
    max_depth: int
    origin: str = ""


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


# Trees are asked for this many times larger than what was verified of late, so that there is room to grow.
ROOM_TO_GROW = 2
SMALLEST_REQUEST = 8


class AdaptivePolicy:
    """Maximises expected tokens per second, from the device's curve, the drafter's answers and the text.

    What is learnt is kept per drafter (`Draft.origin`): an n-gram tree says nothing of the service's.
    """

    def __init__(self, cost_curve: CostCurve) -> None:
        self._table = cost_curve.table(LARGEST_TREE)
        self._scale = 1.0  # measured forward time over the curve's
        self._records: dict[str, DrafterRecord] = {}
        self._current = self._record("")

    @property
    def drafting(self) -> bool:
        """Whether trees are asked for and verified at present."""
        return self._current.drafting

    @property
    def expected_gain(self) -> float:
        """Expected speed over plain decoding's."""
        return self._current.plan.rate * self._plain_s

    @property
    def calibration(self) -> float:
        """Tokens that verified trees brought over those that were expected of them; 1 before the first."""
        return self._current.calibration

    def size(self, outlook: Outlook) -> int:
        """What adds more tokens than its time is worth: waits are over, so only the forward's cost counts."""
        draft = outlook.draft
        if draft is None or outlook.max_size < 2:
            return 1
        record = self._record(draft.origin)
        if not record.drafting:
            return 1
        tree = draft.tree.first(min(outlook.max_size, LARGEST_TREE))
        return record.best_size(tree, draft.depth_offset, outlook.max_depth, self._costs_s)

    def patience_s(self, outlook: Outlook) -> float:
        self._current = self._record(outlook.origin)
        if outlook.draft is not None or outlook.elapsed_s is None or outlook.max_size < 2:
            return 0.0
        return self._current.patience_s(outlook.elapsed_s, outlook.behind, self._plain_s)

    def hints(self) -> RoundHints:
        record = self._current
        size = record.typical.size
        max_nodes = LARGEST_TREE if size == 0 else max(SMALLEST_REQUEST, ROOM_TO_GROW * size)
        return RoundHints(
            max_nodes=min(max_nodes, LARGEST_TREE),
            num_accepted=record.last_accepted,
            verify_nodes=size,
            verify_s=record.typical.verify_s,
            plain_s=self._plain_s,
            wait_s=record.last_age_s,
        )

    def wants_draft(self, rows_held: int) -> bool:
        return self._current.drafting or rows_held >= self._current.look_tokens

    def arrived(self, draft: Draft) -> None:
        tree = draft.tree.first(LARGEST_TREE)
        age_s = None if draft.with_prompt else draft.age_s
        self._record(draft.origin).arrived(tree, age_s, self._costs_s)

    def learn(self, draft: Draft, tokens: list[int]) -> None:
        self._record(draft.origin).acceptance.learn(draft.tree, tokens, draft.depth_offset)

    def observe(self, stats: RoundStats) -> None:
        if stats.kind is RoundKind.PREFILL:
            return
        self._scale += SMOOTHING * (stats.forward_s / self._table[stats.size - 1] - self._scale)
        self._current.observe(stats, self._plain_s)

    @property
    def _plain_s(self) -> float:
        return float(self._table[0]) * self._scale

    @property
    def _costs_s(self) -> Float64Array:
        return self._table * self._scale

    def _record(self, origin: str) -> DrafterRecord:
        record = self._records.get(origin)
        if record is None:
            record = self._records[origin] = DrafterRecord(float(self._table[0]))
        return record
