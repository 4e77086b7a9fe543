"""How likely a draft node is to be accepted, learnt while decoding.

alpha[d, r] is the probability that the target takes the child of sibling rank r (0: the drafter's first
choice) at depth d, given that it took the parent. Every token that becomes known below a visited node is one
observation for all of that node's children, whether the tree was verified, arrived late or was never used:
nothing has to be spent on trying. A node's probability is the product of alpha along its path.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from starsd_edge.decoding.tree import DraftTree
from starsd_edge.types import Float64Array

__all__ = ["AcceptanceModel"]

MAX_DEPTH = 12  # deeper levels share the last entry: by then nodes are rare
MAX_RANK = 10  # EAGLE keeps ten children a node at most
# Before anything was seen: a first choice is taken with 0.5, every further rank with 0.3 of the one before.
PRIOR_FIRST = 0.5
PRIOR_DECAY = 0.3
PRIOR_WEIGHT = 6.0  # observations that the prior is worth
MEMORY = 300.0  # observations after which an old one counts 1/e: texts change


class AcceptanceModel:
    """Online estimate of alpha, and of how well it predicts."""

    def __init__(self) -> None:
        ranks = np.arange(MAX_RANK)
        prior = np.tile(PRIOR_FIRST * PRIOR_DECAY**ranks, (MAX_DEPTH, 1))
        self._taken = PRIOR_WEIGHT * prior
        self._seen = np.full((MAX_DEPTH, MAX_RANK), PRIOR_WEIGHT)
        self._keep = 1.0 - 1.0 / MEMORY

    def node_probabilities(self, tree: DraftTree, depth_offset: int = 0) -> Float64Array:
        """float64 [N]: the probability that the target walks to each node; 1 for the root.

        depth_offset   levels that this tree has lost since it was drafted (`DraftTree.descend`)
        """
        levels = np.minimum(tree.depths + depth_offset, MAX_DEPTH) - 1
        ranks = np.minimum(tree.sibling_ranks, MAX_RANK - 1)
        probabilities: Float64Array = (self._taken / self._seen)[levels, ranks]
        probabilities[0] = 1.0
        values, parents = probabilities.tolist(), tree.parents.tolist()
        for node in range(1, len(values)):  # parents come first
            values[node] *= values[parents[node]]
        return np.array(values)

    def learn(self, tree: DraftTree, tokens: Sequence[int], depth_offset: int = 0) -> None:
        """`tokens` are what the target said after the tree's root; as far as the tree goes they teach."""
        node = 0
        for depth, token in enumerate(tokens, depth_offset):
            children = np.flatnonzero(tree.parents == node)
            if len(children) == 0:
                return
            level = min(depth, MAX_DEPTH - 1)
            ranks = slice(0, min(len(children), MAX_RANK))
            hit = np.flatnonzero(tree.tokens[children] == token)
            self._seen[level, ranks] *= self._keep
            self._taken[level, ranks] *= self._keep
            self._seen[level, ranks] += 1.0
            if len(hit) == 0:
                return
            self._taken[level, min(int(hit[0]), MAX_RANK - 1)] += 1.0
            node = int(children[hit[0]])
