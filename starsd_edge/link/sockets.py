"""The two sockets of the link, with every option set for a reason.

ZeroMQ's defaults lose messages silently, wait for ever, and admit strangers. docs/protocol.md repeats this
list for whoever writes another client.
"""

from __future__ import annotations

import ctypes
import ipaddress
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import zmq

from starsd_edge.errors import ConfigError, LinkError
from starsd_edge.link.keys import KeyPair
from starsd_edge.protocol.codec import Buffer

__all__ = [
    "NOW",
    "ZAP_DOMAIN",
    "EdgeKeys",
    "ServerKey",
    "check_private",
    "edge_socket",
    "is_local",
    "is_readable",
    "make_context",
    "monitor_event",
    "receive_now",
    "seed_libc",
    "send_now",
    "service_socket",
]

SyncSocket: TypeAlias = "zmq.Socket[bytes]"
ServerKey: TypeAlias = str  # the service's public key, 40 characters of Z85

# pyzmq's own flags are slow to combine
NOW, MORE = int(zmq.NOBLOCK), int(zmq.NOBLOCK | zmq.SNDMORE)
READABLE = int(zmq.POLLIN)

# What the method that is called `send` does before this one is for kinds of sockets that are not used here.
send_part: Callable[[SyncSocket, Buffer, int], object] = zmq.backend.Socket.send

ZAP_DOMAIN = b"draft"
IO_THREADS = 2  # one peer's large prefill does not hold up another's round

# Both ends. A heartbeat shorter than a large transfer cuts the transfer: 256 KiB at 50 kB/s take 5 s.
HEARTBEAT_INTERVAL_MS = 2_000
HEARTBEAT_TIMEOUT_MS = 10_000
HEARTBEAT_TTL_MS = 10_000

ROUTER_MAX_FRAME_BYTES = 1 << 20
ROUTER_SEND_MESSAGES = 8
ROUTER_RECEIVE_MESSAGES = (
    4  # the high-water mark counts messages: times a frame, that is what a peer can park
)
# What the system holds for a peer that does not read; it would be megabytes. Answers are small: at 300 ms
# there and back this still carries 400 KB/s of them.
ROUTER_SEND_BUFFER_BYTES = 128 * 1024
HANDSHAKE_MS = 2_000  # silent connections are thrown out before they use up the descriptors
MAX_RETRANSMIT_MS = 10_000

DEALER_MAX_FRAME_BYTES = 64 * 1024
# The protocol has at most a handful of messages under way; a pipe that is full means that the line stands.
# Room for several times that, because ZeroMQ gives credit back only when half of it is used up.
DEALER_SEND_MESSAGES = 32
DEALER_RECEIVE_MESSAGES = 8
CONNECT_TIMEOUT_MS = 3_000  # a lost SYN holds a socket for two minutes otherwise
RECONNECT_FIRST_MS = 100
RECONNECT_MAX_MS = 5_000


class ProcessContext(zmq.Context["zmq.Socket[bytes]"]):
    """A context that refuses to be used in a fork, where sockets would open, "send", and reach nobody."""

    made_in = 0  # process id

    def socket(self, *args: Any, **kwargs: Any) -> SyncSocket:
        if os.getpid() != self.made_in:
            raise LinkError("this process was forked from one that has a link: start it with `spawn` instead")
        return super().socket(*args, **kwargs)


def make_context(io_threads: int = IO_THREADS) -> zmq.Context[SyncSocket]:
    """A context of this process's own. Its `socket` raises LinkError in a fork."""
    context = ProcessContext(io_threads=io_threads)
    context.made_in = os.getpid()
    return context


def service_socket(context: zmq.Context[SyncSocket], key: KeyPair | None) -> SyncSocket:
    """The service's ROUTER, not bound yet. Without a key only for addresses that `is_local`.

    With a key nobody gets in unless a ZAP handler runs and says so (ENFORCE_DOMAIN): without that option a
    missing handler admits everybody.
    """
    socket = context.socket(zmq.ROUTER)
    set_common(socket)
    socket.router_mandatory = 1  # a message for nobody or for a full pipe is an error, not silence
    socket.router_handover = 0  # with it, whoever names another's id takes that one's replies
    socket.sndhwm = ROUTER_SEND_MESSAGES
    socket.rcvhwm = ROUTER_RECEIVE_MESSAGES
    socket.sndbuf = ROUTER_SEND_BUFFER_BYTES
    socket.maxmsgsize = ROUTER_MAX_FRAME_BYTES
    socket.handshake_ivl = HANDSHAKE_MS
    socket.tcp_maxrt = MAX_RETRANSMIT_MS
    if key is not None:
        socket.curve_server = True
        socket.curve_secretkey = key.secret.encode()
        socket.curve_publickey = key.key.public.encode()
        socket.zap_domain = ZAP_DOMAIN
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
    return socket


@dataclass(frozen=True, slots=True)
class EdgeKeys:
    """What an edge needs for an encrypted link: its own pair and the service's public key."""

    own: KeyPair
    service: ServerKey


def edge_socket(context: zmq.Context[SyncSocket], keys: EdgeKeys | None) -> SyncSocket:
    """The edge's DEALER, not connected yet. Never given a routing id: a fixed one turns a lost connection
    into one that looks healthy and is ignored for ever."""
    socket = context.socket(zmq.DEALER)
    set_common(socket)
    socket.immediate = 1  # nothing is queued for a service that is not there, to be delivered stale later
    socket.sndhwm = DEALER_SEND_MESSAGES
    socket.rcvhwm = DEALER_RECEIVE_MESSAGES
    socket.maxmsgsize = DEALER_MAX_FRAME_BYTES
    socket.connect_timeout = CONNECT_TIMEOUT_MS
    socket.reconnect_ivl = RECONNECT_FIRST_MS
    socket.reconnect_ivl_max = RECONNECT_MAX_MS
    if keys is not None:
        socket.curve_serverkey = keys.service.encode()
        socket.curve_publickey = keys.own.key.public.encode()
        socket.curve_secretkey = keys.own.secret.encode()
    return socket


def set_common(socket: SyncSocket) -> None:
    socket.linger = 0  # closing never waits for a peer
    socket.heartbeat_ivl = HEARTBEAT_INTERVAL_MS
    socket.heartbeat_timeout = HEARTBEAT_TIMEOUT_MS
    socket.heartbeat_ttl = HEARTBEAT_TTL_MS
    socket.tcp_keepalive = 1
    socket.setsockopt(zmq.IPV6, 1)


def is_readable(socket: SyncSocket) -> bool:
    """Whether a message is there: to ask is quicker than to be told by an exception that there is none."""
    return bool(zmq.zmq_poll([(socket, READABLE)], 0))


def send_now(socket: SyncSocket, parts: Sequence[Buffer]) -> None:
    """All parts or, where the socket takes no more, none. Raises ZMQError.

    What `send_multipart` does besides takes as long again."""
    for part in parts[:-1]:
        send_part(socket, part, MORE)
    send_part(socket, parts[-1], NOW)


def receive_now(socket: SyncSocket, first: int = NOW) -> list[zmq.Frame]:
    """One message; `first` are the flags that its first frame is received with. Raises zmq.Again when none is
    there.

    A frame knows whether another one follows; to ask the socket, as `recv_multipart` does, takes as long as
    to receive."""
    frames = [socket.recv(first, copy=False)]
    while frames[-1].more:
        frames.append(socket.recv(NOW, copy=False))
    return frames


def is_local(address: str) -> bool:
    """Whether `address` can be reached from this machine alone: ipc, inproc, or a loopback IP."""
    transport, _, rest = address.partition("://")
    if transport in ("ipc", "inproc"):
        return True
    host = rest.rpartition(":")[0].strip("[]")
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False  # a name, an interface, or *: may be anywhere


def check_private(address: str, *, has_key: bool) -> None:
    """Raises ConfigError: off this machine there is no plain-text link."""
    if not has_key and not is_local(address):
        raise ConfigError(
            f"{address}: without keys the draft link stays on this machine (127.0.0.1 or ipc://); "
            f"`starsd keys generate` makes a device's, with `--name service` a service's"
        )


def seed_libc() -> None:
    """Seed libc's `rand` from the operating system; libzmq draws routing ids from it."""
    ctypes.CDLL(None).srand(int.from_bytes(os.urandom(4), "little"))


def monitor_event(frames: list[bytes]) -> tuple[int, int]:
    """(event, value) of what a socket's monitor said (zmq_socket_monitor(3): 16 and 32 bits, native order).

    pyzmq has this too, in a module that takes asyncio with it: 40 ms of every start.
    """
    return int.from_bytes(frames[0][:2], sys.byteorder), int.from_bytes(frames[0][2:6], sys.byteorder)
