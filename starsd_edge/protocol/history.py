"""What an edge keeps of its context so that a service which lost it can be given it again.

Tokens, and their features as they travel: 8 KiB a token for a 7B model in fp16, half of it in int8. The bound
is in bytes; a context that outgrows it is decoded plainly from there on.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right

from starsd_edge.decoding.prefix import Prefix, prefix_crc
from starsd_edge.protocol.features import EncodedRows, FeatureDtype, decode_rows, encode_rows, row_bytes
from starsd_edge.protocol.head import Buffer
from starsd_edge.types import FeatureArray, TokenArray

__all__ = ["History"]


class History:
    """Row i pairs the feature of position i with the token at position i + 1; the first token has no row.

    `committed_len` is 0 before `start`, and rows + 1 after it. Rows stay in the pieces they came in: what was
    committed last is what is sent next, and leaves as it lies here.
    """

    def __init__(self, width: int, dtype: FeatureDtype, max_bytes: int) -> None:
        self.width = width
        self.dtype = dtype
        self.max_bytes = max_bytes
        self._prefix = Prefix()
        self.row_bytes = row_bytes(dtype, width)  # as they travel
        self._newest: EncodedRows | None = None  # the last piece, where it is what came in last
        self._pieces: list[Buffer] = []
        self._starts: list[int] = []  # the first row of each piece
        self._num_rows = 0

    @property
    def committed_len(self) -> int:
        return self._prefix.length

    def start(self, first_token: int) -> None:
        self.cut(0)
        self._prefix.append([first_token])

    def extend(self, tokens: TokenArray, features: FeatureArray) -> None:
        """Append rows; `features` are kept as they are where they can be.

        Raises ValueError for features that cannot be encoded, OverflowError when full.
        """
        if (self._num_rows + len(tokens)) * self.row_bytes > self.max_bytes:
            raise OverflowError(f"the draft history of {self.max_bytes >> 20} MiB is full")
        encoded = encode_rows(features, self.dtype)
        self._add(encoded.data)
        self._newest = encoded
        self._prefix.append(tokens)

    def cut(self, committed_len: int) -> None:
        """Forget the tokens from `committed_len` on, and their rows."""
        self._prefix.truncate(min(committed_len, self.committed_len))
        keep = max(self.committed_len - 1, 0)
        if self._num_rows > keep:
            self._newest = None
        while self._num_rows > keep:
            self._num_rows = self._starts.pop()
            piece = self._pieces.pop()
            if self._num_rows < keep:
                self._add(piece[: (keep - self._num_rows) * self.row_bytes])

    def crc(self, length: int) -> int:
        """Checksum of the first `length` tokens."""
        whole = length == self.committed_len
        return self._prefix.crc if whole else prefix_crc(self._prefix.tokens[:length])

    def tokens(self, start: int, stop: int) -> TokenArray:
        """A copy of tokens [start, stop)."""
        return self._prefix.copy(start, stop)

    def token(self, position: int) -> int:
        return self._prefix.token(position)

    def rows(self, start: int, stop: int) -> EncodedRows:
        """Rows [start, stop), as they travel."""
        newest = self._newest
        if newest is not None and start == self._num_rows - newest.rows and stop == self._num_rows:
            return newest
        return EncodedRows(self.dtype, stop - start, self.width, self._data(start, stop))

    def _data(self, start: int, stop: int) -> Buffer:
        first, last = bisect_right(self._starts, start) - 1, bisect_left(self._starts, stop)
        if start == stop:
            return b""
        from_first = start - self._starts[first]
        pieces = self._pieces[first:last]
        if len(pieces) > 1 or from_first or len(pieces[0]) != (stop - start) * self.row_bytes:
            whole = memoryview(b"".join(pieces))[from_first * self.row_bytes :]
            return bytes(whole[: (stop - start) * self.row_bytes])
        return pieces[0]

    def _add(self, piece: Buffer) -> None:
        if piece:
            self._pieces.append(piece)
            self._starts.append(self._num_rows)
            self._num_rows += len(piece) // self.row_bytes

    def recode(self, dtype: FeatureDtype) -> None:
        """Keep the rows in another dtype: the service takes only that one."""
        if dtype is self.dtype:
            return
        decoded = decode_rows(self.rows(0, self._num_rows))
        self.dtype, self.row_bytes, self._newest = dtype, row_bytes(dtype, self.width), None
        self._pieces, self._starts, self._num_rows = [], [], 0
        self._add(encode_rows(decoded, dtype).data)
