"""Keys and values of one context, in place: the graph writes new rows, nothing old is copied.

Each layer has keys [n_kv, C, dim] and values [n_kv, C, dim + 1] (a column of ones beside them). Attention
runs over all of the capacity C, so C grows in small steps, and a long conversation gives it back.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from starsd_edge.types import Float32Array

__all__ = ["KV_BLOCK", "GROWTH_ROWS", "KvCache"]

# Attention sums keys in blocks of at least this many (MLAS packs at most 128 deep for narrow products).
KV_BLOCK = 128
# Rows read in vain against rows copied: few at a time while there are few, a share of what is there later, so
# that a step's part of the copies stays below GROWTH_SHARE rows however long the text becomes.
GROWTH_ROWS = 32
GROWTH_SHARE = 16
# Given back when a conversation leaves less than one row in SHRINK_FACTOR in use, but never below KEPT_ROWS:
# binding new buffers takes as long as some steps, and so few rows hardly show in one.
KEPT_ROWS = 256
SHRINK_FACTOR = 2


class KvCache:
    """Buffers by graph input name, and how many rows of them are committed.

    release      called before buffers are replaced: whoever bound them lets go, or the memory is taken twice
    moved_bytes  rows of kept paths that were moved up, in all
    grown_bytes  rows that were copied into buffers of another size, in all
    """

    def __init__(
        self, num_layers: int, num_kv_heads: int, head_dim: int, release: Callable[[], None]
    ) -> None:
        self.release = release
        self.widths = {}
        for layer in range(num_layers):
            self.widths[f"k.{layer}"] = head_dim
            self.widths[f"v.{layer}"] = head_dim + 1
        self.num_kv_heads = num_kv_heads
        self.length = 0
        self.moved_bytes = self.grown_bytes = 0
        self.capacity = GROWTH_ROWS
        self.buffers = {name: self.allocate(width) for name, width in self.widths.items()}

    def allocate(self, width: int) -> Float32Array:
        # Rows never written must not hold NaN: their weight is zero, and 0 * NaN is NaN.
        return np.zeros((self.num_kv_heads, self.capacity, width), np.float32)

    def reserve(self, rows: int) -> bool:
        """Make room for `rows` rows; True when the buffers are new ones."""
        if rows <= self.capacity:
            return False
        self.resize(max(rows, self.capacity + self.capacity // GROWTH_SHARE))
        return True

    def resize(self, rows: int) -> None:
        """New buffers for at least `rows` rows, the committed ones copied into them."""
        self.capacity = -(-rows // GROWTH_ROWS) * GROWTH_ROWS
        self.release()
        for name, width in self.widths.items():
            resized = self.allocate(width)
            resized[:, : self.length] = self.buffers[name][:, : self.length]
            self.grown_bytes += resized[:, : self.length].nbytes
            self.buffers[name] = resized

    def keep(self, path: list[int]) -> None:
        """Commit the rows of `path` among those written past `length`, in that order."""
        moves = [
            (self.length + node, self.length + index) for index, node in enumerate(path) if index != node
        ]
        for buffer in self.buffers.values() if moves else ():
            for source, target in moves:  # towards the front and in order: none is lost
                buffer[:, target] = buffer[:, source]
            self.moved_bytes += len(moves) * buffer[:, 0].nbytes
        self.length += len(path)

    def truncate(self, length: int) -> None:
        self.length = min(self.length, length)
        needed = max(KEPT_ROWS, self.length + GROWTH_ROWS)
        if self.capacity >= SHRINK_FACTOR * needed:
            self.resize(needed)
