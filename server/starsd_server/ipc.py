"""What gateway and worker say to each other: the link's own frames, with an address.

    gateway -> worker   MESSAGE   route and device, frames           a message that looks like one of the link
                        STATE     JSON of GatewayState               twice a second
                        REVOKED   device                             its key is not trusted any more
    worker -> gateway   MESSAGE   route, frames                      a reply
                        SNAPSHOT  JSON of a ServiceSnapshot          for whoever watches

All of them begin with one header of fixed size; route, device and frames follow, one behind the other. A
`route` is where the gateway's ROUTER sends a reply: the connection that the device's latest message came on.
`arrival` is CLOCK_MONOTONIC in nanoseconds, which all processes of a machine share. `local_stream` carries
them.
"""

from __future__ import annotations

import os
import shutil
import struct
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import msgspec

from starsd_edge.protocol.codec import Buffer
from starsd_edge.protocol.limits import MAX_FRAMES
from starsd_edge.protocol.telemetry import GatewaySnapshot

__all__ = [
    "DeviceLink",
    "FromEdge",
    "GatewayState",
    "Revoked",
    "ToEdge",
    "pack_from_edge",
    "pack_revoked",
    "pack_snapshot",
    "pack_state",
    "pack_to_edge",
    "private_folder",
    "unpack_in_gateway",
    "unpack_in_worker",
]

MESSAGE, STATE, SNAPSHOT, REVOKED = 1, 2, 3, 4
# bytes behind this field, kind, number of frames, lengths of route and device, arrival, lengths of the frames
HEADER = struct.Struct("<IBBBHQ3I")
assert MAX_FRAMES == 3
LENGTH_BYTES = 4  # of the first field, which is the stream's
BEHIND = HEADER.size - LENGTH_BYTES  # of the header, where the stream has taken that field off
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
    frames: list[Buffer]


@dataclass(frozen=True, slots=True)
class Revoked:
    """A device that was trusted and is not, or not with the key it came with: its sessions end."""

    device: str


class ToEdge(NamedTuple):
    """A reply, and the connection it goes to."""

    route: bytes
    frames: list[Buffer]


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


def pack_from_edge(route: bytes, device: str, arrived_ns: int, frames: Sequence[Buffer]) -> bytes:
    return pack(MESSAGE, frames, route, device.encode(), arrived_ns)


def pack_to_edge(route: bytes, frames: Sequence[Buffer]) -> bytes:
    return pack(MESSAGE, frames, route)


def pack_state(state: GatewayState) -> bytes:
    return pack(STATE, [msgspec.json.encode(state)])


def pack_revoked(device: str) -> bytes:
    return pack(REVOKED, [device.encode()])


def pack_snapshot(payload: bytes) -> bytes:
    return pack(SNAPSHOT, [payload])


def unpack_in_worker(message: memoryview) -> FromEdge | GatewayState | Revoked:
    """`message` is without the length that stands in front of it; frames are views of it."""
    kind, count, route_len, device_len, arrived_ns, *sizes = BEHIND_LENGTH.unpack_from(message)
    route_end = BEHIND + route_len
    device_end = route_end + device_len
    frames = split(message, device_end, sizes[:count])
    if kind == STATE:
        return _STATE_DECODER.decode(frames[0])
    if kind == REVOKED:
        return Revoked(str(frames[0], "utf-8"))
    route = bytes(message[BEHIND:route_end])
    return FromEdge(route, str(message[route_end:device_end], "utf-8"), arrived_ns / 1e9, frames)


def unpack_in_gateway(message: memoryview) -> ToEdge | bytes:
    """A reply, or the JSON of a snapshot."""
    kind, count, route_len, _, _, *sizes = BEHIND_LENGTH.unpack_from(message)
    route_end = BEHIND + route_len
    frames = split(message, route_end, sizes[:count])
    if kind == SNAPSHOT:
        return bytes(frames[0])
    return ToEdge(bytes(message[BEHIND:route_end]), frames)


def pack(
    kind: int, frames: Sequence[Buffer], route: bytes = b"", device: bytes = b"", arrived_ns: int = 0
) -> bytes:
    sizes = [*map(len, frames)]
    length = BEHIND + len(route) + len(device) + sum(sizes)
    count = len(sizes)
    sizes += [0] * (MAX_FRAMES - count)
    header = HEADER.pack(length, kind, count, len(route), len(device), arrived_ns, *sizes)
    return b"".join((header, route, device, *frames))


def split(message: memoryview, start: int, sizes: Sequence[int]) -> list[Buffer]:
    """The frames, one behind the other from `start` on."""
    frames: list[Buffer] = []
    for size in sizes:
        end = start + size
        frames.append(message[start:end])
        start = end
    return frames


BEHIND_LENGTH = struct.Struct("<" + HEADER.format[2:])
_STATE_DECODER = msgspec.json.Decoder(GatewayState)
