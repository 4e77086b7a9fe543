"""The prefix: committed tokens of a context, and the checksum that both ends of a link compare."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import numpy as np

from starsd_edge.types import TokenArray

__all__ = ["Prefix", "common_length", "prefix_crc"]

LITTLE_ENDIAN = np.dtype("<i4")
FIRST_CAPACITY = 256  # tokens; doubles as the prefix grows


def prefix_crc(tokens: TokenArray, crc: int = 0) -> int:
    """CRC-32 over the tokens as little-endian int32; pass the checksum of what went before as `crc`."""
    return zlib.crc32(np.asarray(tokens, LITTLE_ENDIAN).tobytes(), crc)


def common_length(a: TokenArray, b: TokenArray) -> int:
    """How many leading tokens two contexts share."""
    length = min(len(a), len(b))
    different = np.flatnonzero(a[:length] != b[:length])
    return int(different[0]) if len(different) else length


class Prefix:
    """Committed tokens, growing at the end and cut from the end; `length` is how many, `crc` runs along.

    An `append` is visible at once or not at all: an interrupt cannot leave half of it.
    """

    def __init__(self) -> None:
        self._buffer = np.empty(FIRST_CAPACITY, np.int32)
        self.length = 0
        self._crc = 0
        self._crc_length = 0  # tokens that _crc covers

    def __len__(self) -> int:
        return self.length

    @property
    def tokens(self) -> TokenArray:
        """int32 [committed_len]; a read-only view, good until the prefix changes."""
        view = self._buffer[: self.length]
        view.flags.writeable = False
        return view

    @property
    def crc(self) -> int:
        """prefix_crc of all tokens."""
        if self._crc_length < self.length:
            self._crc = prefix_crc(self._buffer[self._crc_length : self.length], self._crc)
            self._crc_length = self.length
        return self._crc

    def token(self, position: int) -> int:
        """The one at `position`, which is below the length."""
        return int(self._buffer[position])

    def copy(self, start: int, stop: int) -> TokenArray:
        """Tokens [start, stop) of their own."""
        tokens: TokenArray = self._buffer[start : min(stop, self.length)].copy()
        return tokens

    def append(self, tokens: Sequence[int] | TokenArray) -> None:
        length = self.length + len(tokens)
        if length > len(self._buffer):
            buffer = np.empty(max(length, 2 * len(self._buffer)), np.int32)
            buffer[: self.length] = self._buffer[: self.length]
            self._buffer = buffer
        self._buffer[self.length : length] = tokens
        self.length = length

    def truncate(self, length: int) -> None:
        """Forget every token from `length` on."""
        if not 0 <= length <= self.length:
            raise ValueError(f"cannot cut a prefix of {self.length} tokens to {length}")
        if length < self._crc_length:
            self._crc, self._crc_length = 0, 0
        self.length = length
