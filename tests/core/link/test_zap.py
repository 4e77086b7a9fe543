"""Who gets in over real sockets: known keys, and nobody else, whatever happens to the handler."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import zmq
from zmq.utils.monitor import recv_monitor_message

from starsd_edge.errors import AuthenticationError, ConfigError, LinkError
from starsd_edge.link.keys import KeyPair
from starsd_edge.link.sockets import (
    EdgeKeys,
    check_private,
    edge_socket,
    is_local,
    make_context,
    seed_libc,
    service_socket,
)
from starsd_edge.link.zap import Authenticator, Knock, check_stranger_is_refused

SERVER, JET, STRANGER = (KeyPair.generate(name) for name in ("service", "jet1", "stranger"))
WAIT_MS = 5_000


@pytest.fixture
def context() -> Iterator[zmq.Context]:
    context = make_context()
    yield context
    context.destroy(linger=0)


class Door:
    """A service socket with a handler, on a loopback port."""

    def __init__(self, context: zmq.Context, device_of, with_handler: bool = True) -> None:
        self.context = context
        self.knocks: list[Knock] = []
        self.authenticator = Authenticator(context, device_of, self.knocks.append)
        if with_handler:
            self.authenticator.start()
        self.socket = service_socket(context, SERVER)
        self.address = f"tcp://127.0.0.1:{self.socket.bind_to_random_port('tcp://127.0.0.1')}"

    def knock(self, keys: EdgeKeys | None) -> int:
        """The handshake event a peer with `keys` ends with."""
        peer = edge_socket(self.context, keys)
        monitor = peer.get_monitor_socket(
            zmq.EVENT_HANDSHAKE_SUCCEEDED
            | zmq.EVENT_HANDSHAKE_FAILED_AUTH
            | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
            | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
        )
        peer.connect(self.address)
        assert monitor.poll(WAIT_MS)
        event = int(recv_monitor_message(monitor)["event"])
        peer.disable_monitor()
        monitor.close(0)
        peer.close(0)
        return event

    def close(self) -> None:
        self.authenticator.stop()
        self.socket.close(0)


@pytest.fixture
def door(context: zmq.Context) -> Iterator[Door]:
    door = Door(context, {JET.key.public: "jet1"}.get)
    yield door
    door.close()


def test_a_known_key_gets_in_and_is_named(door: Door) -> None:
    assert door.knock(EdgeKeys(JET, SERVER.key.public)) == zmq.EVENT_HANDSHAKE_SUCCEEDED
    (knock,) = door.knocks
    assert (knock.device, knock.fingerprint) == ("jet1", JET.key.fingerprint)
    assert knock.address == "127.0.0.1"  # and not as IPv6 writes it


def test_a_message_carries_the_key_it_was_authenticated_with(door: Door) -> None:
    """Revocation is checked on every message, so each must say whose it is."""
    peer = edge_socket(door.context, EdgeKeys(JET, SERVER.key.public))
    peer.connect(door.address)
    assert peer.poll(WAIT_MS, zmq.POLLOUT)
    peer.send(b"hello")
    assert door.socket.poll(WAIT_MS)
    frames = door.socket.recv_multipart(copy=False)
    assert frames[1].get("User-Id") == JET.key.public
    peer.close(0)


def test_a_stranger_and_a_plain_peer_stay_outside(door: Door) -> None:
    stranger = EdgeKeys(KeyPair.generate("x"), SERVER.key.public)
    assert door.knock(stranger) == zmq.EVENT_HANDSHAKE_FAILED_AUTH
    assert door.knock(None) in (zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL, zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL)
    assert [knock.device for knock in door.knocks] == [None]


def test_a_device_does_not_talk_to_another_service(door: Door) -> None:
    wrong = EdgeKeys(JET, KeyPair.generate("other").key.public)
    assert door.knock(wrong) == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL


def test_a_handler_that_fails_refuses_and_lives_on(context: zmq.Context) -> None:
    calls = []

    def device_of(public: str) -> str | None:
        calls.append(public)
        if len(calls) == 1:
            raise RuntimeError("the disk is gone")
        return "jet1"

    door = Door(context, device_of)
    assert door.knock(EdgeKeys(JET, SERVER.key.public)) == zmq.EVENT_HANDSHAKE_FAILED_AUTH
    assert door.knock(EdgeKeys(JET, SERVER.key.public)) == zmq.EVENT_HANDSHAKE_SUCCEEDED
    assert door.authenticator.alive()
    door.close()


def test_the_self_test_passes_where_strangers_are_refused(door: Door) -> None:
    check_stranger_is_refused(door.context, door.socket, SERVER.key.public, STRANGER)
    assert door.knock(EdgeKeys(JET, SERVER.key.public)) == zmq.EVENT_HANDSHAKE_SUCCEEDED


def test_the_self_test_fails_where_anybody_gets_in(context: zmq.Context) -> None:
    door = Door(context, lambda public: "anybody")
    with pytest.raises(AuthenticationError, match="a stranger's key was accepted"):
        check_stranger_is_refused(context, door.socket, SERVER.key.public, STRANGER)
    door.close()


def test_the_self_test_fails_where_nobody_answers(context: zmq.Context) -> None:
    door = Door(context, lambda public: None, with_handler=False)
    with pytest.raises(LinkError, match="nobody decides"):
        check_stranger_is_refused(context, door.socket, SERVER.key.public, STRANGER)
    door.close()


def test_without_a_handler_nobody_gets_in(context: zmq.Context) -> None:
    """libzmq admits everybody when the handler is missing, unless the domain is enforced."""
    socket = service_socket(context, SERVER)
    port = socket.bind_to_random_port("tcp://127.0.0.1")
    peer = edge_socket(context, EdgeKeys(JET, SERVER.key.public))
    monitor = peer.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
    peer.connect(f"tcp://127.0.0.1:{port}")
    assert monitor.poll(WAIT_MS)
    assert recv_monitor_message(monitor)["event"] == zmq.EVENT_DISCONNECTED
    for open_socket in (monitor, peer, socket):
        open_socket.close(0)


@pytest.mark.parametrize(
    ("address", "local"),
    [
        ("ipc:///run/starsd.sock", True),
        ("inproc://x", True),
        ("tcp://127.0.0.1:7700", True),
        ("tcp://127.8.9.1:7700", True),
        ("tcp://[::1]:7700", True),
        ("tcp://localhost:7700", True),
        ("tcp://0.0.0.0:7700", False),
        ("tcp://*:7700", False),
        ("tcp://[::]:7700", False),
        ("tcp://eth0:7700", False),
        ("tcp://192.168.1.5:7700", False),
        ("tcp://localhost.example.org:7700", False),
        ("tcp://127.0.0.1.example.org:7700", False),
        ("udp://127.0.0.1", False),
        ("", False),
    ],
)
def test_only_addresses_of_this_machine_do_without_keys(address: str, local: bool) -> None:
    assert is_local(address) is local
    check_private(address, has_key=True)
    if not local:
        with pytest.raises(ConfigError, match="without keys"):
            check_private(address, has_key=False)


def test_seeding_libc_is_harmless() -> None:
    seed_libc()
