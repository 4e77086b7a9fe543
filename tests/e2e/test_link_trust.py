"""Who gets in and who does not, what each is told, and what strangers can do to those who are in.

One real service with keys, on loopback: `starsd keys` manages its folder while it runs.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import zmq

from starsd_edge.cli.keys import command as keys_command
from starsd_edge.link.keys import KeyPair
from starsd_edge.link.sockets import EdgeKeys, SyncSocket, edge_socket, make_context
from starsd_edge.monitor.feed import Source, WatchKeys, ZmqFeed
from starsd_edge.monitor.link_state import LinkState
from starsd_edge.protocol.codec import encode
from starsd_edge.protocol.greeting import Identity
from starsd_edge.protocol.messages import Head, Ping
from starsd_server.connections import MAX_CONNECTIONS
from tests.e2e.drafting import HIDDEN, IDENTITY, PATIENCE_S, PROMPT, VOCAB, Edge, Running, serving

pytestmark = pytest.mark.slow

SERVICE, JET, LAPTOP, STRANGER = (KeyPair.generate(name) for name in ("service", "jet1", "laptop", "x"))
OTHER_TARGET = Identity(
    target="other",
    target_hash="ff",
    vocab_size=VOCAB,
    tokenizer_hash="11",
    hidden_size=HIDDEN,
    feature_size=HIDDEN,
)
MIB = bytes(1 << 20)
ZMTP_WITH_CURVE = b"\xff" + bytes(8) + b"\x7f" + b"\x03\x01" + b"CURVE".ljust(20, b"\0") + bytes(32)
STRANGE_GREETINGS = [
    b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    b"\xff" * 4096,
    b"\x16\x03\x01\x02\x00",  # of TLS
    b"\0",
    ZMTP_WITH_CURVE + b"\x04\xc8\x05HELLO",
    ZMTP_WITH_CURVE + b"\x06" + (1 << 40).to_bytes(8, "big") + b"\x05HELLO",
]
PATIENCE_MS = PATIENCE_S * 1e3


def keys(*words: str) -> None:
    """`starsd keys ...`"""
    keys_command.main(list(words), standalone_mode=False)


def trust(folder: Path, pair: KeyPair) -> None:
    keys("trust", pair.key.name, pair.key.public, "--dir", str(folder / "trusted"))


@dataclass(frozen=True)
class Trusting:
    running: Running
    folder: Path


@pytest.fixture(scope="module")
def service(head_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trusting]:
    folder = tmp_path_factory.mktemp("keys")
    SERVICE.save(folder / "service.key")
    trust(folder, JET)
    trust(folder, LAPTOP)
    with serving(head_folder, "--keys", str(folder), "--monitor", "tcp://127.0.0.1:0") as running:
        yield Trusting(running, folder)


@pytest.fixture
def new_edge(service: Trusting) -> Iterator[Callable[..., Edge]]:
    """Makes edges that are closed at the end."""
    with contextlib.ExitStack() as open_edges:

        def make(pair: KeyPair | None, identity: Identity = IDENTITY, server: KeyPair = SERVICE) -> Edge:
            own = EdgeKeys(pair, server.key.public) if pair else None
            edge = Edge(service.running.address, own, identity=identity)
            open_edges.callback(edge.close)
            return edge

        yield make


@pytest.fixture
def peer(service: Trusting) -> Iterator[SyncSocket]:
    """A trusted device's bare socket, for messages that no client of ours sends."""
    with make_context() as context, edge_socket(context, EdgeKeys(LAPTOP, SERVICE.key.public)) as bare:
        bare.maxmsgsize = -1
        bare.connect(service.running.address)
        assert bare.poll(PATIENCE_MS, zmq.POLLOUT)
        yield bare


def test_its_own_key_opens_it_and_its_self_test_is_no_refusal(
    service: Trusting, new_edge: Callable[..., Edge]
) -> None:
    """The workstation watches and tries its service with the key that it has anyway."""
    assert "refused" not in service.running.log
    new_edge(SERVICE).drafts_again()


def test_a_revoked_device_is_told_and_left_and_others_go_on(
    service: Trusting, new_edge: Callable[..., Edge]
) -> None:
    """It says nothing meanwhile: it is told all the same, and its sessions end. Trusted again, it gets in."""
    silent, other = new_edge(JET).joined(), new_edge(LAPTOP).joined()
    other.drafts_again()
    keys("revoke", "jet1", "--dir", str(service.folder / "trusted"))
    silent.waits_for_reason("does not trust this device's key any more: `starsd keys trust` it there")
    silent.generate(PROMPT, 20)
    assert silent.drafter.stats().counters.rounds == 0
    other.drafts_again()
    assert other.drafter.stats().counters.outages == 0
    assert "jet1: revoked, 1 connections told" in service.running.log
    trust(service.folder, JET)
    new_edge(JET).drafts_again()


def test_a_revoked_device_that_goes_on_sending_gets_nothing(service: Trusting, peer: SyncSocket) -> None:
    """A client of somebody's own that keeps its connection: every message is refused."""
    ping = encode(Ping(Head(1), 5))
    peer.send_multipart(ping)
    assert peer.poll(PATIENCE_MS)
    peer.recv_multipart()
    keys("revoke", "laptop", "--dir", str(service.folder / "trusted"))
    try:
        assert peer.poll(PATIENCE_MS)
        assert b"does not trust" in peer.recv_multipart()[1]
        peer.send_multipart(ping)
        assert peer.poll(PATIENCE_MS)
        assert b"does not trust" in peer.recv_multipart()[1]
    finally:
        trust(service.folder, LAPTOP)


def test_a_revoked_device_watches_no_more_and_another_does(service: Trusting) -> None:
    """A watcher says nothing, so no message of its own can be refused: its connection is ended."""
    revoked, other = (watching(service, pair) for pair in (LAPTOP, JET))
    try:
        watch_until(other, LinkState.UP)
        watch_until(revoked, LinkState.UP)
        keys("revoke", "laptop", "--dir", str(service.folder / "trusted"))
        watch_until(revoked, LinkState.UNKNOWN_KEY)
        other.poll(0)
        assert other.poll(PATIENCE_S)
        assert other.links[0].state is LinkState.UP
    finally:
        trust(service.folder, LAPTOP)
        revoked.close()
        other.close()


def watching(service: Trusting, pair: KeyPair) -> ZmqFeed:
    words = (pair.key.public, pair.secret, SERVICE.key.public)
    return ZmqFeed([Source("desk", service.running.monitor, WatchKeys(*[word.encode() for word in words]))])


def watch_until(feed: ZmqFeed, state: LinkState) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while feed.links[0].state is not state:
        assert time.monotonic() < deadline_s, feed.links
        feed.poll(0.05)


def test_every_failure_says_which_it_is_and_what_to_do(
    service: Trusting, new_edge: Callable[..., Edge]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        nowhere = f"tcp://127.0.0.1:{closed.getsockname()[1]}"
    down = Edge(nowhere)
    unrouted = Edge("tcp://255.255.255.255:7731", EdgeKeys(JET, SERVICE.key.public))
    told = {
        new_edge(
            STRANGER
        ): f"does not know this device's key {STRANGER.key.fingerprint}: `starsd keys trust`",
        new_edge(JET, server=STRANGER): "does not hold the draft service's key that this device knows",
        new_edge(None): "wants keys: give this device a key",
        new_edge(JET, OTHER_TARGET): "target_hash is 00 here and ff there",
        down: f"nothing listens at {nowhere}: is the draft service running there?",
        unrouted: "no route to 255.255.255.255: is this device in the same network?",
    }
    try:
        for edge, words in told.items():
            edge.waits_for_reason(words)
            edge.generate(PROMPT, 3)
    finally:
        down.close()
        unrouted.close()


def test_strangers_at_the_port_change_nothing_for_those_who_are_in(
    service: Trusting, new_edge: Callable[..., Edge]
) -> None:
    """Stray bytes, HTTP, a scanner, 200 connections that say nothing; and what the first ones pour in."""
    edge = new_edge(JET).joined()
    edge.drafts_again()
    address = ("127.0.0.1", service.running.port)
    before, thrown = service.running.resident_bytes("gateway"), 0
    with contextlib.ExitStack() as connections:
        for _ in range(16):
            for greeting in STRANGE_GREETINGS:
                stranger = connections.enter_context(socket.create_connection(address))
                with contextlib.suppress(ConnectionError):
                    thrown += stranger.send(greeting)
                    thrown += stranger.send(MIB)
        for _ in range(200):
            connections.enter_context(socket.create_connection(address))
        edge.generate(PROMPT, 60)
        edge.drafts_again()
        newcomer = new_edge(LAPTOP)
        newcomer.drafts_again()
    assert edge.drafter.stats().counters.outages == 0
    assert thrown > 16 * len(MIB)
    assert service.running.resident_bytes("gateway") - before < thrown / 4


def test_a_device_that_never_reads_loses_its_answers_and_holds_up_nobody(
    service: Trusting, new_edge: Callable[..., Edge]
) -> None:
    """It asks and asks. A service that waited for it, or kept what it does not read, would stop or grow."""
    edge = new_edge(JET).joined()
    ping = encode(Ping(Head(1), 5))
    with make_context() as context, edge_socket(context, EdgeKeys(LAPTOP, SERVICE.key.public)) as deaf:
        deaf.rcvbuf = 4096
        deaf.connect(service.running.address)
        while "dropped, slow peer" not in service.running.log:
            for _ in range(500):
                assert deaf.poll(PATIENCE_MS, zmq.POLLOUT)
                deaf.send_multipart(ping)
        edge.drafts_again()
        new_edge(JET).drafts_again()
    assert edge.drafter.stats().counters.outages == 0


def test_a_device_that_opens_connections_without_end_is_stopped_and_told(
    service: Trusting, new_edge: Callable[..., Edge]
) -> None:
    """A trusted one, whose program leaks them. Nobody else waits; when it ends the device gets in again."""
    edge = new_edge(JET).joined()
    with make_context() as context, contextlib.ExitStack() as leaked:
        for _ in range(MAX_CONNECTIONS):
            bare = leaked.enter_context(edge_socket(context, EdgeKeys(LAPTOP, SERVICE.key.public)))
            bare.connect(service.running.address)
            assert bare.poll(PATIENCE_MS, zmq.POLLOUT)
        new_edge(LAPTOP).waits_for_reason("takes no more connections of this device")
        assert "laptop has as many connections as it may" in service.running.log
        edge.drafts_again()
        new_edge(JET).drafts_again()
    new_edge(LAPTOP).drafts_again()
    assert edge.drafter.stats().counters.outages == 0


def test_a_frame_beyond_the_limit_ends_its_own_connection_alone(
    service: Trusting, peer: SyncSocket, new_edge: Callable[..., Edge]
) -> None:
    edge = new_edge(JET).joined()
    peer.send_multipart([encode(Ping(Head(1), 5))[0], MIB * 2])
    edge.drafts_again()
    assert edge.drafter.stats().counters.outages == 0
    peer.send_multipart([encode(Ping(Head(1), 5))[0], MIB[:70_000]])  # within the frame's limit, not PING's
    assert peer.poll(PATIENCE_MS)
    assert b"a PING padded with 70000 bytes" in peer.recv_multipart()[-1]
    assert edge.drafter.stats().counters.outages == 0
