"""Draft keys and values: one slot per session, rows in order, and no way to read past a slot's own end.

A slot holds a session's committed rows and, behind them while a tree grows, the rows of the tree. Dropping
the tree, or rows that a rollback took back, is setting a number; nothing is moved or copied.
"""

from __future__ import annotations

import torch
from torch import Tensor

from starsd_server.heads.head import HeadConfig

__all__ = ["KvCache"]


class KvCache:
    """All slots of one head.

    One tensor [slots, 2, kv_heads, max_len, D]: exactly `slots * max_len * row_bytes` bytes.
    """

    def __init__(
        self, config: HeadConfig, slots: int, max_len: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        shape = (slots, 2, config.num_kv_heads, max_len, config.head_dim)
        # Zeroed lazily by the system: a slot costs memory from the rows that were written to it.
        self._rows = torch.zeros(shape, dtype=dtype, device=device)
        self._slots = list(self._rows.unbind(0))
        self._keys_values = [slot.unbind(0) for slot in self._slots]
        self._lengths = [0] * slots
        self.max_len = max_len

    @staticmethod
    def row_bytes(config: HeadConfig, dtype: torch.dtype) -> int:
        """Bytes that one row of one session takes."""
        return 2 * config.num_kv_heads * config.head_dim * dtype.itemsize

    @property
    def num_bytes(self) -> int:
        return self._rows.numel() * self._rows.element_size()

    def length(self, slot: int) -> int:
        """Rows in the slot."""
        return self._lengths[slot]

    def append(self, slot: int, rows: Tensor) -> None:
        """Write rows behind the last one: [2, kv_heads, n, D], keys and values.

        Raises:
            ValueError: the slot has no room for them.
        """
        start, count = self._lengths[slot], rows.shape[2]
        if start + count > self.max_len:
            raise ValueError(f"slot {slot} holds {start} of {self.max_len} rows: no room for {count}")
        self._slots[slot].narrow(2, start, count).copy_(rows)
        self._lengths[slot] = start + count

    def truncate(self, slot: int, length: int) -> None:
        """Forget every row from `length` on.

        Raises:
            ValueError: the slot is shorter than that.
        """
        if not 0 <= length <= self._lengths[slot]:
            raise ValueError(f"slot {slot} holds {self._lengths[slot]} rows, not {length}")
        self._lengths[slot] = length

    def rows(self, slot: int) -> tuple[Tensor, Tensor]:
        """Keys and values of all rows of the slot and of nothing else: views of [kv_heads, len, D]."""
        keys, values = self._keys_values[slot]
        length = self._lengths[slot]
        return keys.narrow(1, 0, length), values.narrow(1, 0, length)
