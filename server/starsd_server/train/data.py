"""What a head learns from: token sequences and the target's feature of every token.

Sequences lie end to end in flat arrays, as does their feature cache on disk, a memory-mapped float16 file. A
batch has one of a few widths, so that every tensor of a training run has one of a few shapes: allocators and
kernels that cache by shape then stop allocating after the first minute.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

__all__ = ["Batch", "Corpus", "batches", "draft_vocabulary"]

# Batch widths are multiples of this many rows: 9% padding at a mean of 184 tokens, and only a dozen shapes.
WIDTH_STEP_ROWS = 32


@dataclass(frozen=True, slots=True)
class Corpus:
    """Sequences laid end to end.

    tokens    int32 [total]
    features  float16 [total, F], usually memory-mapped
    offsets   int64 [sequences + 1]
    starts    int64 [sequences], index within each sequence of the first token the target wrote itself
    greedy    bool [sequences], True where the target wrote the most probable token each time
    """

    tokens: NDArray[np.int32]
    features: NDArray[np.float16]
    offsets: NDArray[np.int64]
    starts: NDArray[np.int64]
    greedy: NDArray[np.bool_]

    @property
    def lengths(self) -> NDArray[np.int64]:
        return np.diff(self.offsets)

    def responses(self, sequences: NDArray[np.int64]) -> Iterator[NDArray[np.int32]]:
        """The part of each sequence that the target wrote."""
        for i in sequences:
            yield self.tokens[self.offsets[i] + self.starts[i] : self.offsets[i + 1]]


@dataclass(frozen=True, slots=True)
class Batch:
    """B sequences of up to T rows; row t pairs the feature of position t with the token at t + 1.

    tokens    int64 [B, T]
    features  float32 [B, T, F]
    teacher   float32 [B, T, F], the target's feature of position t + 1: what the head should have guessed
    valid     bool [B, T], rows whose guess counts: the target wrote (or is to write) the token after them
    """

    tokens: Tensor
    features: Tensor
    teacher: Tensor
    valid: Tensor

    def to(self, device: torch.device) -> Batch:
        parts = (self.tokens, self.features, self.teacher, self.valid)
        return Batch(*(part.to(device, non_blocking=True) for part in parts))


def draft_vocabulary(corpus: Corpus, sequences: NDArray[np.int64], vocab_size: int, size: int) -> Tensor:
    """The `size` tokens the target writes most often, as ascending int64 ids; ties go to the lower id."""
    counts = np.zeros(vocab_size, np.int64)
    for response in corpus.responses(sequences):
        counts += np.bincount(response, minlength=vocab_size)
    return torch.from_numpy(np.sort(np.argsort(-counts, kind="stable")[:size]))


def batches(
    corpus: Corpus, sequences: NDArray[np.int64], rows: int, seed: int, epoch: int, skip: int = 0
) -> Iterator[Batch]:
    """One epoch in an order that (seed, epoch) decide, from batch `skip` on.

    A batch holds sequences of one width and about `rows` rows, padding included. What does not fill a batch
    waits for the next epoch's order.
    """
    rng = np.random.default_rng((seed, epoch))
    order = rng.permutation(sequences)
    widths = -(-(corpus.lengths[order] - 1) // WIDTH_STEP_ROWS) * WIDTH_STEP_ROWS
    groups = []
    for width in np.unique(widths):
        members, per_batch = order[widths == width], max(1, rows // int(width))
        full = len(members) // per_batch * per_batch
        groups += [(int(width), group) for group in members[:full].reshape(-1, per_batch)]
    for i in rng.permutation(len(groups))[skip:]:
        width, group = groups[i]
        yield gather(corpus, group, width)


def gather(corpus: Corpus, sequences: NDArray[np.int64], width: int) -> Batch:
    """Rows of `sequences`, padded to `width`."""
    shape = (len(sequences), width)
    tokens = np.zeros(shape, np.int64)
    features = np.zeros((*shape, corpus.features.shape[1]), np.float32)
    teacher = np.zeros_like(features)
    valid = np.zeros(shape, np.bool_)
    for b, i in enumerate(sequences):
        begin, end = corpus.offsets[i], corpus.offsets[i + 1]
        n = end - begin - 1
        tokens[b, :n] = corpus.tokens[begin + 1 : end]
        features[b, :n] = corpus.features[begin : end - 1]
        teacher[b, :n] = corpus.features[begin + 1 : end]
        valid[b, max(0, corpus.starts[i] - 1) : n] = True
    return Batch(*(torch.from_numpy(array) for array in (tokens, features, teacher, valid)))
