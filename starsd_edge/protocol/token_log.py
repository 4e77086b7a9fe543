"""The tokens of one context and their running checksum, as both ends keep them."""

from __future__ import annotations

import zlib

import numpy as np

from starsd_edge.types import TokenArray

__all__ = ["TokenLog", "tokens_crc"]

FIRST_CAPACITY = 256


def tokens_crc(tokens: TokenArray, before: int = 0) -> int:
    """crc32 of `tokens` as little-endian int32, going on from the checksum `before`."""
    return zlib.crc32(tokens.astype(np.dtype("<i4"), copy=False).tobytes(), before)


class TokenLog:
    """Committed tokens that only grow at the end or are cut there. `crc(n)` covers tokens [0, n)."""

    def __init__(self) -> None:
        self._tokens: TokenArray = np.empty(FIRST_CAPACITY, np.int32)
        self._len = 0
        self._crc_len = 0  # the last checksum asked for, so that a longer prefix costs only the new tokens
        self._crc = 0

    def __len__(self) -> int:
        return self._len

    def extend(self, tokens: TokenArray) -> None:
        needed = self._len + len(tokens)
        if needed > len(self._tokens):
            grown = np.empty(max(needed, 2 * len(self._tokens)), np.int32)
            grown[: self._len] = self._tokens[: self._len]
            self._tokens = grown
        self._tokens[self._len : needed] = tokens
        self._len = needed

    def cut(self, length: int) -> None:
        """Forget the tokens from `length` on."""
        self._len = min(self._len, length)
        if self._crc_len > self._len:
            self._crc_len = self._crc = 0

    def crc(self, length: int) -> int:
        """Checksum of the first `length` tokens, which must be there."""
        assert 0 <= length <= self._len
        if length < self._crc_len:
            return tokens_crc(self._tokens[:length])
        self._crc = tokens_crc(self._tokens[self._crc_len : length], self._crc)
        self._crc_len = length
        return self._crc

    def slice(self, start: int, stop: int) -> TokenArray:
        """A copy of tokens [start, stop)."""
        assert 0 <= start <= stop <= self._len
        tokens: TokenArray = self._tokens[start:stop].copy()
        return tokens
