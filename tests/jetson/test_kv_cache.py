"""The cache of the ONNX Runtime target: what a long conversation leaves behind, and rows that move."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from starsd_edge.decoding.tree import DraftTree
from starsd_jetson.kv_cache import GROWTH_ROWS, KEPT_ROWS, KvCache

HEADS, DIM = 2, 4


def filled(rows: int) -> KvCache:
    """A cache of `rows` committed rows; row i holds i."""
    cache = KvCache(num_layers=2, num_kv_heads=HEADS, head_dim=DIM)
    cache.reserve(rows)
    for buffer in cache.buffers.values():
        buffer[:, :rows] = np.arange(rows)[None, :, None]
    cache.length = rows
    return cache


@pytest.mark.parametrize(
    ("left", "capacity"),
    [
        (0, KEPT_ROWS),
        (100, KEPT_ROWS),
        (300, 300 + GROWTH_ROWS + 20),  # whole steps of growth
        (480, 512),
        (481, 1024),  # half of it is still needed
        (1000, 1024),
    ],
)
def test_what_a_long_conversation_leaves_gives_the_memory_back(left: int, capacity: int) -> None:
    """Attention runs over the capacity: every later step would cost what one of the long text cost."""
    cache = filled(1024)
    cache.truncate(left)
    assert (cache.length, cache.capacity) == (left, capacity)
    for buffer in cache.buffers.values():
        assert buffer.shape[1] == capacity
        np.testing.assert_array_equal(buffer[0, :left, 0], np.arange(left))


def test_short_conversations_keep_their_buffers() -> None:
    cache = filled(KEPT_ROWS)
    before = cache.allocation
    cache.truncate(0)
    assert (cache.capacity, cache.allocation) == (KEPT_ROWS, before)


def test_a_kept_path_moves_up_in_its_order() -> None:
    cache = filled(10)
    cache.length = 4
    cache.keep([0, 2, 5])
    assert cache.length == 7
    for buffer in cache.buffers.values():
        np.testing.assert_array_equal(buffer[0, :7, 0], [0, 1, 2, 3, 4, 6, 9])
    assert cache.moved_bytes == 2 * 2 * HEADS * (DIM + DIM + 1) * 4  # two rows of two layers


def test_a_target_that_shrank_and_grew_again_says_what_a_new_one_says(
    tiny: Callable[[str], Any], tmp_path: Path
) -> None:
    """Down to KEPT_ROWS and up to the very capacity of before: the bound buffers must be the new ones."""
    target = tiny("llama grouped").export(tmp_path / "bundle", quant="int8")
    text = (np.arange(500) % 140 + 3).astype(np.int32)
    tree = DraftTree.chain([3, 4, 5], 501)
    target.prefill(text)
    expected = target.forward(tree)
    capacity, address = target.cache.capacity, target.cache.buffers["k.0"].ctypes.data
    held = list(target.cache.buffers.values())  # or the allocator might give the same memory again
    target.truncate(0)
    assert target.cache.capacity == KEPT_ROWS
    target.prefill(text)
    again = target.forward(tree)
    assert (target.cache.capacity, target.cache.buffers["k.0"].ctypes.data != address) == (capacity, True)
    assert held
    np.testing.assert_array_equal(again.logits, expected.logits)
    np.testing.assert_array_equal(again.features, expected.features)
