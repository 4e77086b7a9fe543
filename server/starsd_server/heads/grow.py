"""Dynamic draft trees: which candidates a head's scores turn into a tree (EAGLE-2, arXiv 2406.16858).

Every step offers `top_k` children for each row it ran. Of all that were offered, the best by cumulative
log-probability are the tree, and the `top_k` best of the newest level are the rows of the next step, its
**beams**.

A candidate's **place** is 1 + row * top_k + column, rows counted over all levels; the root's is 0. Equal
scores are ordered by place, and a parent's place is below its children's, so a kept child never loses its
parent. The **cost** is the score without its sign. What is known of candidates lies in lists by place, and
places sorted by cost are candidates from best to worst: newer ones stand behind older ones before they are
sorted, and sorting keeps the order of equals.

A beam whose own score no longer reaches the tree cannot have children that do, so it is not run: the tree is
the same, with fewer rows. A tree of four nodes is done after two or three steps, not after six.

What is done once a step is done with arrays. Trees are lists and plain loops: most have a dozen candidates or
two, and calls whose code the head's weights have driven from the caches cost more than so few take.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence

import numpy as np
from msgspec import Struct

from starsd_edge.types import Float32Array, IndexArray, TokenArray

__all__ = ["AheadLimits", "GrowthLimits", "GrownTree", "TreeGrowth", "VerifyCosts", "add_level"]

CLEARLY_LESS = 1.0 - 1e-6  # what rounding may make of an equal rate is not taken for less
NO_TOKEN = -1  # the root comes with the rows of the session


class VerifyCosts(Struct, frozen=True):
    """What a device pays for verifying.

    seconds  of a forward over 1, 2, ... max_nodes nodes, never falling
    wait_s   what a round costs besides
    """

    seconds: Sequence[float]
    wait_s: float


class AheadLimits(Struct, frozen=True):
    """How a tree that is done may go on (`ahead`).

    max_nodes  nodes that it may come to, root included
    rows       of a step
    width      children offered per row
    steps      head steps
    """

    max_nodes: int
    rows: int
    width: int
    steps: int


class GrowthLimits(Struct, frozen=True):
    """The shape a tree may take.

    max_nodes  nodes of the tree, root included
    top_k      children offered per beam, and beams per level
    steps      head steps after the extend step; nodes reach depth `steps + 1`
    costs      what verifying costs where the tree goes: nodes that do not pay are not grown
    ahead      how it may go on once it is done
    """

    max_nodes: int
    top_k: int
    steps: int
    costs: VerifyCosts | None = None
    ahead: AheadLimits | None = None

    def __post_init__(self) -> None:
        if self.max_nodes < 1 or self.top_k < 1 or self.steps < 0:
            raise ValueError(f"no tree has {self}")
        if self.ahead is not None and self.ahead.width < self.top_k:
            raise ValueError(f"a tree goes on with all that it was offered, not with {self.ahead}")
        if self.costs is not None and len(self.costs.seconds) != self.max_nodes:
            raise ValueError(f"{len(self.costs.seconds)} costs for a tree of up to {self.max_nodes} nodes")


class GrownTree(Struct, frozen=True):
    """The nodes below the root by falling score, ties by place.

    tokens   int32 [N - 1] ids
    parents  int32 [N - 1] node index in the tree, 0 is the root
    scores   float32 [N - 1] cumulative natural-log probability
    """

    tokens: TokenArray
    parents: TokenArray
    scores: Float32Array


class TreeGrowth:
    """One tree while it grows: run `beams` and `add_level` what they were offered while there are any, then
    `finish`. The first of them is the root."""

    __slots__ = (
        "_costs",
        "_newest",
        "_num_paying",
        "_offers",
        "_probabilities",
        "_ran",
        "_ranked",
        "_tokens",
        "beams",
        "depth",
        "limits",
        "size",
    )

    def __init__(self, limits: GrowthLimits) -> None:
        self.limits = limits
        self.beams = [0]  # places of the rows to run, best first; none when the tree is done
        self.depth = 0  # of the beams
        self.size = limits.max_nodes  # that the tree may come to, as far as is known
        self._costs = [0.0]  # by place, as are
        self._probabilities = [1.0]  # cumulative ones
        self._tokens = [NO_TOKEN]
        self._newest = 0  # place of the newest level's first candidate
        self._ranked = [0]  # places of the root and of the best candidates
        self._num_paying = limits.max_nodes  # of these, how many are worth verifying
        self._ran: list[int] = []  # places of the rows that ran
        self._offers: list[tuple[Float32Array, TokenArray]] = []  # [b, width] costs and ids of each level

    @property
    def width(self) -> int:
        """Children that each beam should be offered."""
        return self.limits.top_k if self.limits.ahead is None else self.limits.ahead.width

    @property
    def beam_tokens(self) -> list[int]:
        """Ids of `beams`."""
        return [self._tokens[place] for place in self.beams]

    @property
    def beam_parents(self) -> list[int]:
        """Rows of the tree's step before whose output feeds `beams`."""
        return [(place - self._newest) // self.limits.top_k for place in self.beams]

    @property
    def beam_probabilities(self) -> Float32Array:
        """float32 [b]: cumulative probabilities of `beams`, falling."""
        return np.array([self._probabilities[place] for place in self.beams], np.float32)

    def narrow(self, floor: float) -> None:
        """Run only those of `beams` whose cumulative probability is `floor` at least."""
        count = len(self.beams)
        while count and self._probabilities[self.beams[count - 1]] < floor:
            count -= 1
        del self.beams[count:]

    def finish(self) -> GrownTree:
        """The tree below the root: at most `max_nodes - 1` nodes, and none that does not pay."""
        nodes = self._ranked[: self._num_paying]
        node_of = {place: node for node, place in enumerate(nodes)}
        del nodes[0]
        ran, top_k = self._ran, self.limits.top_k
        return GrownTree(
            np.array([self._tokens[place] for place in nodes], np.int32),
            np.array([node_of[ran[(place - 1) // top_k]] for place in nodes], np.int32),
            np.array([-self._costs[place] for place in nodes], np.float32),
        )

    @property
    def offers(self) -> tuple[IndexArray, list[Float32Array], list[TokenArray]]:
        """What was offered up to now, `limits.ahead.width` candidates of each row.

        int64 [r]: which candidates ran, 1 + row * width + column, 0 the root's; costs and ids, each level's
        [b, width].
        """
        assert self.limits.ahead is not None
        width = self.limits.ahead.width
        places = np.array(self._ran)
        rows, columns = np.divmod(places - 1, self.limits.top_k)
        ran = np.where(places > 0, 1 + rows * width + columns, 0)
        costs, tokens = zip(*self._offers, strict=True)
        return ran, list(costs), list(tokens)

    def _add(
        self, costs: list[list[float]], probabilities: list[list[float]], tokens: list[list[int]]
    ) -> None:
        """Take what `beams` were offered, [b, k] each, keep the best and choose the next beams."""
        top_k, steps_left = self.limits.top_k, self.limits.steps - self.depth
        newest = self._newest = len(self._costs)
        self._ran += self.beams
        for row, _ in enumerate(self.beams):
            self._costs += costs[row][:top_k]
            self._probabilities += probabilities[row][:top_k]
            self._tokens += tokens[row][:top_k]
        self._rank(newest)
        if self.limits.costs is not None:
            self._look_ahead(self.limits.costs, newest, steps_left)
        self.beams = self._choose(newest) if steps_left else []
        self.depth += 1

    def _rank(self, newest: int) -> None:
        """Keep the best of the candidates, those from `newest` on among them."""
        costs, ranked, top_k = self._costs, self._ranked, self.limits.top_k
        if len(ranked) < self.size:
            ranked += range(newest, len(costs))
        else:  # only what beats the last one is kept, as later candidates lose ties
            last = costs[ranked[-1]]
            for row in range(newest, len(costs), top_k):
                ranked += range(row, bisect_left(costs, last, row, row + top_k))
        ranked.sort(key=costs.__getitem__)
        del ranked[self.size :]

    def _choose(self, newest: int) -> list[int]:
        """The best candidates from `newest` on whose children could still enter the tree."""
        costs, ranked, top_k = self._costs, self._ranked, self.limits.top_k
        # Later candidates lose ties, so a child has to beat the last one that is kept now.
        last = costs[ranked[-1]] if len(ranked) == self.size else math.inf
        chosen: list[int] = []
        for place in ranked:
            if place >= newest:
                if costs[place] >= last or len(chosen) == top_k:
                    break
                chosen.append(place)
        return chosen

    def _look_ahead(self, costs: VerifyCosts, newest: int, steps_left: int) -> None:
        """How many of the nodes pay, and how many could once there are more.

        The children of a node are together no likelier than it is. So a tree of any size gains at most what
        it would if every new node had one child, that one child, and so on down, all as likely as the node.
        """
        seconds, wait_s = costs.seconds, costs.wait_s
        probabilities, ranked, size = self._probabilities, self._ranked, self.size
        best = gain = 0.0  # tokens per second, which can only rise, and tokens
        num_paying = 0
        for num_nodes, place in enumerate(ranked, 1):
            gain += probabilities[place]
            rate = gain / (seconds[num_nodes - 1] + wait_s)
            if rate > best:
                best, num_paying = rate, num_nodes
        # What a tree of `size` nodes may hope for: `rank` is that of the last one, or of the node that it
        # hangs below, of which there are `run`.
        least, chain = best * CLEARLY_LESS, 1 + steps_left
        num_nodes, rank, run, gain = 0, -1, 0, 0.0
        for place in ranked:
            rank += 1
            run = 1 if place < newest else chain
            if run > size - num_nodes:
                run = size - num_nodes
            gain += run * probabilities[place]
            num_nodes += run
            if num_nodes == size:
                break
        while size > num_paying and gain <= least * (seconds[size - 1] + wait_s):
            size -= 1
            if num_nodes > size:
                gain -= probabilities[ranked[rank]]
                num_nodes -= 1
                run -= 1
                if run == 0:
                    rank -= 1
                    run = 1 if ranked[rank] < newest else chain
        self.size, self._num_paying = size, num_paying
        del ranked[size:]


def add_level(trees: Sequence[TreeGrowth], log_probs: Float32Array, tokens: TokenArray) -> None:
    """Take the children of the rows that just ran and choose every tree's next beams: none where no deeper
    node can enter the tree. What is computed for several trees at once does not mix them.

    Args:
        trees: those that had rows in the step.
        log_probs: float32 [n, k], best first in every row; the rows of `trees[0].beams`, then those of
            `trees[1].beams`, and so on. A tree whose `top_k` is below k takes the first of each row.
            Probabilities of a row, so that they are 1 together at most.
        tokens: int32 [n, k] ids.
    """
    parents = np.array([tree._costs[place] for tree in trees for place in tree.beams], np.float32)
    # A probability is at most 1: rounding must not lift a child above its parent.
    costs = parents[:, None] - np.minimum(log_probs, 0.0)
    levels = costs.tolist(), np.exp(-costs).tolist(), tokens.tolist()
    end = 0
    for tree in trees:
        start, end = end, end + len(tree.beams)
        if (ahead := tree.limits.ahead) is not None:
            tree._offers.append((costs[start:end, : ahead.width], tokens[start:end, : ahead.width]))
        tree._add(*[rows[start:end] for rows in levels])
