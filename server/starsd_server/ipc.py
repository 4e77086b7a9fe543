"""Gateway and worker speak over a local socket in a private folder: the link's own frames, with an address.

    gateway -> worker   MESSAGE address   frame...                     a message that the codec accepted
                        STATE             JSON of GatewayState         twice a second
                        REVOKED           device                       its key is not trusted any more
    worker -> gateway   MESSAGE route     frame...                     a reply
                        SNAPSHOT          JSON of a ServiceSnapshot    for whoever watches

The first frame begins with the kind, one byte. An address (arrival, lengths of route and device, both) or a
route follows in the same frame, as every frame costs a round microseconds at either end. `route` is where the
gateway's ROUTER sends a reply: the connection that the device's latest message came on. `arrival` is
CLOCK_MONOTONIC in nanoseconds, which all processes of a machine share.
"""

from __future__ import annotations

import os
import shutil
import struct
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TypeAlias

import msgspec
import zmq

from starsd_edge.protocol.telemetry import GatewaySnapshot

__all__ = [
    "NOW",
    "DeviceLink",
    "FromEdge",
    "GatewayState",
    "Revoked",
    "ToEdge",
    "connect_worker_socket",
    "is_readable",
    "pack_from_edge",
    "pack_revoked",
    "pack_snapshot",
    "pack_state",
    "pack_to_edge",
    "private_folder",
    "send_now",
    "unpack_in_gateway",
    "unpack_in_worker",
]

MESSAGE, STATE, SNAPSHOT, REVOKED = b"\x01", b"\x02", b"\x03", b"\x04"
ADDRESS = struct.Struct("<cQBH")  # kind, arrival, lengths of route and device
# pyzmq's own flags are slow to combine
NOW, MORE = int(zmq.NOBLOCK), int(zmq.NOBLOCK | zmq.SNDMORE)
EVENTS, READABLE = int(zmq.EVENTS), int(zmq.POLLIN)
# Of all edges together; beyond it the gateway says BUSY. A chunk is 256 KiB, so this is 64 MiB at most.
QUEUE_MESSAGES = 256
SOCKET_NAME = "engine.sock"
FOLDER_PREFIX = "starsd-"
LONGEST_BASE = 60  # a socket's whole path has 107 bytes at most


class DeviceLink(msgspec.Struct):
    """What the gateway knows of a device."""

    fingerprint: str = ""
    address: str = ""
    bytes_up: int = 0
    bytes_down: int = 0


class GatewayState(msgspec.Struct):
    """The gateway's own counters, for the snapshot, and whether anybody watches."""

    gateway: GatewaySnapshot
    devices: dict[str, DeviceLink] = {}
    watched: bool = False


class FromEdge(NamedTuple):
    """A message of an authenticated device."""

    route: bytes
    device: str
    arrived_s: float
    frames: list[bytes]


@dataclass(frozen=True, slots=True)
class Revoked:
    """A device that was trusted and is not, or not with the key it came with: its sessions end."""

    device: str


class ToEdge(NamedTuple):
    """A reply, and the connection it goes to."""

    route: bytes
    frames: list[bytes]


Frames: TypeAlias = Sequence[bytes]


def private_folder() -> Path:
    """A new folder that only this user can enter: whoever can connect to the socket in it is trusted.

    Folders of services that were killed are removed on the way: the name holds the process id.
    """
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    base = Path(runtime if runtime and os.access(runtime, os.W_OK) else tempfile.gettempdir())
    if len(str(base)) > LONGEST_BASE:
        base = Path("/tmp")  # noqa: S108  # mkdtemp makes a private folder; a socket's path must be short
    for folder in base.glob(f"{FOLDER_PREFIX}*"):
        pid = folder.name.removeprefix(FOLDER_PREFIX).partition("-")[0]
        if pid.isdigit() and not Path(f"/proc/{pid}").exists():
            shutil.rmtree(folder, ignore_errors=True)  # another user's stays
    return Path(tempfile.mkdtemp(prefix=f"{FOLDER_PREFIX}{os.getpid()}-", dir=base))


def connect_worker_socket(
    context: zmq.Context[zmq.Socket[bytes]], folder: Path, *, bind: bool
) -> zmq.Socket[bytes]:
    """Either end. The worker binds, so that a gateway can die and come back."""
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.SNDHWM, QUEUE_MESSAGES)
    socket.setsockopt(zmq.RCVHWM, QUEUE_MESSAGES)
    address = f"ipc://{folder / SOCKET_NAME}"
    if bind:
        socket.bind(address)
    else:
        socket.setsockopt(zmq.IMMEDIATE, 1)  # without a worker a send fails, and the edge is told
        socket.setsockopt(zmq.RECONNECT_IVL, 20)
        socket.connect(address)
    return socket


def is_readable(socket: zmq.Socket[bytes]) -> bool:
    """Whether a message is there: to ask is quicker than to be told by an exception that there is none."""
    return bool(int(socket.get(EVENTS)) & READABLE)


def send_now(socket: zmq.Socket[bytes], parts: Frames) -> None:
    """All parts or, where the socket takes no more, none. Raises ZMQError."""
    for part in parts[:-1]:
        socket.send(part, MORE)
    socket.send(parts[-1], NOW)


def pack_from_edge(route: bytes, device: str, arrived_ns: int, frames: Frames) -> list[bytes]:
    name = device.encode()
    return [ADDRESS.pack(MESSAGE, arrived_ns, len(route), len(name)) + route + name, *frames]


def pack_to_edge(route: bytes, frames: Frames) -> list[bytes]:
    return [MESSAGE + route, *frames]


def pack_state(state: GatewayState) -> list[bytes]:
    return [STATE, msgspec.json.encode(state)]


def pack_revoked(device: str) -> list[bytes]:
    return [REVOKED, device.encode()]


def pack_snapshot(payload: bytes) -> list[bytes]:
    return [SNAPSHOT, payload]


def unpack_in_worker(parts: list[bytes]) -> FromEdge | GatewayState | Revoked:
    if parts[0] == STATE:
        return _STATE_DECODER.decode(parts[1])
    if parts[0] == REVOKED:
        return Revoked(parts[1].decode())
    address, *frames = parts
    _, arrived_ns, route_len, _ = ADDRESS.unpack_from(address)
    route_end = ADDRESS.size + route_len
    return FromEdge(address[ADDRESS.size : route_end], address[route_end:].decode(), arrived_ns / 1e9, frames)


def unpack_in_gateway(parts: list[bytes]) -> ToEdge | bytes:
    """A reply, or the JSON of a snapshot."""
    if parts[0] == SNAPSHOT:
        return parts[1]
    return ToEdge(parts[0][len(MESSAGE) :], parts[1:])


_STATE_DECODER = msgspec.json.Decoder(GatewayState)
