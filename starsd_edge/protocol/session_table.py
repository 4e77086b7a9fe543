"""All sessions of a service, keyed by (authenticated device, session id).

Never by the return address: an edge that changes networks or reconnects comes from another one, and its
session goes on. A peer can reach only sessions of the device whose key it holds.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from starsd_edge.protocol.codec import encode
from starsd_edge.protocol.messages import Busy, BusyReason, Head, Hello, Message
from starsd_edge.protocol.server_connection import Reply, ServerConnection, ServerEvent, ServiceOffer
from starsd_edge.protocol.states import ServerState

__all__ = ["SessionKey", "SessionTable"]

SESSIONS_RETRY_MS = 5_000  # long enough for a lease to run out meanwhile, short enough for a user


class SessionKey(NamedTuple):
    """A session's name at the service. Looked up many times a round: a tuple's hash is quick."""

    device: str
    session: int


@dataclass(slots=True)
class Seat:
    connection: ServerConnection
    last_heard_s: float


class SessionTable:
    """Finds, makes and expires the connections. `now_s` is monotonic seconds, given by the caller."""

    def __init__(
        self, offer: ServiceOffer, *, max_sessions_per_device: int = 4, max_sessions: int = 256
    ) -> None:
        self._offer = offer
        self._max_per_device = max_sessions_per_device
        self._max = max_sessions
        self._seats: dict[SessionKey, Seat] = {}
        self._draining = False

    def __len__(self) -> int:
        return len(self._seats)

    def __iter__(self) -> Iterator[SessionKey]:
        return iter(list(self._seats))

    def get(self, key: SessionKey) -> ServerConnection | None:
        seat = self._seats.get(key)
        return None if seat is None else seat.connection

    def receive(
        self, device: str, message: Message, now_s: float
    ) -> tuple[ServerConnection, list[ServerEvent]]:
        """The connection that `message` belongs to, and what it means there.

        Only a HELLO takes a seat. Anything else for a session that has none is answered by a passing
        connection in state NEW: NEED_PREFILL for rows, and a PING is a PING.
        """
        key = SessionKey(device, message.head.session)
        seat = self._seats.get(key)
        if seat is None:
            return self._receive_first(key, message, now_s)
        seat.last_heard_s = now_s
        events = seat.connection.receive(message)
        if seat.connection.state is ServerState.CLOSED:
            del self._seats[key]
        return seat.connection, events

    def _receive_first(
        self, key: SessionKey, message: Message, now_s: float
    ) -> tuple[ServerConnection, list[ServerEvent]]:
        connection = ServerConnection(key.session, self._offer)
        connection.draining = self._draining
        if isinstance(message, Hello) and (reason := self._full(key.device)) is not None:
            head = Head(key.session, self._offer.boot_id)
            return connection, [Reply(encode(Busy(head, SESSIONS_RETRY_MS, reason)))]
        events = connection.receive(message)
        if connection.state is ServerState.GREETED:
            self._seats[key] = Seat(connection, now_s)
        return connection, events

    def _full(self, device: str) -> BusyReason | None:
        if self._draining:
            return BusyReason.DRAINING
        if len(self._seats) >= self._max:
            return BusyReason.MEMORY
        if sum(key.device == device for key in self._seats) >= self._max_per_device:
            return BusyReason.SESSIONS
        return None

    def drop(self, key: SessionKey) -> None:
        """End a session from this side: its key was revoked, or the service says so."""
        seat = self._seats.pop(key, None)
        if seat is not None:
            seat.connection.close()

    def drop_device(self, device: str) -> list[SessionKey]:
        """End every session of `device`; returns their keys so that their KV can be freed."""
        keys = [key for key in self._seats if key.device == device]
        for key in keys:
            self.drop(key)
        return keys

    def expire(self, now_s: float) -> list[SessionKey]:
        """End the sessions not heard of for a lease; returns their keys so that their KV can be freed."""
        keys = [
            key for key, seat in self._seats.items() if now_s - seat.last_heard_s > self._offer.idle_lease_s
        ]
        for key in keys:
            self.drop(key)
        return keys

    def drain(self) -> None:
        """No new session and no new context from now on; `send_goaway` of each connection tells its edge."""
        self._draining = True
        for seat in self._seats.values():
            seat.connection.draining = True
