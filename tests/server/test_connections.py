"""One key's connections are bounded, whatever it does with them; other keys and old ones do not feel it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
import zmq

from starsd_edge.link.diagnose import FULL_STATUS, handshake_trouble
from starsd_edge.link.keys import KeyPair
from starsd_edge.link.sockets import (
    EdgeKeys,
    SyncSocket,
    edge_socket,
    make_context,
    monitor_event,
    service_socket,
)
from starsd_edge.link.zap import Authenticator, FullError, Knock
from starsd_server.connections import Connections

SERVICE, BROKEN, OTHER, STRANGER = (KeyPair.generate(name) for name in ("service", "broken", "other", "x"))
NAMES = {pair.key.public: pair.key.name for pair in (BROKEN, OTHER)}
MOST = 3
PATIENCE_MS = 60_000
ENDS = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL


@dataclass
class Door:
    """A service's socket with everything in front of it."""

    context: zmq.Context[SyncSocket]
    peers: zmq.Context[SyncSocket]
    connections: Connections = field(default_factory=lambda: Connections(MOST))
    knocks: list[Knock] = field(default_factory=list)
    made: list[SyncSocket] = field(default_factory=list)  # kept open until a test closes them

    def __post_init__(self) -> None:
        self.zap = Authenticator(self.context, self.find, self.knocks.append, self.connections.look)
        self.zap.start()
        self.socket = service_socket(self.context, SERVICE)
        self.connections.watch(self.socket)
        self.port = self.socket.bind_to_random_port("tcp://127.0.0.1")

    def find(self, public: str) -> str | None:
        name = NAMES.get(public)
        if name is not None and not self.connections.admit(public):
            raise FullError("has too many")
        return name

    def knock(self, pair: KeyPair) -> tuple[int, SyncSocket]:
        """What became of a new connection (0: it is in, else ZAP's status), and its socket."""
        peer = edge_socket(self.peers, EdgeKeys(pair, SERVICE.key.public))
        self.made.append(peer)
        monitor = peer.get_monitor_socket(ENDS)
        peer.connect(f"tcp://127.0.0.1:{self.port}")
        assert monitor.poll(PATIENCE_MS)
        event, status = monitor_event(monitor.recv_multipart())
        peer.disable_monitor()
        monitor.close(0)
        return (0 if event == zmq.EVENT_HANDSHAKE_SUCCEEDED else status), peer

    def gets_in(self, pair: KeyPair) -> SyncSocket:
        """A connection of `pair`, tried for until the end of others has been noticed."""
        while True:
            status, peer = self.knock(pair)
            if status == 0:
                return peer
            assert status == FULL_STATUS
            peer.close(0)

    def speaks(self, peer: SyncSocket, pair: KeyPair) -> None:
        """A message of `peer` arrives, as the gateway takes it."""
        peer.send(b"hello")
        assert self.socket.poll(PATIENCE_MS)
        frame = self.socket.recv_multipart(copy=False)[1]
        self.connections.spoke(frame.get(zmq.SRCFD), pair.key.public)


@pytest.fixture
def door() -> Iterator[Door]:
    context, peers = make_context(), make_context()
    opened = Door(context, peers)
    yield opened
    for peer in opened.made:
        peer.close(0)
    opened.socket.close(0)
    peers.term()
    opened.zap.stop()
    opened.connections.close()
    context.term()


@pytest.mark.parametrize("speaking", [0, 1, MOST])
def test_a_key_holds_so_many_and_the_next_is_told_why(door: Door, speaking: int) -> None:
    held = [door.knock(BROKEN) for _ in range(MOST)]
    assert [status for status, _ in held] == [0] * MOST
    for _, peer in held[:speaking]:
        door.speaks(peer, BROKEN)
    status, _ = door.knock(BROKEN)
    assert status == FULL_STATUS
    assert door.knocks[-1].reason == "has too many"
    told = handshake_trouble(zmq.EVENT_HANDSHAKE_FAILED_AUTH, status, "tcp://desk:1", "AB-CD")
    assert "as many as it may" in told
    assert door.knock(OTHER)[0] == 0
    assert door.knock(STRANGER)[0] == 400


@pytest.mark.parametrize("speaking", [0, MOST])
def test_a_connection_that_ends_makes_room(door: Door, speaking: int) -> None:
    held = [door.knock(BROKEN)[1] for _ in range(MOST)]
    for peer in held[:speaking]:
        door.speaks(peer, BROKEN)
    held[1].close(0)
    door.gets_in(BROKEN)
    assert door.knock(BROKEN)[0] == FULL_STATUS


def test_a_device_that_reconnects_all_day_is_never_locked_out(door: Door) -> None:
    for turn in range(10 * MOST):
        peer = door.gets_in(BROKEN)
        if turn % 2:
            door.speaks(peer, BROKEN)
        peer.close(0)
    for _ in range(MOST):
        door.gets_in(BROKEN)
    assert door.knock(BROKEN)[0] == FULL_STATUS


def test_strangers_who_come_and_go_count_for_nobody(door: Door) -> None:
    held = [door.knock(BROKEN)[1] for _ in range(MOST)]
    for _ in range(5):
        door.knock(STRANGER)[1].close(0)
    assert door.knock(BROKEN)[0] == FULL_STATUS
    assert door.knock(OTHER)[0] == 0
    assert not any(peer.closed for peer in held)
