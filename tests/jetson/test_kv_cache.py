"""The cache of the ONNX Runtime target: what a long conversation leaves behind, and rows that move."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from starsd_edge.decoding.tree import DraftTree
from starsd_edge.types import Float32Array
from starsd_jetson.kv_cache import GROWTH_ROWS, KEPT_ROWS, KvCache

HEADS, DIM = 2, 4


def filled(rows: int, release: Callable[[], None] = lambda: None) -> KvCache:
    """A cache of `rows` committed rows; row i holds i."""
    cache = KvCache(num_layers=2, num_kv_heads=HEADS, head_dim=DIM, release=release)
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
    released: list[int] = []
    cache = filled(KEPT_ROWS, lambda: released.append(1))
    released.clear()
    cache.truncate(0)
    assert (cache.capacity, released) == (KEPT_ROWS, [])


@pytest.mark.parametrize("rows", [1, 40, 4000])
def test_nobody_holds_the_old_buffers_while_new_ones_are_filled(rows: int) -> None:
    """The memory of a long text would be taken twice whenever it grew: 0.8 GiB at 7B and 768 tokens."""
    held: list[object] = []
    cache = filled(rows, held.clear)
    held.extend(cache.buffers.values())
    old = [weakref.ref(buffer) for buffer in cache.buffers.values()]
    left: list[int] = []
    allocate = cache.allocate

    def counting(width: int) -> Float32Array:
        left.append(sum(reference() is not None for reference in old))
        return allocate(width)

    cache.allocate = counting  # type: ignore[method-assign]
    cache.reserve(cache.capacity + 1)
    assert left == [4, 3, 2, 1]


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
