"""A draft at hand: a tree, where it stands in the text, and how sure of each node its drafter was."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from starsd_edge.decoding.tree import DraftTree
from starsd_edge.types import Float64Array

__all__ = ["Draft", "order_confidences"]


@dataclass(frozen=True, slots=True)
class Draft:
    """A tree at hand: it continues exactly what is committed.

    depth_offset  levels it lost to tokens committed since it was drafted
    age_s         from sending its update to its arrival
    origin        who drafted it
    with_prompt   its update carried the prompt too: its age says nothing of the next one's
    draft_s       of age_s, what its drafter spent on drafting; 0: it did not say
    ahead         drafted while the tree before it was verified, and goes on where that one ends
    confidences   float64 [N] in (0, 1]: how likely its drafter holds each node, given its parent; left out,
                  read off the order of the nodes
    """

    tree: DraftTree
    depth_offset: int
    age_s: float
    origin: str = ""
    with_prompt: bool = False
    draft_s: float = 0.0
    ahead: bool = False
    confidences: Float64Array = field(default_factory=lambda: np.empty(0))

    def __post_init__(self) -> None:
        if len(self.confidences) == 0:
            object.__setattr__(self, "confidences", order_confidences(self.tree))

    def after(self, tokens: list[int]) -> Draft | None:
        """What is left once `tokens` are committed; None when they leave the tree or use it up."""
        nodes = self.tree.nodes_below(tokens)
        if len(nodes) < 2:
            return None
        left = self.tree.subset(nodes, len(tokens))
        depth_offset = self.depth_offset + len(tokens)
        confidences = self.confidences[nodes]
        return Draft(left, depth_offset, self.age_s, self.origin, ahead=self.ahead, confidences=confidences)


def order_confidences(tree: DraftTree) -> Float64Array:
    """What a tree's order tells of the probabilities it was sorted by: float64 [N], given the parent.

    Nodes come by falling cumulative probability, and that falls about as 1 / i over the nodes of a tree. So
    parent / node, as indices, is one estimate of a node's conditional probability (none below the root),
    and its share of 1 / i among its siblings another; their geometric mean is taken. Probabilities
    themselves do not cross the wire. `acceptance.AcceptanceModel` learns what the estimate is worth.
    """
    count = len(tree)
    inverse = np.zeros(count)
    inverse[1:] = 1.0 / np.arange(1, count)
    parents = tree.parents[1:]
    shares = inverse[1:] / np.bincount(parents, inverse[1:], minlength=count)[parents]
    ratios = np.where(parents > 0, parents * inverse[1:], shares)
    confidences = np.ones(count)
    confidences[1:] = np.sqrt(shares * ratios)
    return confidences
