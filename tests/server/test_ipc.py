"""What gateway and worker say to each other comes out as it went in."""

from __future__ import annotations

import pytest

from starsd_edge.protocol.telemetry import GatewaySnapshot
from starsd_server.ipc import (
    FromEdge,
    GatewayState,
    Revoked,
    ToEdge,
    pack_from_edge,
    pack_revoked,
    pack_snapshot,
    pack_state,
    pack_to_edge,
    unpack_in_gateway,
    unpack_in_worker,
)
from starsd_server.local_stream import LENGTH


def carried(data: bytes) -> memoryview:
    """What the other end makes of it: the length in front is the stream's."""
    (length,) = LENGTH.unpack_from(data)
    assert length == len(data) - LENGTH.size
    return memoryview(data)[LENGTH.size :]


@pytest.mark.parametrize("route", [b"\x00\x80\x00\x41\xa7", b"r" * 255])
@pytest.mark.parametrize("device", ["orin-1", "Gerät" * 25, ""])
@pytest.mark.parametrize("frames", [[b"head"], [b"head", b"", b"features" * 100]])
def test_a_message_keeps_its_address_and_frames(route: bytes, device: str, frames: list[bytes]) -> None:
    up, down = pack_from_edge(route, device, 1_500_000_000, frames), pack_to_edge(route, frames)
    assert FromEdge(route, device, 1.5, frames) == unpack_in_worker(carried(up))
    assert ToEdge(route, frames) == unpack_in_gateway(carried(down))


def test_state_and_snapshots_are_told_from_messages() -> None:
    state = GatewayState(GatewaySnapshot(messages_up=3), watched=True)
    assert state == unpack_in_worker(carried(pack_state(state)))
    assert Revoked("Gerät") == unpack_in_worker(carried(pack_revoked("Gerät")))
    assert b"{}" == unpack_in_gateway(carried(pack_snapshot(b"{}")))
