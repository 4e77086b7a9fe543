"""The monitor's eyes: subscribes to services and says what arrived and how each link stands.

It observes only. A subscription costs the service one snapshot each half second and nothing else; while a
service cannot be reached one TCP connection is tried every few seconds to tell why, and closed at once. Bytes
of both are counted, so that the screen can show what watching costs.
"""

from __future__ import annotations

import contextlib
import errno
import queue
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import zmq

from starsd_edge.errors import RemoteProtocolError, UsageError
from starsd_edge.link.diagnose import FULL_STATUS
from starsd_edge.link.sockets import is_local, make_context, monitor_event
from starsd_edge.monitor.endpoints import tcp_address
from starsd_edge.monitor.link_state import Link, LinkEvent, LinkState, after
from starsd_edge.protocol.telemetry import MAX_SNAPSHOT_BYTES, TOPIC, ServiceSnapshot, decode_snapshot

__all__ = ["Arrival", "Feed", "Source", "WatchKeys", "ZmqFeed"]

RECONNECT_MS = 500
MAX_RECONNECT_MS = 5000
CONNECT_TIMEOUT_MS = (
    5000  # a host that was away answers the next attempt; the system's own patience is minutes
)
HANDSHAKE_TIMEOUT_MS = 2000
HEARTBEAT_MS, HEARTBEAT_TIMEOUT_MS = 2000, 10_000
RECEIVE_QUEUE = 8  # snapshots: a monitor that was stopped for longer wants the newest, not the backlog
PROBE_EVERY_S = 5.0  # how often an unreachable service is probed, at most
PROBE_TIMEOUT_S = 1.0
RENEW_EVERY_S = 5.0  # ZeroMQ does not try again after a refusal, so the socket is made anew
MECHANISM_MISMATCH = int(zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH)
MAX_EVENTS_A_POLL = 100  # of a socket's monitor: a storm of events must not stop the screen


@dataclass(frozen=True, slots=True)
class WatchKeys:
    """CURVE keys (z85): the watcher's own pair, and the pinned public key of the service."""

    public: bytes
    secret: bytes
    service: bytes


@dataclass(frozen=True, slots=True)
class Source:
    """A service to watch: the name it is shown under, where it publishes, and the keys for it."""

    name: str
    endpoint: str
    keys: WatchKeys | None = None

    def __post_init__(self) -> None:
        tcp_address(self.endpoint)
        if self.keys is None and not is_local(self.endpoint):
            raise UsageError(
                f"{self.name} is watched over an encrypted link only: no key for {self.endpoint}"
            )


@dataclass(frozen=True, slots=True)
class Arrival:
    """A snapshot of the service at `source`, received at `at_s` (monotonic seconds)."""

    source: int
    at_s: float
    num_bytes: int
    snapshot: ServiceSnapshot


class Feed(Protocol):
    """Where the monitor's snapshots come from: sockets, or a recording."""

    @property
    def names(self) -> list[str]:
        """Name of each source; `Arrival.source` is an index into it."""
        ...

    @property
    def links(self) -> list[Link]:
        """How each source stands."""
        ...

    @property
    def probes(self) -> int:
        """Connections tried to find out why a source is silent."""
        ...

    def poll(self, timeout_s: float, keyboard: int | None = None) -> list[Arrival]:
        """What arrived, waiting up to `timeout_s` for it or for the descriptor `keyboard` to be readable."""
        ...

    def close(self) -> None: ...


class ZmqFeed:
    """A SUB socket for each source, with its event monitor."""

    def __init__(self, sources: Sequence[Source]) -> None:
        self._context = make_context(io_threads=1)
        self._poller = zmq.Poller()
        self._watches = [Watch(self._context, self._poller, source) for source in sources]
        self.probes = 0

    @property
    def names(self) -> list[str]:
        return [watch.source.name for watch in self._watches]

    @property
    def links(self) -> list[Link]:
        return [watch.link for watch in self._watches]

    def poll(self, timeout_s: float, keyboard: int | None = None) -> list[Arrival]:
        if keyboard is not None:
            self._poller.register(keyboard, zmq.POLLIN)
        self._poller.poll(max(0, round(timeout_s * 1000)))
        if keyboard is not None:
            self._poller.unregister(keyboard)
        now_s = time.monotonic()
        arrivals = []
        for index, watch in enumerate(self._watches):
            watch.take_events(now_s)
            for num_bytes, snapshot in watch.take_snapshots(now_s):
                arrivals.append(Arrival(index, now_s, num_bytes, snapshot))
            watch.note(LinkEvent.TICK, now_s)
            self.probes += watch.look_after(now_s)
        return arrivals

    def close(self) -> None:
        for watch in self._watches:
            watch.close()
        self._context.term()


class Watch:
    """One source: its socket, made anew when ZeroMQ has given up, and the state of its link."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], poller: zmq.Poller, source: Source) -> None:
        self.source = source
        self.link = Link(since_s=time.monotonic())
        self._context, self._poller = context, poller
        self._renewed_s = self._probed_s = time.monotonic()
        self._trying = self._asking = False
        self._asked_s = -PROBE_EVERY_S
        self._probed: queue.SimpleQueue[LinkEvent] = queue.SimpleQueue()
        self._open()

    def note(self, event: LinkEvent, now_s: float) -> None:
        self.link = after(self.link, event, now_s)

    def take_snapshots(self, now_s: float) -> Iterator[tuple[int, ServiceSnapshot]]:
        """All snapshots that wait. One that cannot be read counts for nothing: a service that sends only
        such ones is shown as hung."""
        while True:
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            if len(frames) != 2 or frames[0] != TOPIC:
                continue
            try:
                snapshot = decode_snapshot(frames[1])
            except RemoteProtocolError:
                continue
            self.note(LinkEvent.SNAPSHOT, now_s)
            yield len(frames[0]) + len(frames[1]), snapshot

    def take_events(self, now_s: float) -> None:
        """What the socket's monitor saw since the last look."""
        for _ in range(MAX_EVENTS_A_POLL):
            try:
                name, value = monitor_event(self._events.recv_multipart(zmq.NOBLOCK))
            except zmq.Again:
                return
            # An address from which no answer comes, not even a refusal, is never retried: it stays delayed.
            self._trying = name in (zmq.EVENT_CONNECT_DELAYED, zmq.EVENT_CONNECT_RETRIED) or (
                self._trying and name != zmq.EVENT_CONNECTED
            )
            if name == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
                self._note_broken(value, now_s)
            elif name == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL and value != MECHANISM_MISMATCH:
                self.note(LinkEvent.HANDSHAKE_FOREIGN, now_s)
            elif name == zmq.EVENT_DISCONNECTED and self._asking:
                continue  # why is being asked
            elif name == zmq.EVENT_HANDSHAKE_FAILED_AUTH and value == FULL_STATUS:
                self.note(LinkEvent.KEY_FULL, now_s)
            elif name in EVENTS:
                self.note(EVENTS[name], now_s)

    def _note_broken(self, error: int, now_s: float) -> None:
        """A handshake that ended without a word: of a wrong key as of a socket that is none for watching."""
        if error in (errno.EAGAIN, errno.ETIMEDOUT):
            self.note(LinkEvent.HANDSHAKE_TIMED_OUT, now_s)
        elif self.source.keys is None:  # who has none cannot have the wrong one
            self.note(LinkEvent.HANDSHAKE_FOREIGN, now_s)
        elif not self._asking and now_s - self._asked_s >= PROBE_EVERY_S:
            self._asking, self._asked_s = True, now_s
            arguments = (self._context, self.source.endpoint, self.source.keys, self._probed)
            threading.Thread(target=ask_as_edge, args=arguments, daemon=True).start()

    def look_after(self, now_s: float) -> int:
        """Find out why nothing connects, and renew a socket that stopped trying; number of probes made."""
        if self.link.state in GIVEN_UP and now_s - self._renewed_s > RENEW_EVERY_S:
            self._renewed_s = now_s
            self._close_sockets()
            self._open()
        with contextlib.suppress(queue.Empty):
            event = self._probed.get_nowait()
            self._asking &= event not in (LinkEvent.HANDSHAKE_BROKEN, LinkEvent.HANDSHAKE_FOREIGN)
            self.note(event, now_s)
        if self.link.state in CONNECTED or not self._trying or now_s - self._probed_s < self._patience_s:
            return 0
        self._probed_s = now_s
        # In a thread: resolving a name or reaching a far host may take longer than a screen may stand still.
        threading.Thread(target=probe, args=(self.source.endpoint, self._probed), daemon=True).start()
        return 1

    @property
    def _patience_s(self) -> float:
        """The first probe comes at once: a user who starts the monitor wants to know why it is empty."""
        return PROBE_EVERY_S if self.link.state in (LinkState.SERVER_DOWN, LinkState.NO_ROUTE) else 0.5

    def _open(self) -> None:
        self._socket = self._context.socket(zmq.SUB)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.RCVHWM, RECEIVE_QUEUE)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_SNAPSHOT_BYTES)
        self._socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
        self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, MAX_RECONNECT_MS)
        self._socket.setsockopt(zmq.CONNECT_TIMEOUT, CONNECT_TIMEOUT_MS)
        self._socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_TIMEOUT_MS)
        self._socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
        self._socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS)
        self._socket.setsockopt(zmq.IPV6, 1)
        if self.source.keys is not None:
            use_keys(self._socket, self.source.keys)
        self._events = self._socket.get_monitor_socket()
        self._socket.setsockopt(zmq.SUBSCRIBE, TOPIC)
        self._socket.connect(self.source.endpoint)
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._events, zmq.POLLIN)

    def _close_sockets(self) -> None:
        self._poller.unregister(self._socket)
        self._poller.unregister(self._events)
        self._socket.disable_monitor()
        self._events.close()
        self._socket.close()

    def close(self) -> None:
        self._close_sockets()


EVENTS: dict[int, LinkEvent] = {
    zmq.EVENT_CONNECT_RETRIED: LinkEvent.RETRYING,
    zmq.EVENT_HANDSHAKE_SUCCEEDED: LinkEvent.HANDSHAKE_DONE,
    zmq.EVENT_HANDSHAKE_FAILED_AUTH: LinkEvent.KEY_DENIED,
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: LinkEvent.HANDSHAKE_MISFIT,
    zmq.EVENT_DISCONNECTED: LinkEvent.DISCONNECTED,
}
GIVEN_UP = (LinkState.UNKNOWN_KEY, LinkState.TOO_MANY, LinkState.NOT_ENCRYPTED, LinkState.OTHER_PROGRAM)
CONNECTED = (LinkState.UP, LinkState.OTHER_SERVICE, *GIVEN_UP)


def use_keys(socket: zmq.Socket[bytes], keys: WatchKeys) -> None:
    socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.public)
    socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret)
    socket.setsockopt(zmq.CURVE_SERVERKEY, keys.service)


def ask_as_edge(
    context: zmq.Context[zmq.Socket[bytes]],
    endpoint: str,
    keys: WatchKeys,
    result: queue.SimpleQueue[LinkEvent],
) -> None:
    """Shake hands as a device does that wants drafts: where that succeeds, the key is right and the port is
    the draft service's own. Blocks up to HANDSHAKE_TIMEOUT_MS."""
    event = LinkEvent.HANDSHAKE_BROKEN
    with contextlib.suppress(zmq.ZMQError), context.socket(zmq.DEALER) as edge:  # the feed may be closed
        edge.setsockopt(zmq.LINGER, 0)
        edge.setsockopt(zmq.IPV6, 1)
        use_keys(edge, keys)
        shaken = zmq.EVENT_HANDSHAKE_SUCCEEDED
        failed = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
        with edge.get_monitor_socket(shaken | failed) as events:
            edge.connect(endpoint)
            if events.poll(HANDSHAKE_TIMEOUT_MS) and monitor_event(events.recv_multipart())[0] == shaken:
                event = LinkEvent.HANDSHAKE_FOREIGN
            edge.disable_monitor()
    result.put(event)


def probe(endpoint: str, result: queue.SimpleQueue[LinkEvent]) -> None:
    """Try one TCP connection: does the host answer at all? One that works changes nothing."""
    address = tcp_address(endpoint)
    if address is None:
        result.put(LinkEvent.PROBE_REFUSED)  # an ipc file without a listener
        return
    try:
        socket.create_connection((address.host, address.port), PROBE_TIMEOUT_S).close()
    except ConnectionRefusedError:
        result.put(LinkEvent.PROBE_REFUSED)
    except OSError:
        result.put(LinkEvent.PROBE_UNREACHED)
