"""The service's end of the monitor: publishes snapshots to whoever is trusted and listens.

One way only: nothing a watcher sends but its subscription is read. While nobody listens nothing is encoded,
and a watcher that cannot keep up loses snapshots, which costs it nothing but freshness.

The socket lives in the process whose ZAP handler knows the trusted keys: with CURVE, ZeroMQ asks that handler
before a watcher is let in.
"""

from __future__ import annotations

from collections.abc import Callable

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
        self._socket = context.socket(zmq.XPUB)
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
                message = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return bool(self._subscribers)
            topic = message[1:]
            if not TOPIC.startswith(topic):
                continue
            if message[:1] == bytes([SUBSCRIBED]):
                self._subscribers.add(topic)
            else:
                self._subscribers.discard(topic)

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

    def close(self) -> None:
        self._socket.close()
