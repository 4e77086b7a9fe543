"""The options of both sockets, and what each of them is for: faults that ZeroMQ's defaults bring."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from starsd_edge.errors import LinkError
from starsd_edge.link.keys import KeyPair
from starsd_edge.link.sockets import EdgeKeys, SyncSocket, edge_socket, make_context, service_socket

SERVICE, JET = KeyPair.generate("service"), KeyPair.generate("jet1")
KEYS = EdgeKeys(JET, SERVICE.key.public)
PATIENCE_MS = 60_000
BLOCK = bytes(60_000)

BOTH = {
    zmq.LINGER: 0,
    zmq.HEARTBEAT_IVL: 2_000,
    zmq.HEARTBEAT_TIMEOUT: 10_000,
    zmq.HEARTBEAT_TTL: 10_000,
    zmq.TCP_KEEPALIVE: 1,
    zmq.ROUTING_ID: b"",
}
ROUTER = BOTH | {
    zmq.SNDHWM: 8,
    zmq.RCVHWM: 4,
    zmq.SNDBUF: 128 << 10,
    zmq.MAXMSGSIZE: 1 << 20,
    zmq.HANDSHAKE_IVL: 2_000,
    zmq.TCP_MAXRT: 10_000,
    zmq.CURVE_SERVER: 1,
    zmq.ZAP_DOMAIN: b"draft",
    zmq.ZAP_ENFORCE_DOMAIN: 1,
}
DEALER = BOTH | {
    zmq.IMMEDIATE: 1,
    zmq.SNDHWM: 32,
    zmq.RCVHWM: 8,
    zmq.MAXMSGSIZE: 64 << 10,
    zmq.CONNECT_TIMEOUT: 3_000,
    zmq.RECONNECT_IVL: 100,
    zmq.RECONNECT_IVL_MAX: 5_000,
    zmq.CURVE_SERVER: 0,
}


@pytest.fixture
def context() -> Iterator[zmq.Context]:
    context = make_context()
    yield context
    context.destroy(linger=0)


def options_of(socket: SyncSocket, wanted: dict[int, object]) -> dict[int, object]:
    def plain(value: object) -> object:
        return value.rstrip(b"\0") if isinstance(value, bytes) else value

    with socket:
        return {option: plain(socket.getsockopt(option)) for option in wanted}


def test_both_sockets_have_every_option_that_was_paid_for(context: zmq.Context) -> None:
    assert ROUTER == options_of(service_socket(context, SERVICE), ROUTER)
    assert DEALER == options_of(edge_socket(context, KEYS), DEALER)
    assert context.get(zmq.IO_THREADS) == 2


@pytest.fixture
def ends(context: zmq.Context) -> Iterator[tuple[SyncSocket, SyncSocket, bytes]]:
    """A service's socket, an edge's that is connected to it, and the way back to that."""
    with service_socket(context, None) as service, edge_socket(context, None) as edge:
        edge.connect(f"tcp://127.0.0.1:{service.bind_to_random_port('tcp://127.0.0.1')}")
        assert edge.poll(PATIENCE_MS, zmq.POLLOUT)
        edge.send(b"hello")
        assert service.poll(PATIENCE_MS)
        yield service, edge, service.recv_multipart()[0]


def test_a_peer_that_does_not_read_is_an_error_and_loses_nothing_it_was_sent(
    ends: tuple[SyncSocket, SyncSocket, bytes],
) -> None:
    """By default a ROUTER drops silently; with MANDATORY alone it stalls for everybody."""
    service, edge, route = ends
    sent = 0
    with contextlib.suppress(zmq.Again):
        while True:
            service.send_multipart([route, sent.to_bytes(4, "little"), BLOCK], zmq.NOBLOCK)
            sent += 1
    assert sent > 0
    for number in range(sent):
        assert edge.poll(PATIENCE_MS)
        assert int.from_bytes(edge.recv_multipart()[0], "little") == number


def test_a_peer_that_nobody_knows_is_an_error(ends: tuple[SyncSocket, SyncSocket, bytes]) -> None:
    service, _, _ = ends
    with pytest.raises(zmq.ZMQError) as unknown:
        service.send_multipart([b"\0none", b"x"], zmq.NOBLOCK)
    assert unknown.value.errno == errno.EHOSTUNREACH


def test_nothing_is_queued_for_a_service_that_is_not_there(context: zmq.Context) -> None:
    """It would reach the next service stale."""
    with edge_socket(context, None) as edge:
        edge.connect("tcp://127.0.0.1:1")
        with pytest.raises(zmq.Again):
            edge.send(b"hello", zmq.NOBLOCK)


def test_two_edges_are_told_apart_without_naming_themselves(
    context: zmq.Context, ends: tuple[SyncSocket, SyncSocket, bytes]
) -> None:
    service, _, first = ends
    with edge_socket(context, None) as other:
        other.connect(service.getsockopt_string(zmq.LAST_ENDPOINT))
        assert other.poll(PATIENCE_MS, zmq.POLLOUT)
        other.send(b"hello")
        assert service.poll(PATIENCE_MS)
        assert first != service.recv_multipart()[0]


TESTED = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")


def test_every_test_that_the_table_of_traps_names_is_there() -> None:
    root = Path(__file__).parents[3]
    named = TESTED.findall((root / "docs" / "decisions" / "zeromq.md").read_text())
    assert len(named) > 20
    for file, name in named:
        assert f"def {name}(" in (root / file).read_text(), f"{file}::{name}"


def test_a_fork_cannot_use_its_parents_context(context: zmq.Context) -> None:
    """It could: sockets opened, messages were "sent", and nobody got them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forking with threads, which is the point
        child = os.fork()
    if child == 0:
        try:
            edge_socket(context, None)
        except LinkError as error:
            os._exit(0 if "spawn" in str(error) else 2)
        os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    edge_socket(context, None).close()  # the parent goes on
