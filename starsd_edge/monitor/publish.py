"""The service's end of the monitor: publishes snapshots to whoever is trusted and listens.

One way only: nothing a watcher sends but its subscription is read. While nobody listens nothing is encoded,
and a watcher that cannot keep up loses snapshots, which costs it nothing but freshness.

The socket lives in the process whose ZAP handler knows the trusted keys: with CURVE, ZeroMQ asks that handler
before a watcher is let in, and never again. Whoever loses that trust is cut off here.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

import zmq

from starsd_edge.errors import ResourceError, UsageError
from starsd_edge.link.sockets import is_local
from starsd_edge.protocol.telemetry import TOPIC, ServiceSnapshot, encode_snapshot

__all__ = ["SnapshotPublisher"]

SUBSCRIBED = 1  # first byte of what an XPUB socket receives; 0 ends a subscription
SEND_QUEUE = 4  # snapshots kept for a slow watcher before the newer ones are dropped
LARGEST_FRAME_BYTES = 1024  # of a watcher: a subscription has 20, the INITIATE of a CURVE handshake about 300
HANDSHAKE_TIMEOUT_MS = 2000  # silent connections must not fill the table of descriptors
HEARTBEAT_MS, HEARTBEAT_TIMEOUT_MS = 2000, 10_000


@dataclass(frozen=True, slots=True)
class Watcher:
    """Who subscribed on a connection.

    public  Z85 of the key that the connection was let in with
    peer    address and port at its other end: a descriptor's number is given to the next connection
    """

    public: str
    peer: Any


class SnapshotPublisher:
    """Publishes on `endpoint`; not thread-safe.

    context     the one whose ZAP handler decides who may watch
    secret_key  the service's CURVE key (z85); may be missing on loopback, ipc and inproc only
    zap_domain  passed to the ZAP handler, without which nobody gets in
    watch       called with the socket before anybody can connect

    Raises UsageError for plaintext off this machine, ResourceError when the endpoint cannot be bound.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        endpoint: str,
        *,
        secret_key: bytes | None = None,
        zap_domain: bytes = b"",
        watch: Callable[[zmq.Socket[bytes]], None] = lambda socket: None,
    ) -> None:
        if secret_key is None and not is_local(endpoint):
            raise UsageError(
                f"snapshots leave this machine only encrypted: {endpoint} needs the service's key"
            )
        self._subscribers: set[bytes] = set()
        self._watchers: dict[int, Watcher] = {}  # by descriptor, where there are keys
        self._keyed = secret_key is not None
        self._socket = context.socket(zmq.XPUB)
        self._socket.setsockopt(zmq.XPUB_VERBOSE, 1)  # each watcher's subscription, not only the first one
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SNDHWM, SEND_QUEUE)
        self._socket.setsockopt(zmq.MAXMSGSIZE, LARGEST_FRAME_BYTES)
        self._socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_TIMEOUT_MS)
        self._socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
        self._socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS)
        if zap_domain:
            self._socket.setsockopt(zmq.ZAP_DOMAIN, zap_domain)
            self._socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
        if secret_key is not None:
            self._socket.setsockopt(zmq.CURVE_SERVER, 1)
            self._socket.setsockopt(zmq.CURVE_SECRETKEY, secret_key)
        watch(self._socket)
        try:
            self._socket.bind(endpoint)
        except zmq.ZMQError as error:
            self._socket.close()
            raise ResourceError(f"cannot publish snapshots on {endpoint}: {error.strerror}") from error

    @property
    def endpoint(self) -> str:
        """Where it is bound, with the port that a wildcard became."""
        endpoint = self._socket.getsockopt(zmq.LAST_ENDPOINT)
        assert isinstance(endpoint, bytes)
        return endpoint.rstrip(b"\0").decode()

    @property
    def wanted(self) -> bool:
        """Whether anybody listens: ask before gathering a snapshot."""
        while True:
            try:
                frame = self._socket.recv(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return bool(self._subscribers)
            message = frame.bytes
            topic = message[1:]
            if not TOPIC.startswith(topic):
                continue
            if message[:1] != bytes([SUBSCRIBED]):
                self._subscribers.discard(topic)
                continue
            self._subscribers.add(topic)
            if self._keyed:
                self._remember(frame)

    def publish(self, snapshot: ServiceSnapshot) -> int:
        """Send `snapshot` to all who listen; bytes of one copy, 0 when nobody does. Never blocks."""
        if not self.wanted:
            return 0
        payload = encode_snapshot(snapshot)
        try:
            self._socket.send_multipart([TOPIC, payload], zmq.NOBLOCK)
        except zmq.Again:
            return 0
        return len(TOPIC) + len(payload)

    def cut(self, keys: Collection[str]) -> int:
        """End the connections of those who watch with one of `keys` (Z85); how many there were.

        They come back by themselves, and are asked for their key again.
        """
        ended = 0
        if self.wanted:  # whoever subscribed meanwhile is known now
            for descriptor, watcher in list(self._watchers.items()):
                if watcher.public in keys:
                    del self._watchers[descriptor]
                    with contextlib.suppress(OSError), borrowed(descriptor) as connection:
                        if connection.getpeername() == watcher.peer:
                            connection.shutdown(socket.SHUT_RDWR)
                            ended += 1
        return ended

    def close(self) -> None:
        self._socket.close()

    def _remember(self, frame: zmq.Frame) -> None:
        descriptor = int(frame.get(zmq.SRCFD))
        with contextlib.suppress(OSError), borrowed(descriptor) as connection:  # gone already
            self._watchers[descriptor] = Watcher(str(frame.get("User-Id")), connection.getpeername())


@contextlib.contextmanager
def borrowed(descriptor: int) -> Iterator[socket.socket]:
    """The connection of ZeroMQ's that has this descriptor, which stays ZeroMQ's. Raises OSError for none."""
    connection = socket.socket(fileno=descriptor)
    try:
        yield connection
    finally:
        connection.detach()
