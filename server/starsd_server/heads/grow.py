"""Dynamic draft trees: which candidates a head's scores turn into a tree (EAGLE-2, arXiv 2406.16858).

Every step offers `top_k` children for each beam it ran; all go into one **pool** with their cumulative
log-probability, the `top_k` best of the newest level become the next beams, and in the end the best of the
whole pool are the tree. Equal scores are ordered by pool index, and a parent always has a smaller index than
its children, so a kept child never loses its parent.

A beam whose own score no longer reaches the tree cannot have children that do, so it is not run: the tree is
the same, with fewer rows. A tree of four nodes is done after two or three steps, not after six.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from starsd_edge.types import Float32Array, Float64Array, TokenArray

__all__ = ["Beams", "GrowthLimits", "GrownTree", "TreeGrowth", "VerifyCosts"]

CLEARLY_LESS = 1.0 - 1e-6  # what rounding may make of an equal rate is not taken for less


@dataclass(frozen=True, slots=True)
class VerifyCosts:
    """What a device pays for verifying.

    seconds  float64 [max_nodes] of a forward over 1, 2, ... nodes, never falling
    wait_s   what a round costs besides
    """

    seconds: Float64Array
    wait_s: float

    def worth(self, probabilities: Float32Array) -> int:
        """How many of the nodes below the root, given by falling probability, are worth verifying."""
        return int(self._rates(self._gains(probabilities)).argmax())

    def reach(self, probabilities: Float32Array, beams: Float32Array) -> int:
        """How many of the `beams` may still have a child that is worth verifying; both fall.

        Nothing that is found later is likelier than the first beam, so it comes behind the nodes that are at
        least as likely. Behind those a tree gains at most the beam's probability for each node: sizes that do
        not pay even so are out of reach, and so are children that come behind as many nodes.
        """
        gains = self._gains(probabilities)
        before = (-probabilities).searchsorted(-beams, side="right")  # [b] nodes at least as likely
        first = int(before[0])
        certain = float(self._rates(gains[: first + 1]).max())
        further = np.arange(1, len(self.seconds) - first)
        hoped = (gains[first] + further * float(beams[0])) / (self.seconds[first + 1 :] + self.wait_s)
        paying = np.flatnonzero(hoped > certain * CLEARLY_LESS)
        if not len(paying):
            return 0
        largest = first + int(paying[-1]) + 1  # nodes below the root
        return int(before.searchsorted(largest))

    def _gains(self, probabilities: Float32Array) -> Float64Array:
        """Tokens that a round brings with 0, 1, ... of the nodes."""
        gains = np.ones(len(probabilities) + 1)
        gains[1:] += probabilities.cumsum(dtype=np.float64)
        return gains

    def _rates(self, gains: Float64Array) -> Float64Array:
        """Tokens per second."""
        rates: Float64Array = gains / (self.seconds[: len(gains)] + self.wait_s)
        return rates


@dataclass(frozen=True, slots=True)
class GrowthLimits:
    """The shape a tree may take.

    max_nodes  nodes of the tree, root included
    top_k      children offered per beam, and beams per level
    steps      head steps after the extend step; nodes reach depth `steps + 1`
    costs      what verifying costs where the tree goes: nodes that do not pay are not grown
    """

    max_nodes: int
    top_k: int
    steps: int
    costs: VerifyCosts | None = None

    def __post_init__(self) -> None:
        if self.max_nodes < 1 or self.top_k < 1 or self.steps < 0:
            raise ValueError(f"no tree has {self}")


@dataclass(frozen=True, slots=True)
class Beams:
    """Rows of the next step.

    tokens   int32 [b] draft-vocabulary ids, best first
    parents  int64 [b] row of the step before whose output feeds each
    depth    of all of them, at least 1
    """

    tokens: TokenArray
    parents: np.ndarray[tuple[int], np.dtype[np.int64]]
    depth: int

    def __len__(self) -> int:
        return len(self.tokens)

    def first(self, count: int) -> Beams:
        return Beams(self.tokens[:count], self.parents[:count], self.depth)


@dataclass(frozen=True, slots=True)
class GrownTree:
    """The nodes below the root by falling score, ties by pool index.

    tokens       int32 [N - 1] draft-vocabulary ids
    parents      int32 [N - 1] node index in the tree, 0 is the root
    scores       float32 [N - 1] cumulative natural-log probability
    pool_index   int64 [N - 1] place in the pool
    """

    tokens: TokenArray
    parents: TokenArray
    scores: Float32Array
    pool_index: np.ndarray[tuple[int], np.dtype[np.int64]]

    def first(self, count: int) -> GrownTree:
        return GrownTree(
            self.tokens[:count], self.parents[:count], self.scores[:count], self.pool_index[:count]
        )


class TreeGrowth:
    """One tree while it grows: `add` what a step offered, run `beams` while there are any, then `finish`."""

    __slots__ = (
        "_beam_pool",
        "_count",
        "_floor",
        "_parents",
        "_scores",
        "_tokens",
        "beams",
        "depth",
        "limits",
    )

    def __init__(self, limits: GrowthLimits) -> None:
        capacity = limits.top_k * (1 + limits.steps * limits.top_k)
        self.limits = limits
        self._scores = np.empty(capacity, np.float32)
        self._tokens = np.empty(capacity, np.int32)
        self._parents = np.empty(capacity, np.int64)  # pool index of the parent, -1 for the root
        self._count = 0
        self._beam_pool = np.full(1, -1, np.int64)  # pool index of each row of the step under way
        self._floor = -np.inf  # a score at or below it cannot be kept any more
        self.depth = 0
        self.beams: Beams | None = None

    def add(self, log_probs: Float32Array, tokens: TokenArray) -> Beams | None:
        """Take the children of the rows that just ran and choose the next beams.

        Args:
            log_probs: float32 [b, k], best first in every row; one row, the root's, on the first call.
            tokens: int32 [b, k] draft-vocabulary ids.

        Returns:
            The next step's rows, or None when no deeper node can enter the tree.
        """
        start, count = self._count, log_probs.size
        end = start + count
        parent_scores = np.zeros(1, np.float32) if start == 0 else self._scores[self._beam_pool]
        # A probability is at most 1: rounding must not lift a child above its parent.
        scores = (parent_scores[:, None] + np.minimum(log_probs, 0.0)).ravel()
        self._scores[start:end] = scores
        self._tokens[start:end] = tokens.ravel()
        self._parents[start:end].reshape(log_probs.shape)[:] = self._beam_pool[:, None]
        self._count = end
        self.depth += 1
        self.beams = None
        if self.depth <= self.limits.steps:
            self._choose_beams(scores, start, log_probs.shape[1])
        return self.beams

    @property
    def beam_probabilities(self) -> Float32Array:
        """float32 [b]: cumulative probabilities of `beams`, falling."""
        return np.exp(self._scores[self._beam_pool])

    def narrow(self, floor: float) -> Beams | None:
        """Run only those of `beams` whose cumulative probability is `floor` at least; None when none is."""
        assert self.beams is not None
        count = int((self.beam_probabilities >= floor).sum())
        self._beam_pool = self._beam_pool[:count]
        self.beams = self.beams.first(count) if count else None
        return self.beams

    def scores(self) -> Float32Array:
        """The best `max_nodes - 1` scores so far, falling."""
        falling = -self._scores[: self._count]
        falling.sort()
        best: Float32Array = falling[: self.limits.max_nodes - 1]
        np.negative(best, out=best)
        return best

    def finish(self) -> GrownTree:
        """The tree below the root: at most `max_nodes - 1` nodes, and none that does not pay."""
        scores = self._scores[: self._count]
        kept = (-scores).argsort(kind="stable")[: self.limits.max_nodes - 1]
        if self.limits.costs is not None:
            kept = kept[: self.limits.costs.worth(np.exp(scores[kept]))]
        node_of = np.full(self._count + 1, 0, np.int32)  # the last entry answers index -1: the root is node 0
        node_of[kept] = np.arange(1, len(kept) + 1, dtype=np.int32)
        return GrownTree(self._tokens[kept], node_of[self._parents[kept]], scores[kept], kept)

    def _choose_beams(self, scores: Float32Array, start: int, width: int) -> None:
        """The `top_k` best of the newest level, less those that cannot have a child in the tree."""
        limits = self.limits
        order = (-scores).argsort(kind="stable")[: limits.top_k]
        best = self.scores()
        if len(best) == limits.max_nodes - 1:
            # Later candidates lose ties, so a child has to beat the last one that is kept now.
            self._floor = max(self._floor, float(best[-1]) if len(best) else np.inf)
        order = order[scores[order] > self._floor]
        if limits.costs is not None and len(order):
            order = order[: limits.costs.reach(np.exp(best), np.exp(scores[order]))]
        if len(order):
            self._beam_pool = order + start
            self.beams = Beams(self._tokens[self._beam_pool], order // width, self.depth)
