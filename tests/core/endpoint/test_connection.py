"""Clients that never come to the point: heads without an end, silence, connections without a number."""

from __future__ import annotations

import contextlib
import json
import logging
import signal
import socket
from collections.abc import Iterator

import pytest

from starsd_edge.chat.settings import ChatSettings
from starsd_edge.endpoint.app import Endpoint
from starsd_edge.endpoint.connection import MAX_HEAD_BYTES, Connection
from starsd_edge.endpoint.guard import Guard
from starsd_edge.endpoint.server import open_socket, serve
from starsd_edge.endpoint.worker import Worker
from tests.core.chat.toys import toy_speaker
from tests.core.endpoint.serving import MODEL, Served, serving

HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
ASK_SLOWLY = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{"


@pytest.fixture
def fox() -> Iterator[Served]:
    with serving(toy_speaker(script="The quick brown fox")) as served:
        yield served


def connect(served: Served) -> socket.socket:
    return socket.create_connection(("127.0.0.1", served.port), timeout=60)


def rest(client: socket.socket) -> bytes:
    """Everything up to the end of the connection."""
    return b"".join(iter(lambda: client.recv(65536), b""))


def refusal(answer: bytes) -> tuple[int, str]:
    """Status and words of the only answer in `answer`."""
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"connection: close" in head.lower()
    return int(head.split()[1]), json.loads(body)["error"]["message"]


def test_a_head_without_an_end_is_refused_and_cut_off(fox: Served) -> None:
    """Headers one after another, none of them long, for as long as the server takes them."""
    with connect(fox) as client:
        client.sendall(HEALTH[:-2])
        for number in range(2 * MAX_HEAD_BYTES // 16):
            client.sendall(f"x-{number:06d}: aaaa\r\n".encode())
        assert refusal(rest(client)) == (431, f"the head of a request has more than {MAX_HEAD_BYTES} bytes")


@pytest.mark.parametrize("before", [b"", HEALTH], ids=["alone", "behind another"])
def test_a_whole_head_that_is_too_long_is_refused(fox: Served, before: bytes) -> None:
    """It was read in one go, and never incomplete."""
    with connect(fox) as client:
        client.sendall(before + HEALTH[:-2] + b"x: " + b"a" * 70_000 + b"\r\n\r\n")
        *_, last = rest(client).split(b"HTTP/1.1 ")
    assert refusal(b"HTTP/1.1 " + last)[0] == 431


def test_a_head_of_the_allowed_length_is_read(fox: Served) -> None:
    head = HEALTH[:-2] + b"Connection: close\r\nx: "
    with connect(fox) as client:
        client.sendall(head + b"a" * (MAX_HEAD_BYTES - len(head) - 4) + b"\r\n\r\n")
        assert rest(client).startswith(b"HTTP/1.1 200")


def test_a_head_that_trickles_in_is_not_waited_for(fox: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Connection, "head_timeout_s", 0.05)
    with connect(fox) as client:
        client.sendall(HEALTH[:-2])
        status, words = refusal(rest(client))
    assert status == 408
    assert "head" in words


def test_a_connection_on_which_nothing_is_asked_ends_without_words(
    fox: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Connection, "head_timeout_s", 0.05)
    with connect(fox) as client:
        assert rest(client) == b""


def test_bytes_that_are_no_request_are_refused_and_not_logged(
    fox: Served, caplog: pytest.LogCaptureFixture
) -> None:
    logging.getLogger("uvicorn.error").addHandler(caplog.handler)
    with connect(fox) as client:
        client.sendall(b"\x16\x03\x01\x02\x00 TLS, say\r\n\r\n")
        assert refusal(rest(client))[0] == 400
    logging.getLogger("uvicorn.error").removeHandler(caplog.handler)
    assert not caplog.records


def test_requests_follow_each_other_on_one_connection(fox: Served) -> None:
    """Also where the next one comes with the first, and where a head comes in two pieces."""
    with connect(fox) as client:
        client.sendall(HEALTH + HEALTH[:20])
        got = b""
        while got.count(b"HTTP/1.1 200") < 1:
            got += client.recv(65536)
        client.sendall(HEALTH[20:-2] + b"Connection: close\r\n\r\n")
        got += rest(client)
    assert got.count(b"HTTP/1.1 200") == 2


def test_connections_beyond_the_bound_are_told_and_the_others_served(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Connection, "head_timeout_s", 600.0)
    with serving(toy_speaker(script="fox"), most=3) as fox, contextlib.ExitStack() as stack:
        held = [stack.enter_context(connect(fox)) for _ in range(3)]  # they are taken in their order
        with connect(fox) as late:
            assert refusal(rest(late)) == (503, "all 3 connections of this server are in use")
        held[0].sendall(HEALTH.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"))
        assert rest(held[0]).startswith(b"HTTP/1.1 200")
        with connect(fox) as next_one:
            next_one.sendall(HEALTH)
            assert next_one.recv(65536).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize(
    "said", [b"", HEALTH[:20], ASK_SLOWLY], ids=["silence", "half a head", "half a body"]
)
def test_an_address_that_holds_every_place_makes_room_for_another(
    said: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It kept everybody else out for as long as a head, or a body, has to arrive."""
    monkeypatch.setattr(Connection, "head_timeout_s", 600.0)
    with serving(toy_speaker(script="fox"), most=3) as fox, contextlib.ExitStack() as stack:
        held = [stack.enter_context(connect(fox)) for _ in range(3)]
        for client in held:
            client.sendall(said)
        with socket.create_connection(("127.0.0.1", fox.port), 60, source_address=("127.0.0.2", 0)) as other:
            other.sendall(HEALTH)
            assert other.recv(65536).startswith(b"HTTP/1.1 200")
            with contextlib.suppress(ConnectionResetError):
                assert held[0].recv(100) == b""  # the oldest one gave way
            with connect(fox) as more:
                assert refusal(rest(more))[0] == 503


def test_the_address_is_told_when_it_is_served_and_signals_are_heeded() -> None:
    """A SIGTERM just after that ended the process without a word to anybody."""
    reached: list[int] = []

    def told() -> None:
        socket.create_connection(listener.getsockname(), timeout=60).close()
        signal.raise_signal(signal.SIGTERM)

    before = signal.signal(signal.SIGTERM, lambda number, _: reached.append(number))
    worker = Worker(toy_speaker(script="fox"), 1)
    endpoint = Endpoint(worker, MODEL, ChatSettings(), Guard(), created=0)
    try:
        with open_socket("127.0.0.1", 0) as listener:
            serve(endpoint, listener, None, told)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert reached == [signal.SIGTERM]  # passed on at the end
    worker.close()
    worker.speaker.close()
