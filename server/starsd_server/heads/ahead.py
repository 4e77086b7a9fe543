"""A tree goes on after it was answered: what to draft while the device verifies it.

The token that a round adds by itself is none of the tree's nodes, or it would have been accepted. So the
likely outcomes of a round are candidates that growth was offered and did not take, and what can be drafted
ahead of the device's answer is what hangs below them. The keys, values and outputs of the rows that offered
them exist.

Every step runs the likeliest candidates that have not run, of any depth, as many as come free: in the limit
that is the largest best-first tree. A text that leaves the answered tree goes on in this one with the
probability of its node, whichever outcome that lies below; so likelier nodes are worth more, and nothing else
has to be weighed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from starsd_edge.types import BoolArray, Float32Array, IndexArray, TokenArray
from starsd_server.heads.grow import AheadLimits, GrownTree

__all__ = ["AheadBeams", "AheadGrowth"]

BLOCKED = np.float32(-np.inf)


@dataclass(frozen=True, slots=True)
class AheadBeams:
    """Rows of a step, likeliest first: int32 [b] tokens and depths; parents, int64 [b] rows of the tree."""

    tokens: TokenArray
    parents: IndexArray
    depths: TokenArray

    def __len__(self) -> int:
        return len(self.tokens)


NO_BEAMS = AheadBeams(np.empty(0, np.int32), np.empty(0, np.int64), np.empty(0, np.int32))


class AheadGrowth:
    """One tree that goes on: run `beams` and `add` what they were offered while there are any.

    A candidate's number is 1 + row * width + column, the root's is 0; a row is the number of a candidate that
    ran, in the order in which they did.
    """

    def __init__(
        self,
        limits: AheadLimits,
        rows: IndexArray,
        costs: Sequence[Float32Array],
        tokens: Sequence[TokenArray],
    ) -> None:
        """
        Args:
            rows: [r] numbers of the candidates that ran, the root's first.
            costs, tokens: of what they were offered, each level's [b, width].
        """
        self.limits = limits
        self._rows = rows
        self._costs: Float32Array = np.concatenate([np.zeros(1, np.float32), *[c.ravel() for c in costs]])
        self._tokens: TokenArray = np.concatenate([np.zeros(1, np.int32), *[t.ravel() for t in tokens]])
        parents = (rows - 1) // limits.width  # as rows
        depths = [0] * len(rows)
        seen = np.full((len(rows), len(rows)), BLOCKED)
        seen[0, 0] = 0.0
        for row, parent in enumerate(parents.tolist()[1:], 1):
            depths[row] = depths[parent] + 1
            seen[row] = seen[parent]
            seen[row, row] = 0.0
        self._depths = np.array(depths, np.int32)
        self._seen: Float32Array = seen  # [r, r]: 0 where a row sees another one, itself included
        self._steps_left = limits.steps
        self.beams = self._choose()

    @property
    def width(self) -> int:
        """Children that each beam should be offered."""
        return self.limits.width

    def blocked(self) -> Float32Array:
        """float32 [b, r - 1 + b]: -inf where a beam does not see a row, the root's left out, or a beam."""
        count, known = len(self.beams), len(self._rows)
        blocked = np.full((count, known - 1 + count), BLOCKED)
        blocked[:, : known - 1] = self._seen[self.beams.parents, 1:]
        blocked.reshape(-1)[known - 1 :: known + count] = 0.0
        return blocked

    def add(self, log_probs: Float32Array, tokens: TokenArray) -> None:
        """Take the children of `beams`, best first in every row: [b, k], of which the first are taken."""
        ran, width = self.beams, self.limits.width
        blocked, known = self.blocked(), len(self._rows)
        seen = np.full((known + len(ran), known + len(ran)), BLOCKED)
        seen[:known, :known] = self._seen
        seen[known:, 1:] = blocked
        seen[known:, 0] = 0.0
        self._seen = seen
        # A probability is at most 1: rounding must not lift a child above its parent.
        costs = self._costs[self._chosen][:, None] - np.minimum(log_probs[:, :width], 0.0)
        self._rows = np.concatenate([self._rows, self._chosen])
        self._depths = np.concatenate([self._depths, ran.depths])
        self._costs = np.concatenate([self._costs, costs.ravel()])
        self._tokens = np.concatenate([self._tokens, tokens[:, :width].ravel()])
        self._steps_left -= 1
        self.beams = self._choose()

    def finish(self) -> GrownTree:
        """The likeliest nodes below the root, those that were answered among them."""
        best = self._best()
        node_of = np.zeros(len(self._costs), np.int32)
        node_of[best] = np.arange(1, len(best) + 1, dtype=np.int32)
        parents = node_of[self._rows[(best - 1) // self.limits.width]]
        return GrownTree(self._tokens[best], parents, -self._costs[best])

    def _choose(self) -> AheadBeams:
        """The next rows: the likeliest that have not run and will be nodes as far as is known."""
        if self._steps_left == 0:
            return NO_BEAMS
        best = self._best()
        ran: BoolArray = np.zeros(len(self._costs), np.bool_)
        ran[self._rows] = True
        self._chosen: IndexArray = best[~ran[best]][: self.limits.rows]
        parents = (self._chosen - 1) // self.limits.width
        return AheadBeams(self._tokens[self._chosen], parents, self._depths[parents] + np.int32(1))

    def _best(self) -> IndexArray:
        """Numbers of the candidates that are nodes, likeliest first; a parent comes before its children."""
        return 1 + np.argsort(self._costs[1:], kind="stable")[: self.limits.max_nodes - 1]
