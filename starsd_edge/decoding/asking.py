"""How large a tree to ask for: a larger one may hold more of use, and takes its drafter more steps.

Every tree that arrives tells of all trees smaller than itself: its first m nodes are what would have come if
m had been asked for, their depth the steps that this would have taken. docs/policy.md has the equation.
"""

from __future__ import annotations

import numpy as np

from starsd_edge.decoding.draft import Draft
from starsd_edge.types import Float64Array

__all__ = ["LARGEST_TREE", "Asking"]

LARGEST_TREE = 64  # no device gains from more, and EAGLE drafts 60
SMALLEST_REQUEST = 2
# What trees of each size are worth is an average over about the last 20; before FIRST_TREES have come, and
# every so many trees, it is looked beyond the size that suits.
SMOOTHING = 0.05
FIRST_TREES = 4
LOOK_BEYOND = 32
ROOM_TO_GROW = 2  # times as many nodes then, and always where answers are not waited for


class Asking:
    """Running averages by size, 1 to LARGEST_TREE."""

    def __init__(self) -> None:
        self._worth: Float64Array = np.zeros(LARGEST_TREE)  # tokens, less what verifying them costs
        self._steps: Float64Array = np.zeros(LARGEST_TREE)  # of the drafter
        self._step_s = 0.0
        self._trees = 0

    def learn(self, draft: Draft, p: Float64Array, costs_s: Float64Array, rate: float) -> None:
        """A tree arrived.

        p        float64 [N] of its nodes, [0] the root's
        costs_s  of verifying 1, 2, ... nodes
        rate     what a second is worth, in tokens
        """
        self._trees += 1
        weight = max(SMOOTHING, 1.0 / self._trees)
        count = min(len(p), LARGEST_TREE)
        worth = np.maximum.accumulate(p[:count].cumsum() - rate * costs_s[:count])
        steps = np.maximum.accumulate(draft.tree.depths[:count])
        for average, values in ((self._worth, worth), (self._steps, steps)):
            # Of larger trees it says nothing new but that they bring what it brings.
            change = average[count - 1]
            average[:count] += weight * (values - average[:count])
            average[count:] += average[count - 1] - change
        if draft.draft_s > 0.0:
            step_s = draft.draft_s / max(1, int(steps[-1]))
            self._step_s += (weight if self._step_s else 1.0) * (step_s - self._step_s)

    def takes_s(self, size: int) -> float:
        """What drafting that many nodes takes."""
        return self._step_s * float(self._steps[min(size, LARGEST_TREE) - 1])

    def best(self, rate: float) -> int:
        """The size that is worth the most where its steps are waited for."""
        worth = self._worth - rate * self._step_s * self._steps
        return SMALLEST_REQUEST + int(np.argmax(worth[SMALLEST_REQUEST - 1 :]))

    def size(self, suits: int, rate: float, *, waiting: bool) -> int:
        """Nodes to ask for. `suits`: how many have been worth verifying of late, of those that came;
        `waiting`: whether their steps are waited for."""
        if self._trees < FIRST_TREES:
            return LARGEST_TREE
        roomy = _within(ROOM_TO_GROW * suits)
        if not waiting:
            return roomy
        best = self.best(rate)
        return max(best, roomy) if self._trees % LOOK_BEYOND == 0 else best


def _within(size: int) -> int:
    return min(max(size, SMALLEST_REQUEST), LARGEST_TREE)
