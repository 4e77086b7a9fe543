"""What the service still lacks of a context, cut into requests.

The history has rows up to `committed_len`; the service has acknowledged `acked_len` tokens of it and been
sent `sent_len`. `plan` makes the requests that close the gap: OPEN for the first token, prefill chunks, and
behind them the UPDATE that asks for a tree. Whatever went wrong is mended by `rewind` and planning again, so
there is one path for the first prompt and for every recovery.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from starsd_edge.protocol.codec import Frames, encode, kind_of
from starsd_edge.protocol.history import History
from starsd_edge.protocol.limits import ACK_WINDOW, MAX_ROWS
from starsd_edge.protocol.messages import Head, Hints, MessageKind, Open, Prefill, Update, make_head

__all__ = ["Request", "Uplink"]


@dataclass(slots=True)
class Request:
    """Something under way: what it was, and when it left (for the last time)."""

    kind: MessageKind
    round_id: int
    base_len: int
    frames: Frames
    num_bytes: int
    sent_s: float
    resent: bool = False


class Uplink:
    """`boot_id` is the service's, from its WELCOME."""

    def __init__(self, session: int, history: History) -> None:
        self.session = session
        self.history = history
        self.boot_id = 0
        self.epoch = 0
        self.acked_len = 0
        self.sent_len = 0
        self.in_flight: deque[Request] = deque()
        self._round_id = 0

    def open_context(self, first_token: int) -> None:
        """A new context: nothing of it is at the service."""
        self.epoch += 1
        self.history.start(first_token)
        self.rewind(0)

    def rewind(self, held_len: int) -> None:
        """The service holds at most `held_len` tokens; nothing that is under way counts any more."""
        self.acked_len = min(self.acked_len, held_len)
        self.sent_len = self.acked_len
        self.in_flight.clear()

    def resume(self, head: Head) -> None:
        """A WELCOME says what the service holds: go on from there if it is ours, else from the beginning."""
        self.boot_id = head.boot_id
        ours = (
            head.epoch == self.epoch
            and 0 < head.base_len <= self.history.committed_len
            and self.history.crc(head.base_len) == head.prefix_crc
        )
        self.acked_len = head.base_len if ours else 0
        self.rewind(self.acked_len)

    def plan(self, now_s: float, chunk_bytes: int, hints: Hints, *, may_open: bool) -> list[Request]:
        """The requests to send now; they count as under way."""
        made: list[Request] = []
        if self.sent_len == 0:
            if not may_open:
                return made
            first_token = self.history.token(0)
            made.append(self._request(Open(self._next_head(1), first_token), now_s))
        rows_per_message = max(1, min(chunk_bytes // self.history.row_bytes, MAX_ROWS))
        while (missing := self.history.committed_len - self.sent_len) > rows_per_message:
            if sum(request.kind is MessageKind.PREFILL for request in self.in_flight) >= ACK_WINDOW:
                return made
            made.append(self._rows_request(rows_per_message, None, now_s))
        made.append(self._rows_request(missing, hints, now_s))
        return made

    def settle(self, request: Request) -> None:
        """The answer to it came: it, and what was sent before it, is no longer under way."""
        while self.in_flight.popleft() is not request:
            pass
        self.acked_len = max(self.acked_len, request.base_len)

    def find(self, round_id: int) -> Request | None:
        for request in self.in_flight:
            if request.round_id == round_id:
                return request
        return None

    def _rows_request(self, rows: int, hints: Hints | None, now_s: float) -> Request:
        base_len = self.sent_len + rows
        start = base_len - 1 - rows
        head = self._next_head(base_len)
        tokens = self.history.tokens(start + 1, base_len)
        encoded = self.history.rows(start, start + rows)
        message = Prefill(head, tokens, encoded) if hints is None else Update(head, tokens, encoded, hints)
        return self._request(message, now_s)

    def _next_head(self, base_len: int) -> Head:
        self._round_id += 1
        crc = self.history.crc(base_len)
        return make_head((self.session, self.boot_id, self.epoch, self._round_id, base_len, crc))

    def _request(self, message: Open | Prefill | Update, now_s: float) -> Request:
        head = message.head
        frames = encode(message)
        num_bytes = sum(map(len, frames))
        request = Request(kind_of(message), head.round_id, head.base_len, frames, num_bytes, now_s)
        self.in_flight.append(request)
        self.sent_len = head.base_len
        return request
