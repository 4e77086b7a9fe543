"""Measure a link: round trips of PING, split into the line and the service's scheduling loop."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import zmq

from starsd_edge.errors import AuthenticationError, RemoteProtocolError, UnreachableError
from starsd_edge.link.diagnose import handshake_trouble, why_unreachable
from starsd_edge.link.sockets import (
    EdgeKeys,
    SyncSocket,
    check_private,
    edge_socket,
    make_context,
    monitor_event,
)
from starsd_edge.protocol.codec import decode, encode
from starsd_edge.protocol.limits import MAX_PING_PADDING_BYTES
from starsd_edge.protocol.messages import Error, ErrorCode, Head, Ping, Pong

__all__ = ["Percentiles", "PingReport", "PingSample", "measure_link"]

CONNECT_PATIENCE_S = 6.0
BANDWIDTH_PINGS = 8  # of MAX_PING_PADDING_BYTES
# The service must not take the upload of a probe for an attack, nor a slow line be blocked for long.
BANDWIDTH_PATIENCE_S = 20.0
HANDSHAKES = (
    zmq.EVENT_CONNECT_RETRIED
    | zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)


@dataclass(frozen=True, slots=True)
class PingSample:
    """One round trip. Seconds; the service's share is its own word."""

    round_trip_s: float
    service_s: float

    @property
    def link_s(self) -> float:
        return max(0.0, self.round_trip_s - self.service_s)


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Seconds."""

    p50_s: float
    p95_s: float
    p99_s: float

    @classmethod
    def of(cls, values: list[float]) -> Percentiles:
        return cls(*(float(value) for value in np.percentile(values, [50, 95, 99])))


@dataclass(frozen=True, slots=True)
class PingReport:
    """jitter_s is the mean difference of successive round trips (RFC 3550's idea); loss a share 0..1;
    upload_bytes_per_s is 0 where it was not measured; probe_bytes is what all of it sent."""

    address: str
    connect_s: float
    sent: int
    lost: int
    round_trip: Percentiles
    link: Percentiles
    service: Percentiles
    jitter_s: float
    upload_bytes_per_s: float
    probe_bytes: int

    @property
    def loss(self) -> float:
        return self.lost / self.sent


def measure_link(
    address: str,
    keys: EdgeKeys | None,
    *,
    count: int = 10,
    interval_s: float = 0.2,
    timeout_s: float = 2.0,
    with_bandwidth: bool = True,
    on_sample: Callable[[PingSample | None], None] = lambda sample: None,
) -> PingReport:
    """Connect, ping `count` times, and upload a little.

    Raises UnreachableError or AuthenticationError when there is no link, none of the pings is answered, or
    the service says meanwhile that this device's key is revoked.
    """
    check_private(address, has_key=keys is not None)
    with make_context(io_threads=1) as context, edge_socket(context, keys) as socket:
        started_s = time.monotonic()
        connect(socket, address, keys)
        connect_s = time.monotonic() - started_s
        pinger = Pinger(socket, address)
        samples: list[PingSample] = []
        for number in range(count):
            if number:
                time.sleep(interval_s)
            sample = pinger.ping(timeout_s)
            on_sample(sample)
            if sample is not None:
                samples.append(sample)
        if not samples:
            raise UnreachableError(f"{address}: connected, but no ping was answered: is the engine hung?")
        upload = pinger.upload_speed(min(s.round_trip_s for s in samples)) if with_bandwidth else 0.0
    trips = [sample.round_trip_s for sample in samples]
    return PingReport(
        address,
        connect_s,
        count,
        count - len(samples),
        Percentiles.of(trips),
        Percentiles.of([sample.link_s for sample in samples]),
        Percentiles.of([sample.service_s for sample in samples]),
        float(np.abs(np.diff(trips)).mean()) if len(trips) > 1 else 0.0,
        upload,
        pinger.sent_bytes,
    )


def connect(socket: SyncSocket, address: str, keys: EdgeKeys | None) -> None:
    """Connect and wait for the end of the security handshake."""
    fingerprint = keys.own.key.fingerprint if keys else None
    monitor = socket.get_monitor_socket(HANDSHAKES)
    try:
        socket.connect(address)
        if not monitor.poll(round(CONNECT_PATIENCE_S * 1e3)):
            raise UnreachableError(why_unreachable(address))
        event, status = monitor_event(monitor.recv_multipart())
    except zmq.ZMQError as error:
        raise UnreachableError(f"{address}: {error.strerror}") from None
    finally:
        socket.disable_monitor()
        monitor.close(0)
    if event == zmq.EVENT_CONNECT_RETRIED:
        raise UnreachableError(why_unreachable(address))
    if event != zmq.EVENT_HANDSHAKE_SUCCEEDED:
        raise AuthenticationError(handshake_trouble(event, status, address, fingerprint))


class Pinger:
    """Pings over a connected socket."""

    def __init__(self, socket: SyncSocket, address: str) -> None:
        self._socket, self._address = socket, address
        self._head = Head(secrets.randbits(64))
        self._nonce = 0
        self.sent_bytes = 0

    def ping(self, timeout_s: float) -> PingSample | None:
        """One round trip; None when it was not answered in time."""
        started_s = time.monotonic()
        if not self._send():
            return None
        pong = self._receive(self._nonce, started_s + timeout_s)
        if pong is None:
            return None
        return PingSample(time.monotonic() - started_s, pong.queue_us / 1e6)

    def upload_speed(self, round_trip_s: float) -> float:
        """Bytes per second of padded pings sent back to back; 0 when they were not answered in time."""
        padding = secrets.token_bytes(MAX_PING_PADDING_BYTES)  # nothing on the way can compress it
        started_s = time.monotonic()
        for _ in range(BANDWIDTH_PINGS):
            if not self._send(padding):
                return 0.0
        if self._receive(self._nonce, started_s + BANDWIDTH_PATIENCE_S) is None:
            return 0.0
        busy_s = max(time.monotonic() - started_s - round_trip_s, 1e-6)
        return BANDWIDTH_PINGS * len(padding) / busy_s

    def _send(self, padding: bytes = b"") -> bool:
        self._nonce += 1
        frames = encode(Ping(self._head, self._nonce, padding))
        try:
            self._socket.send_multipart(frames, zmq.NOBLOCK)
        except zmq.Again:
            return False
        self.sent_bytes += sum(len(frame) for frame in frames)
        return True

    def _receive(self, nonce: int, deadline_s: float) -> Pong | None:
        while (left_s := deadline_s - time.monotonic()) > 0:
            if not self._socket.poll(round(left_s * 1e3)):
                return None
            try:
                message = decode(self._socket.recv_multipart())
            except RemoteProtocolError:
                continue
            if isinstance(message, Error) and message.code is ErrorCode.REVOKED:
                raise AuthenticationError(f"{self._address}: {message.text}")
            if isinstance(message, Pong) and message.nonce == nonce:
                return message
        return None
