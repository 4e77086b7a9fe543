"""What a target costs and how exact it is, measured on the device it runs on.

Both leave the target's cache empty, and work on any roles.Target.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from starsd_edge.decoding.costs import CostCurve
from starsd_edge.decoding.roles import Invariance, Target
from starsd_edge.decoding.tree import NO_PARENT, DraftTree
from starsd_edge.types import Float32Array

__all__ = ["SIZES", "closer_than", "measure_costs", "measure_invariance", "probe_tokens"]

SIZES = (1, 2, 4, 8, 16, 32, 64)
PAST_TOKENS = 128  # a short chat's context
MIN_ROUNDS = 3
PROBE_PAST_TOKENS = 24
PROBE_SIZES = (2, 3, 4, 8, 16)
MARGIN_STEPS = 64
HOPELESS_NOISE = 0.1  # logits; above it a margin guard would settle every other token by a plain forward


def measure_costs(target: Target, budget_s: float = 2.0, sizes: Sequence[int] = SIZES) -> CostCurve:
    """Median forward time over n = 1, 2, 4, ... 64 rows, sizes interleaved so that a disturbance hits them
    all.

    Takes about `budget_s`, more on a device whose MIN_ROUNDS rounds need longer.
    """
    target.truncate(0)
    target.prefill(probe_tokens(target, min(PAST_TOKENS, target.spec.max_len // 2)))
    largest = target.max_tree_size()
    sizes = [size for size in sizes if size <= largest]
    trees = [DraftTree.chain(probe_tokens(target, size).tolist(), target.kv_len + 1) for size in sizes]
    for tree in trees:  # the first forward of a size binds its buffers
        target.forward(tree)
    samples: list[list[float]] = [[] for _ in trees]
    end = time.perf_counter() + budget_s
    while len(samples[0]) < MIN_ROUNDS or time.perf_counter() < end:
        for tree, seconds in zip(trees, samples, strict=True):
            start = time.perf_counter()
            target.forward(tree)
            seconds.append(time.perf_counter() - start)
    target.truncate(0)
    return CostCurve.monotone(sizes, [float(np.median(seconds)) for seconds in samples])


def measure_invariance(target: Target) -> Invariance:
    """Compare the logits of trees, node by node, with those of the same tokens one after the other."""
    past = probe_tokens(target, PROBE_PAST_TOKENS)
    target.truncate(0)
    target.prefill(past)
    noise, same = 0.0, True
    for size in PROBE_SIZES:
        tree = comb(probe_tokens(target, size), target.kv_len + 1)
        together = target.forward(tree).logits
        path = tree.path(size - 1)
        alone = one_by_one(target, tree, path)
        noise = max(noise, float(np.abs(together[path] - alone).max()))
        same = same and np.array_equal(together[path], alone)
    target.truncate(0)
    return Invariance(bitwise=same, noise=noise, exact_tree=same or noise < HOPELESS_NOISE)


def closer_than(target: Target, margin: float) -> float:
    """Share of greedy plain steps whose best token won by less than `margin` logits: what the margin guard
    would not trust a tree with."""
    target.truncate(0)
    logits = target.prefill(probe_tokens(target, PROBE_PAST_TOKENS)).logits[0]
    close = 0
    for _ in range(MARGIN_STEPS):
        close += float(np.ptp(np.partition(logits, -2)[-2:])) < margin
        tree = DraftTree.root_only(int(logits.argmax()), target.kv_len + 1)
        logits = target.forward(tree).logits[0]
        target.keep([0])
    target.truncate(0)
    return close / MARGIN_STEPS


def probe_tokens(target: Target, count: int) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    """Different tokens, spread over the vocabulary."""
    return (np.arange(1, count + 1) * 7919 % target.spec.vocab_size).astype(np.int32)


def comb(tokens: np.ndarray[tuple[int], np.dtype[np.int32]], base_len: int) -> DraftTree:
    """Node i hangs below i - 2: the last node's path has siblings between its own nodes."""
    parents = np.maximum(np.arange(len(tokens)) - 2, 0).astype(np.int32)
    parents[0] = NO_PARENT
    return DraftTree(tokens, parents, base_len)


def one_by_one(target: Target, tree: DraftTree, path: list[int]) -> Float32Array:
    """Logits [len(path), V] of plain steps along `path`; the cache is as before."""
    start = target.kv_len
    rows = []
    for node in path:
        rows.append(target.forward(DraftTree.root_only(int(tree.tokens[node]), target.kv_len + 1)).logits[0])
        target.keep([0])
    target.truncate(start)
    return np.stack(rows)
