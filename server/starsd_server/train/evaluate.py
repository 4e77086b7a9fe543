"""What a head is worth before it serves: acceptance on held-out text that the target wrote greedily.

Every position of a response is taken as a root at once. The head extends over the true features and grows its
tree as the service would (EAGLE-2: expand the best `width` nodes of a level, keep the best of all); the
target's next tokens say how deep the tree was right. A walk over these answers, root by root, is what a
decoding run would have seen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from starsd_server.heads.head import EagleHead, attention
from starsd_server.train.data import Corpus, gather

__all__ = ["Acceptance", "TreeShape", "acceptance"]

# Rows of text evaluated together; each stands for `width` beams, and their logits must fit.
BATCH_ROWS = 1536


@dataclass(frozen=True, slots=True, order=True)
class TreeShape:
    """depth: levels below the root. width: nodes expanded per level, and children of each. size: N nodes,
    root included."""

    depth: int
    width: int
    size: int


@dataclass(frozen=True, slots=True)
class Acceptance:
    """tau: mean acceptance length, bonus included, over `rounds`. per_depth[d]: of the rounds that accepted d
    draft tokens, the share that accepted one more."""

    shape: TreeShape
    tau: float
    rounds: int
    per_depth: tuple[float, ...]


@torch.inference_mode()
def acceptance(
    head: EagleHead,
    corpus: Corpus,
    sequences: NDArray[np.int64],
    shapes: Sequence[TreeShape],
    dtype: torch.dtype = torch.float32,
) -> list[Acceptance]:
    """Acceptance of each shape over the responses of `sequences`; equal depths and widths share work.
    Matrix products run in `dtype`."""
    ordered = sequences[np.argsort(corpus.lengths[sequences], kind="stable")]
    accepted: dict[TreeShape, list[int]] = {shape: [] for shape in shapes}
    begin = 0
    while begin < len(ordered):
        count = max(1, BATCH_ROWS // int(corpus.lengths[ordered[begin]]))
        group = ordered[begin : begin + count]
        begin += count
        for depth, width in sorted({(shape.depth, shape.width) for shape in shapes}):
            alike = [shape for shape in shapes if (shape.depth, shape.width) == (depth, width)]
            device = head.embedding.device.type
            with torch.autocast(device, dtype, enabled=dtype is not torch.float32):
                walks = _walks(head, corpus, group, alike)
            for shape, lengths in zip(alike, walks, strict=True):
                accepted[shape] += lengths
    return [_summary(shape, np.array(accepted[shape])) for shape in shapes]


def _summary(shape: TreeShape, accepted: NDArray[np.int64]) -> Acceptance:
    reached = [int((accepted >= depth).sum()) for depth in range(shape.depth + 1)]
    per_depth = tuple(reached[d + 1] / max(1, reached[d]) for d in range(shape.depth))
    return Acceptance(shape, 1 + float(accepted.mean()), len(accepted), per_depth)


def _walks(
    head: EagleHead, corpus: Corpus, group: NDArray[np.int64], shapes: list[TreeShape]
) -> list[list[int]]:
    """Per shape, the accepted tokens of each round of each sequence's walk."""
    width = int(corpus.lengths[group].max()) - 1
    batch = gather(corpus, group, width).to(head.embedding.device)
    # Row t drafts what follows the token at t + 1; the first root is the response's first token.
    first = np.maximum(0, corpus.starts[group] - 1)
    right = _levels_right(head, batch.tokens, batch.features, shapes, int(first.min()))
    walks = []
    for levels in right:
        walk = []
        for b, row in enumerate(first):
            while row + shapes[0].depth <= corpus.lengths[group[b]] - 2:
                walk.append(int(levels[b, row - first.min()]))
                row += walk[-1] + 1
        walks.append(walk)
    return walks


def _levels_right(
    head: EagleHead, tokens: Tensor, features: Tensor, shapes: list[TreeShape], first: int
) -> list[Tensor]:
    """Per shape, int [B, T - first]: levels of the tree on row t >= first that hold the true continuation."""
    depth, width = shapes[0].depth, shapes[0].width
    rows = _Rows(first)
    positions = torch.arange(tokens.shape[1], device=tokens.device)
    hidden = head.forward(tokens, head.project(features), positions, rows.extend)[:, first:]
    positions = positions[first:, None].expand(-1, width)
    truth = [torch.roll(tokens, -level, 1)[:, first:] for level in range(1, depth + 1)]

    scores, ids = _best_children(head, hidden, width)  # [B, R, w]
    # A level's candidates [B, R, C], and which of them continue the true path.
    candidates = [(scores, ids == truth[0][..., None])]
    beams = _Beams(ids, scores, candidates[0][1], hidden[:, :, None].expand(-1, -1, width, -1))
    for level in range(1, depth):
        hidden = head.forward(beams.tokens, beams.hidden, positions + level, rows.grow)
        scores, ids = _best_children(head, hidden, width)  # [B, R, w, w]
        scores = (beams.scores[..., None] + scores).flatten(-2)
        ids = ids.flatten(-2)
        true = (ids == truth[level][..., None]) & beams.true.repeat_interleave(width, -1)
        candidates.append((scores, true))
        scores, best = scores.topk(width)
        parent = best // width
        rows.branch(parent)
        above = hidden.gather(2, parent[..., None].expand_as(hidden))
        beams = _Beams(ids.gather(-1, best), scores, true.gather(-1, best), above)
    return [_levels_kept(candidates, shape.size) for shape in shapes]


@dataclass(frozen=True, slots=True)
class _Beams:
    """The nodes of a level that are expanded next, [B, R, w] each; hidden [B, R, w, H] of their parents."""

    tokens: Tensor
    scores: Tensor
    true: Tensor
    hidden: Tensor


def _best_children(head: EagleHead, hidden: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Log-probabilities and target ids [..., count]."""
    best = head.logits(hidden).float().log_softmax(-1).topk(count)
    return best.values, head.draft_to_target[best.indices]


def _levels_kept(candidates: list[tuple[Tensor, Tensor]], size: int) -> Tensor:
    """Levels, from the first on, whose true candidate is among the best `size - 1` of all."""
    pool = torch.cat([scores for scores, _ in candidates], dim=-1)
    bar = pool.topk(min(size - 1, pool.shape[-1])).values[..., -1:]
    kept = torch.stack([(true & (scores >= bar)).any(-1) for scores, true in candidates])
    return kept.int().cumprod(0).sum(0)


class _Rows:
    """Keys and values of the extended rows, and of each level's beams on every row from `first` on."""

    def __init__(self, first: int) -> None:
        self._first = first
        self._levels: list[
            tuple[Tensor, Tensor]
        ] = []  # [B, R, w, kv, D] of each beam's ancestors, then its own

    def extend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self._keys, self._values = k, v
        self._causal = q.new_ones(q.shape[1], q.shape[1], dtype=torch.bool).tril()
        return attention(q, k, v, self._causal)

    def branch(self, parent: Tensor) -> None:
        """The next beams hang under beams `parent` [B, R, w] of the last level."""
        index = parent[..., None, None]
        self._levels = [
            (k.gather(2, index.expand_as(k)), v.gather(2, index.expand_as(v))) for k, v in self._levels
        ]

    def grow(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Beams attend to the extended rows up to their root's, to their ancestors and to themselves."""
        self._levels.append((k, v))
        kv, total = k.shape[-2], self._keys.shape[1]
        grouped = q.unflatten(-2, (kv, q.shape[-2] // kv)).float() / q.shape[-1] ** 0.5  # type: ignore[no-untyped-call]  # torch leaves it untyped
        past = torch.einsum("brwkgd,bskd->brwkgs", grouped, self._keys.float())
        causal = self._causal[self._first :, None, None, None, :]
        own = [
            torch.einsum("brwkgd,brwkd->brwkg", grouped, key.float())[..., None] for key, _ in self._levels
        ]
        shares = torch.cat([past.masked_fill(~causal, -torch.inf), *own], dim=-1).softmax(-1)
        mixed = torch.einsum("brwkgs,bskd->brwkgd", shares[..., :total], self._values.float())
        for level, (_, value) in enumerate(self._levels):
            mixed = mixed + shares[..., total + level, None] * value.float()[..., None, :]
        return mixed.flatten(-3, -2).to(q.dtype)
