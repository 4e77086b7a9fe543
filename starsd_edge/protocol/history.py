"""What an edge keeps of its context so that a service which lost it can be given it again.

Tokens, and their features as they travel: 8 KiB a token for a 7B model in fp16, half of it in int8. The bound
is in bytes; a context that outgrows it is decoded plainly from there on.
"""

from __future__ import annotations

from starsd_edge.decoding.prefix import Prefix, prefix_crc
from starsd_edge.protocol.features import EncodedRows, FeatureDtype, decode_rows, encode_rows, row_bytes
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
        self._prefix = Prefix()
        self._rows = bytearray()

    @property
    def committed_len(self) -> int:
        return len(self._prefix)

    @property
    def row_bytes(self) -> int:
        return row_bytes(self.dtype, self.width)

    def start(self, first_token: int) -> None:
        self.cut(0)
        self._prefix.append([first_token])

    def extend(self, tokens: TokenArray, features: FeatureArray) -> None:
        """Append rows. Raises ValueError for features that cannot be encoded, OverflowError when full."""
        if len(self._rows) + len(tokens) * self.row_bytes > self.max_bytes:
            raise OverflowError(f"the draft history of {self.max_bytes >> 20} MiB is full")
        self._rows += encode_rows(features, self.dtype).data
        self._prefix.append(tokens)

    def cut(self, committed_len: int) -> None:
        """Forget the tokens from `committed_len` on, and their rows."""
        self._prefix.truncate(min(committed_len, self.committed_len))
        del self._rows[max(self.committed_len - 1, 0) * self.row_bytes :]

    def crc(self, length: int) -> int:
        """Checksum of the first `length` tokens."""
        whole = length == self.committed_len
        return self._prefix.crc if whole else prefix_crc(self._prefix.tokens[:length])

    def tokens(self, start: int, stop: int) -> TokenArray:
        """A copy of tokens [start, stop)."""
        tokens: TokenArray = self._prefix.tokens[start:stop].copy()
        return tokens

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
