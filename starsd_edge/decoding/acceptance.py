"""How likely a draft node is to be accepted, learnt while decoding.

alpha[d, c] is the probability that the target takes a child at depth d of which its drafter was about
`CONFIDENCE_EDGES[c]` sure, given that it took the parent. Every token that becomes known below a visited node
is one observation for each of that node's children, whether the tree was verified, arrived late or was never
used: nothing has to be spent on trying. A node's probability is the product of alpha along its path.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from starsd_edge.decoding.draft import Draft
from starsd_edge.types import Float64Array, IndexArray

__all__ = ["AcceptanceModel", "along_paths"]

MAX_DEPTH = 5  # deeper levels share the last row: there are few nodes, and they fare alike
# Classes of confidence: below the first edge, between two, above the last; and what is believed of each
# before anything was seen, namely that a drafter is as good as it thinks.
CONFIDENCE_EDGES = np.array([0.02, 0.05, 0.10, 0.20, 0.35, 0.50, 0.65, 0.80])
PRIOR = np.array([0.01, 0.035, 0.07, 0.15, 0.27, 0.42, 0.57, 0.72, 0.90])
PRIOR_WEIGHT = 6.0  # observations that the prior is worth
MEMORY = 300.0  # observations of a class after which an old one counts 1/e: texts change
CALIBRATION_CLASSES = 10  # of predicted probability, equally wide


class AcceptanceModel:
    """Online estimate of alpha, and of how well it predicts."""

    def __init__(self) -> None:
        self._seen = np.full((MAX_DEPTH, len(PRIOR)), PRIOR_WEIGHT)
        self._taken = PRIOR_WEIGHT * np.tile(PRIOR, (MAX_DEPTH, 1))
        self._keep = 1.0 - 1.0 / MEMORY
        # Sums over observations by depth and class of prediction: how many, what was said, what happened.
        self._said = np.zeros((3, MAX_DEPTH, CALIBRATION_CLASSES))

    def conditionals(self, draft: Draft) -> Float64Array:
        """float64 [N]: the probability of each node given its parent; 1 for the root."""
        levels, classes = _cells(draft)
        alphas: Float64Array = (self._taken / self._seen)[levels, classes]
        alphas[0] = 1.0
        return alphas

    def node_probabilities(self, draft: Draft) -> Float64Array:
        """float64 [N]: the probability that the target walks to each node; 1 for the root."""
        return along_paths(self.conditionals(draft), draft.tree.parents.tolist())

    def learn(self, draft: Draft, tokens: Sequence[int]) -> None:
        """`tokens` are what the target said after the tree's root; as far as the tree goes they teach."""
        tree, node = draft.tree, 0
        levels, classes = _cells(draft)
        for token in tokens:
            children = np.flatnonzero(tree.parents == node)
            if len(children) == 0:
                return
            hits = tree.tokens[children] == token
            self._observe(int(levels[children[0]]), classes[children], hits.astype(np.float64))
            if not hits.any():
                return
            node = int(children[hits.argmax()])

    def calibration_error(self) -> list[float]:
        """By depth, from 1 on: mean difference between the probability said and the share that came true,
        over classes of probability as often as they were said. 0 where nothing was seen."""
        count, said, happened = self._said
        difference: Float64Array = np.abs(said - happened).sum(axis=1)
        errors: list[float] = (difference / np.maximum(count.sum(axis=1), 1.0)).tolist()
        return errors

    def _observe(self, level: int, classes: IndexArray, hits: Float64Array) -> None:
        """Children at one depth, of which at most one was taken."""
        said = self._taken[level, classes] / self._seen[level, classes]
        decile = np.minimum((said * CALIBRATION_CLASSES).astype(np.int64), CALIBRATION_CLASSES - 1)
        for sums, values in zip(self._said, (np.ones(len(hits)), said, hits), strict=True):
            sums[level] += np.bincount(decile, values, minlength=CALIBRATION_CLASSES)
        number = np.bincount(classes, minlength=len(PRIOR))
        self._seen[level] = self._seen[level] * self._keep**number + number
        taken = np.bincount(classes, hits, minlength=len(PRIOR))
        self._taken[level] = self._taken[level] * self._keep**number + taken


def along_paths(conditionals: Float64Array, parents: list[int]) -> Float64Array:
    """Products of conditional probabilities from the root to each node."""
    values = conditionals.tolist()
    for node in range(1, len(values)):  # parents come first
        values[node] *= values[parents[node]]
    return np.array(values)


def _cells(draft: Draft) -> tuple[IndexArray, IndexArray]:
    """Row and column of alpha for each node; those of the root mean nothing."""
    levels = np.clip(draft.tree.depths + draft.depth_offset - 1, 0, MAX_DEPTH - 1).astype(np.int64)
    return levels, np.searchsorted(CONFIDENCE_EDGES, draft.confidences, side="right")
