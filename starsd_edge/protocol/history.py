"""What an edge keeps of its context so that a service which lost it can be given it again.

Tokens, and their features as they travel: 8 KiB a token for a 7B model in fp16, half of it in int8. The bound
is in bytes; a context that outgrows it is decoded plainly from there on.
"""

from __future__ import annotations

import numpy as np

from starsd_edge.protocol.features import EncodedRows, FeatureDtype, decode_rows, encode_rows, row_bytes
from starsd_edge.protocol.token_log import TokenLog
from starsd_edge.types import FeatureArray, TokenArray

__all__ = ["History"]


class History:
    """Row i pairs the feature of position i with the token at position i + 1; the first token has no row.

    `committed_len` is 0 before `start`, and rows + 1 after it.
    """

    def __init__(self, width: int, dtype: FeatureDtype, max_bytes: int) -> None:
        self.width = width
        self.dtype = dtype
        self.max_bytes = max_bytes
        self._log = TokenLog()
        self._rows = bytearray()

    @property
    def committed_len(self) -> int:
        return len(self._log)

    @property
    def row_bytes(self) -> int:
        return row_bytes(self.dtype, self.width)

    def start(self, first_token: int) -> None:
        self.cut(0)
        self._log.extend(np.array([first_token], np.int32))

    def extend(self, tokens: TokenArray, features: FeatureArray) -> None:
        """Append rows. Raises ValueError for features that cannot be encoded, OverflowError when full."""
        if len(self._rows) + len(tokens) * self.row_bytes > self.max_bytes:
            raise OverflowError(f"the draft history of {self.max_bytes >> 20} MiB is full")
        self._rows += encode_rows(features, self.dtype).data
        self._log.extend(tokens)

    def cut(self, committed_len: int) -> None:
        """Forget the tokens from `committed_len` on, and their rows."""
        self._log.cut(committed_len)
        del self._rows[max(self.committed_len - 1, 0) * self.row_bytes :]

    def crc(self, length: int) -> int:
        return self._log.crc(length)

    def tokens(self, start: int, stop: int) -> TokenArray:
        return self._log.slice(start, stop)

    def rows(self, start: int, stop: int) -> EncodedRows:
        """Rows [start, stop), as they travel."""
        size = self.row_bytes
        data = bytes(memoryview(self._rows)[start * size : stop * size])
        return EncodedRows(self.dtype, stop - start, self.width, data)

    def recode(self, dtype: FeatureDtype) -> None:
        """Keep the rows in another dtype: the service takes only that one."""
        if dtype is self.dtype:
            return
        count = max(self.committed_len - 1, 0)
        decoded = decode_rows(self.rows(0, count))
        self.dtype = dtype
        self._rows = bytearray(encode_rows(decoded, dtype).data)
