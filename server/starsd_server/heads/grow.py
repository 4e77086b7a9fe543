"""Dynamic draft trees: which candidates a head's scores turn into a tree (EAGLE-2, arXiv 2406.16858).

Every step offers `top_k` children for each row it ran. Of all that were offered, the best by cumulative
log-probability are the tree, and the `top_k` best of the newest level are the rows of the next step, its
**beams**.

A candidate's **place** is 1 + row * top_k + column, rows counted over all levels; the root's is 0. Equal
scores are ordered by place, and a parent's place is below its children's, so a kept child never loses its
parent. The **cost** is the score without its sign, and the **key** has the cost above and the place below: a
float that is not negative is ordered as its bits are, so sorted keys are candidates from best to worst.

A beam whose own score no longer reaches the tree cannot have children that do, so it is not run: the tree is
the same, with fewer rows. A tree of four nodes is done after two or three steps, not after six.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from starsd_edge.types import Float32Array, Float64Array, IndexArray, TokenArray

__all__ = ["AheadLimits", "Beams", "GrowthLimits", "GrownTree", "TreeGrowth", "VerifyCosts", "add_level"]

CLEARLY_LESS = 1.0 - 1e-6  # what rounding may make of an equal rate is not taken for less
KeyArray: TypeAlias = NDArray[np.int64]
KEY = np.dtype([("place", "<u4"), ("cost", "<f4")])  # of an int64, `<i8`
COST_ALONE = -(1 << 32)  # mask: what is left is not above any key of that cost
LAST_KEY = int(np.float32(np.inf).view(np.int32)) << 32  # behind every candidate


@dataclass(frozen=True, slots=True)
class VerifyCosts:
    """What a device pays for verifying.

    seconds  float64 [max_nodes] of a forward over 1, 2, ... nodes, never falling
    wait_s   what a round costs besides
    """

    seconds: Float64Array
    wait_s: float


@dataclass(frozen=True, slots=True)
class AheadLimits:
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


@dataclass(frozen=True, slots=True)
class GrowthLimits:
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


@dataclass(slots=True)
class Beams:
    """Rows of a step, best first.

    tokens   int32 [b] ids
    parents  int64 [b] row of the tree's step before whose output feeds each
    places   int64 [b]
    costs    float32 [b]
    depth    of all of them
    """

    tokens: TokenArray
    parents: IndexArray
    places: IndexArray
    costs: Float32Array
    depth: int

    def __len__(self) -> int:
        return len(self.tokens)

    def first(self, count: int) -> Beams:
        return Beams(
            self.tokens[:count], self.parents[:count], self.places[:count], self.costs[:count], self.depth
        )


ROOT = Beams(np.zeros(1, np.int32), np.zeros(1, np.int64), np.zeros(1, np.int64), np.zeros(1, np.float32), 0)
NO_BEAMS = ROOT.first(0)


@dataclass(frozen=True, slots=True)
class GrownTree:
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
        "_num_paying",
        "_num_rows",
        "_offered",
        "_offers",
        "_ran",
        "_ranked",
        "_round_s",
        "beams",
        "limits",
        "size",
    )

    def __init__(self, limits: GrowthLimits) -> None:
        self.limits = limits
        self.beams = ROOT  # none when the tree is done
        self.size = limits.max_nodes  # that the tree may come to, as far as is known
        self._ranked = ROOT_KEY  # the best candidates and the root before them
        self._num_paying = limits.max_nodes  # of these, how many are worth verifying
        self._num_rows = 0  # that ran
        self._ran: list[IndexArray] = []  # [b] of each level: their places
        self._offered: list[TokenArray] = []  # [b, top_k] of each level: ids of their children
        self._offers: list[tuple[Float32Array, TokenArray]] = []  # [b, width] costs and ids of each level
        costs = limits.costs
        self._round_s = None if costs is None else costs.seconds + costs.wait_s  # with 1, 2, ... nodes

    @property
    def num_known(self) -> int:
        """Candidates up to now and the root: the place of the next one."""
        return 1 + self._num_rows * self.limits.top_k

    @property
    def width(self) -> int:
        """Children that each beam should be offered."""
        return self.limits.top_k if self.limits.ahead is None else self.limits.ahead.width

    @property
    def beam_probabilities(self) -> Float32Array:
        """float32 [b]: cumulative probabilities of `beams`, falling."""
        probabilities: Float32Array = np.exp(-self.beams.costs)
        return probabilities

    def narrow(self, floor: float) -> None:
        """Run only those of `beams` whose cumulative probability is `floor` at least."""
        if math.exp(-self.beams.costs.item(-1)) < floor:  # the least likely of them
            self.beams = self.beams.first(int(np.count_nonzero(self.beam_probabilities >= floor)))

    def finish(self) -> GrownTree:
        """The tree below the root: at most `max_nodes - 1` nodes, and none that does not pay."""
        nodes = self._ranked[1 : self._num_paying].view(KEY)
        places = nodes["place"].astype(np.int64)
        node_of = np.zeros(self.num_known, np.int32)  # by place
        node_of[places] = np.arange(1, len(places) + 1, dtype=np.int32)
        candidates = places - 1
        tokens = np.concatenate(self._offered).ravel()[candidates]
        parents = node_of[np.concatenate(self._ran)[candidates // self.limits.top_k]]
        return GrownTree(tokens, parents, -nodes["cost"])

    @property
    def offers(self) -> tuple[IndexArray, list[Float32Array], list[TokenArray]]:
        """What was offered up to now, `limits.ahead.width` candidates of each row.

        int64 [r]: which candidates ran, 1 + row * width + column, 0 the root's; costs and ids, each level's
        [b, width].
        """
        assert self.limits.ahead is not None
        width = self.limits.ahead.width
        places = np.concatenate(self._ran)
        rows, columns = np.divmod(places - 1, self.limits.top_k)
        ran = np.where(places > 0, 1 + rows * width + columns, 0)
        costs, tokens = zip(*self._offers, strict=True)
        return ran, list(costs), list(tokens)

    def _join(self, level: KeyArray, costs: Float32Array) -> None:
        """Begin `level` with the best so far, and go on with new candidates: their `costs` [b, top_k]."""
        known, cells = len(self._ranked), level.view(KEY)
        end, place = known + costs.size, self.num_known
        level[:known] = self._ranked
        cells["place"][known:end] = np.arange(place, place + costs.size)
        cells["cost"][known:end] = costs.ravel()

    def _rank(
        self, level: KeyArray, probabilities: Float32Array, gains: Float64Array, offered: TokenArray
    ) -> None:
        """Keep the best of `level`, now sorted, and choose the next beams.

        Args:
            probabilities: of the first of them, and
            gains: their sums, which are the tokens that a round brings with 1, 2, ... nodes.
            offered: [b, top_k] ids.
        """
        ran, limits, newest = self.beams, self.limits, self.num_known
        self._ran.append(ran.places)
        self._offered.append(offered)
        self._num_rows += len(ran)
        ranked = level[: min(self.size, self.num_known)]
        fresh = ranked.view(KEY)["place"] >= newest
        if self._round_s is not None:
            known, left = len(ranked), limits.steps - ran.depth
            self._look_ahead(self._round_s, gains[:known], probabilities[:known].repeat(1 + left * fresh))
            ranked, fresh = ranked[: self.size], fresh[: self.size]
        self._ranked, self.beams = ranked, NO_BEAMS
        if ran.depth == limits.steps:
            return
        chosen = ranked[fresh][: limits.top_k]
        if len(ranked) == self.size:
            # Later candidates lose ties, so a child has to beat the last one that is kept now.
            chosen = chosen[: chosen.searchsorted(ranked.item(-1) & COST_ALONE)]
        if len(chosen):
            cells = chosen.view(KEY)
            places = cells["place"].astype(np.int64)
            index = places - newest
            self.beams = Beams(
                offered.ravel()[index], index // limits.top_k, places, cells["cost"], ran.depth + 1
            )

    def _look_ahead(self, round_s: Float64Array, gains: Float64Array, hoped: Float32Array) -> None:
        """How many of the nodes pay, and how many could once there are more.

        The children of a node are together no likelier than it is. So a tree of any size gains at most what
        it would if every new node had one child, that one child, and so on down, all as likely as the node:
        `hoped`, probabilities of all these and of the older nodes, falling.
        """
        rates = gains / round_s[: len(gains)]  # tokens per second with 1, 2, ... nodes, which can only rise
        self._num_paying = int(rates.argmax()) + 1
        least = rates.item(self._num_paying - 1) * CLEARLY_LESS
        most = hoped.cumsum(dtype=np.float64)
        size = self.size
        while size > self._num_paying and most.item(min(size, len(most)) - 1) <= least * round_s.item(
            size - 1
        ):
            size -= 1
        self.size = size


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
    # A probability is at most 1: rounding must not lift a child above its parent.
    costs = np.concatenate([tree.beams.costs for tree in trees])[:, None] - np.minimum(log_probs, 0.0)
    size = max([tree.size for tree in trees])
    most = max([len(tree.beams) * tree.limits.top_k for tree in trees])
    keys = np.empty((len(trees), size + most), np.int64)
    keys.fill(LAST_KEY)
    offered: list[TokenArray] = []
    end = 0
    for tree, level in zip(trees, keys, strict=True):
        start, end, width = end, end + len(tree.beams), tree.limits.top_k
        if (ahead := tree.limits.ahead) is not None:
            tree._offers.append((costs[start:end, : ahead.width], tokens[start:end, : ahead.width]))
        tree._join(level, costs[start:end, :width])
        offered.append(tokens[start:end, :width])
    keys.sort()
    probabilities = np.exp(-keys[:, :size].view(KEY)["cost"])
    gains = probabilities.cumsum(1, np.float64)
    for number, tree in enumerate(trees):
        tree._rank(keys[number], probabilities[number], gains[number], offered[number])


ROOT_KEY = np.zeros(1, np.int64)
