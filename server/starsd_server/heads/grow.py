"""Dynamic draft trees: which candidates a head's scores turn into a tree (EAGLE-2, arXiv 2406.16858).

Every step offers `top_k` children for each beam it ran; all go into one **pool** with their cumulative
log-probability, the `top_k` best of the newest level become the next beams, and in the end the best of the
whole pool are the tree. Equal scores are ordered by pool index, and a parent always has a smaller index than
its children, so a kept child never loses its parent.

A beam whose own score no longer reaches the tree cannot have children that do, so it is not run: the tree is
the same, with fewer rows. A tree of four nodes is done after two or three steps, not after six.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from starsd_edge.types import Float32Array, Float64Array, TokenArray

__all__ = ["Beams", "GrowthLimits", "GrownTree", "TreeGrowth", "VerifyCosts", "candidates"]

BLOCK = 64  # columns whose maximum stands for all of them in the first pass of `candidates`


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
        rates = self._rates(probabilities)
        return int(np.argmax(rates))

    def floor(self, probabilities: Float32Array) -> float:
        """The log-probability a node must exceed to pay, whatever else is found: the rate that is certain
        already, times the least that any further node costs."""
        least_s = float(np.diff(self.seconds).min(initial=np.inf)) if len(self.seconds) > 1 else 0.0
        needed = float(self._rates(probabilities).max()) * least_s
        return math.log(needed) if needed > 0 else -math.inf

    def _rates(self, probabilities: Float32Array) -> Float64Array:
        """Tokens per second with 0, 1, ... of the nodes."""
        tokens = 1.0 + np.concatenate([[0.0], np.cumsum(probabilities, dtype=np.float64)])
        rates: Float64Array = tokens / (self.wait_s + self.seconds[: len(tokens)])
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
        self._parents[start:end] = np.repeat(self._beam_pool, log_probs.shape[1])
        self._count = end
        self.depth += 1
        self.beams = None
        if self.depth <= self.limits.steps:
            self._choose_beams(scores, start, log_probs.shape[1])
        return self.beams

    def scores(self) -> Float32Array:
        """The best `max_nodes - 1` scores so far, falling."""
        best: Float32Array = -np.sort(-self._scores[: self._count])[: self.limits.max_nodes - 1]
        return best

    def finish(self) -> GrownTree:
        """The tree below the root: at most `max_nodes - 1` nodes, and none that does not pay."""
        scores = self._scores[: self._count]
        kept = np.argsort(-scores, kind="stable")[: self.limits.max_nodes - 1]
        if self.limits.costs is not None:
            kept = kept[: self.limits.costs.worth(np.exp(scores[kept]))]
        node_of = np.full(self._count + 1, 0, np.int32)  # the last entry answers index -1: the root is node 0
        node_of[kept] = np.arange(1, len(kept) + 1, dtype=np.int32)
        return GrownTree(self._tokens[kept], node_of[self._parents[kept]], scores[kept], kept)

    def _choose_beams(self, scores: Float32Array, start: int, width: int) -> None:
        """The `top_k` best of the newest level, less those that cannot have a child in the tree."""
        limits = self.limits
        order = np.argsort(-scores, kind="stable")[: limits.top_k]
        room = limits.max_nodes - 1
        if self._count >= room > 0:
            # Later candidates lose ties, so a child has to beat the last one that is kept now.
            self._floor = max(self._floor, float(np.partition(self._scores[: self._count], -room)[-room]))
        elif room == 0:
            self._floor = np.inf
        if limits.costs is not None:
            self._floor = max(self._floor, limits.costs.floor(np.exp(self.scores())))
        order = order[scores[order] > self._floor]
        if len(order):
            self._beam_pool = order + start
            self.beams = Beams(self._tokens[self._beam_pool], order // width, self.depth)


def candidates(logits: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities and ids of the `count` likeliest tokens of every row, likeliest first, ties by id.

    Args:
        logits: [m, n] of any floating dtype; the log-softmax is taken in float32.
        count: at most n.

    Returns:
        float32 [m, count] and int64 [m, count]. A row that holds a NaN or infinity comes back with one.
    """
    log_probs = torch.log_softmax(logits.float(), dim=-1)
    rows, columns = log_probs.shape
    ask = min(count + 1, columns)  # one more than wanted, to see a tie at the edge
    if columns % BLOCK == 0 and columns >= 4 * BLOCK * ask:
        # The best `ask` values lie in the `ask` blocks with the best maxima (up to ties, seen below).
        blocks = log_probs.view(rows, -1, BLOCK)
        chosen = blocks.amax(-1).topk(ask, dim=-1).indices  # [m, ask]
        near = blocks.gather(1, chosen[:, :, None].expand(-1, -1, BLOCK)).flatten(1)
        best, place = near.topk(ask, dim=-1)
        ids = chosen.gather(1, place // BLOCK) * BLOCK + place % BLOCK
    else:
        best, ids = log_probs.topk(ask, dim=-1)
    tied = (best[:, 1:] == best[:, :-1]).any(-1)
    if bool(tied.any()):
        for row in tied.nonzero()[:, 0].tolist():
            order = torch.sort(log_probs[row], descending=True, stable=True)
            best[row], ids[row] = order.values[:ask], order.indices[:ask]
    return best[:, :count], ids[:, :count]
