"""One client's connection, bounded before the application hears of it: how long the head of a request may
be and take."""

from __future__ import annotations

import asyncio
import logging
import sys
from http import HTTPStatus
from typing import Any

import h11
from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from starsd_edge.endpoint.lingering import LINGER_S
from starsd_edge.endpoint.openai import error_body
from starsd_edge.errors import UsageError

__all__ = ["MAX_HEAD_BYTES", "Connection"]

MAX_HEAD_BYTES = 32 * 1024  # request line and headers; a long cookie or token fits many times over
HEAD_TIMEOUT_S = 10.0  # a head comes in one go
RETRY_AFTER_S = 5  # an idle connection is closed within that


log = logging.getLogger(__name__)
# uvicorn warns of whatever it cannot read, and anybody can send that; faults of ours are errors.
log.addFilter(lambda record: record.levelno > logging.WARNING)


class _Reader(h11.Connection):
    """h11's, which bounds heads only as long as they are incomplete."""

    def next_event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        before = len(self.trailing_data[0]) if self.their_state is h11.IDLE else 0
        event = super().next_event()
        if isinstance(event, h11.Request) and before - len(self.trailing_data[0]) > MAX_HEAD_BYTES:
            raise h11.RemoteProtocolError("head too long", error_status_hint=431)
        return event


class Connection(H11Protocol):
    """uvicorn's own, which waits for the head of a request without an end and calls every refusal a 400.

    refusal  why this connection is not served ("" when it is): told with status 503
    """

    head_timeout_s = HEAD_TIMEOUT_S
    _timer: asyncio.TimerHandle | None = None
    _refused = False

    def __init__(
        self, config: Config, server_state: ServerState, app_state: dict[str, Any], refusal: str = ""
    ) -> None:
        super().__init__(config, server_state, app_state)
        self.conn = _Reader(h11.SERVER, MAX_HEAD_BYTES)
        self.logger = log
        self._refusal = refusal

    @property
    def waits(self) -> bool:
        """Whether its client has to say something first: the head of a request, or the rest of its body."""
        return self.conn.their_state in (h11.IDLE, h11.SEND_BODY)

    def hang_up(self) -> None:
        """Make room for somebody else."""
        self._stop_timing()
        self.transport.abort()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if self._refusal:
            self._refuse(503, self._refusal)
        else:
            self._time_the_head()

    def data_received(self, data: bytes) -> None:
        if not self._refused:
            super().data_received(data)
            self._time_the_head()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._time_the_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timing()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        """What h11 could not read. It knows better than 400 for a head without an end."""
        error = sys.exc_info()[1]
        status = error.error_status_hint if isinstance(error, h11.RemoteProtocolError) else 400
        if status == 431:
            msg = f"the head of a request has more than {MAX_HEAD_BYTES} bytes"
        self._refuse(status, msg)

    def _time_the_head(self) -> None:
        """The clock runs from the connection's start, or the last answer's end, to the next whole head."""
        if self._refused:
            return
        if self.transport.is_closing() or self.conn.their_state is not h11.IDLE:
            self._stop_timing()
        elif self._timer is None:
            self._timer = self.loop.call_later(self.head_timeout_s, self._late)

    def _stop_timing(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _late(self) -> None:
        if self.conn.trailing_data[0]:
            self._refuse(408, f"the head of a request has {self.head_timeout_s:g} s to arrive")
        else:
            self.transport.close()  # nothing was asked

    def _refuse(self, status: int, message: str) -> None:
        """Answer without the application, and hang up: at once, or when the client has stopped sending."""
        self._refused = True
        self._stop_timing()
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.close()  # in the middle of an answer
            return
        body = error_body(UsageError(message), "server_error" if status == 503 else "invalid_request_error")
        headers = [("content-type", "application/json"), ("content-length", f"{len(body)}")]
        if status == 503:
            headers.append(("retry-after", f"{RETRY_AFTER_S}"))
        headers.append(("connection", "close"))
        response = h11.Response(status_code=status, reason=HTTPStatus(status).phrase, headers=headers)
        for event in (response, h11.Data(data=body), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._timer = self.loop.call_later(LINGER_S, self.transport.close)
