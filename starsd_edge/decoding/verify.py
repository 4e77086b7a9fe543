"""Verification: walk from the root while the picked token is a child.

Lossless by construction: the token at each visited node is picked exactly as plain decoding would pick it
after the same tokens, so a draft decides only how far one forward reaches. Tokens are picked at visited nodes
only. (Equivalent in law to EAGLE-2's rejection rule with one-hot proposals, and the same text for a seed.)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from starsd_edge.decoding.sampling import SamplingParams, pick
from starsd_edge.decoding.tree import DraftTree
from starsd_edge.types import Float32Array, TokenArray

__all__ = ["Acceptance", "verify"]


@dataclass(frozen=True, slots=True)
class Acceptance:
    """What a verified tree settled.

    path      node indices, root first: the rows of the target's KV cache to keep
    tokens    the tokens to commit, one a node of `path`: those of path[1:], then the bonus token
    margin    the least margin of the decisions taken (infinite when none was)
    guarded   the walk ended at a decision whose margin is below the guard: a plain forward must settle it.
              Then the last node walked to is not in `path` (its row will be run again) but its token, which
              was decided safely, is the bonus. An empty path: not even the root's decision was safe.
    """

    path: list[int]
    tokens: list[int]
    margin: float
    guarded: bool = False

    @property
    def num_accepted(self) -> int:
        """Draft tokens accepted: excludes root and bonus."""
        return max(len(self.path) - 1, 0)

    def first(self, count: int) -> Acceptance:
        """The acceptance of the first `count` >= 1 tokens: a stop token or a limit cuts the rest."""
        if count >= len(self.tokens):
            return self
        return Acceptance(self.path[:count], self.tokens[:count], self.margin)


def verify(
    tree: DraftTree,
    logits: Float32Array,
    params: SamplingParams,
    context: Sequence[int] | TokenArray,
    guard: float = 0.0,
) -> Acceptance:
    """Decide which path of `tree` the target takes.

    logits   float32 [N, V], row i follows the path to node i
    context  the `tree.base_len` committed tokens, root included
    guard    least margin at which a decision of this forward is trusted; 0 for a plain step, and for a
             runtime whose rows are bitwise those of plain decoding
    """
    path: list[int] = []
    tokens: list[int] = []
    seen = np.asarray(context).tolist() if params.penalised else []
    node: int | None = 0
    margin = math.inf
    while node is not None:
        decided = pick(logits[node], params, tree.base_len + len(tokens), seen)
        if decided.margin < guard:
            return Acceptance(path, tokens, margin, guarded=True)
        path.append(node)
        tokens.append(decided.token)
        margin = min(margin, decided.margin)
        if params.penalised:
            seen.append(decided.token)
        node = tree.child(node, decided.token)
    return Acceptance(path, tokens, margin)
