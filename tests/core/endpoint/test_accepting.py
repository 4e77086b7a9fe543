"""Connections before anything was said on them: silent ones of a TLS server, and one file too many."""

from __future__ import annotations

import logging
import os
import resource
import select
import socket
import ssl
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from starsd_edge.endpoint import accepting
from starsd_edge.endpoint.accepting import connections_within
from starsd_edge.endpoint.server import Tls
from tests.core.chat.toys import toy_speaker
from tests.core.endpoint.serving import Served, self_signed, serving

ASK = b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
PATIENCE_S = 120


@pytest.fixture
def tls(tmp_path: Path) -> Tls:
    return Tls(*self_signed(tmp_path))


def connect(served: Served) -> socket.socket:
    return socket.create_connection(("127.0.0.1", served.port), timeout=PATIENCE_S)


def status(served: Served, tls: Tls) -> bytes:
    """The first line of an answer over TLS."""
    trusting = ssl.create_default_context(cafile=str(tls.certificate))
    with connect(served) as plain, trusting.wrap_socket(plain, server_hostname="localhost") as client:
        client.sendall(ASK)
        return b"".join(iter(lambda: client.recv(4096), b"")).partition(b"\r\n")[0]


def test_silent_connections_of_a_tls_server_take_places(tls: Tls, monkeypatch: pytest.MonkeyPatch) -> None:
    """They were counted after their handshake, that is, never."""
    monkeypatch.setattr(accepting, "HANDSHAKE_TIMEOUT_S", 600.0)
    with serving(toy_speaker(script="fox"), tls=tls, most=2) as served:
        with ExitStack() as stack:
            for _ in range(2):
                stack.enter_context(connect(served))
            assert b" 503 " in status(served, tls)
            more = [stack.enter_context(connect(served)) for _ in range(3)]  # of which two may be told
            ended, _, _ = select.select(more, [], [], PATIENCE_S)
            assert ended[0].recv(100) == b""
        last_s = time.monotonic() + PATIENCE_S
        while True:  # until the server has seen them go
            try:
                if b" 200 " in status(served, tls):
                    break
            except OSError:
                pass
            assert time.monotonic() < last_s


def test_a_tls_client_that_says_nothing_is_not_waited_for(tls: Tls, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accepting, "HANDSHAKE_TIMEOUT_S", 0.05)
    with serving(toy_speaker(script="fox"), tls=tls) as served, connect(served) as client:
        assert client.recv(100) == b""


def test_out_of_files_it_says_so_once_and_tries_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """asyncio logs a traceback for every try."""
    monkeypatch.setattr(accepting, "RETRY_S", 0.01)
    tries: list[OSError] = []
    pause = accepting.Acceptor._pause

    def seen(acceptor: accepting.Acceptor, error: OSError) -> None:
        tries.append(error)
        pause(acceptor, error)

    monkeypatch.setattr(accepting.Acceptor, "_pause", seen)
    caplog.set_level(logging.WARNING)
    with serving(toy_speaker(script="fox")) as served, socket.socket() as client:
        client.settimeout(PATIENCE_S)
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        first_free = os.dup(client.fileno())
        os.close(first_free)
        resource.setrlimit(resource.RLIMIT_NOFILE, (first_free, limits[1]))
        try:
            client.connect(("127.0.0.1", served.port))
            last_s = time.monotonic() + PATIENCE_S
            while len(tries) < 3 and time.monotonic() < last_s:
                time.sleep(0.005)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        client.sendall(ASK)
        assert client.recv(4096).startswith(b"HTTP/1.1 200")
    assert len(tries) >= 3
    assert [record.message for record in caplog.records] == [
        "cannot take a connection for now: Too many open files"
    ]


@pytest.mark.parametrize(("served", "max_files"), [(256, 1024), (256, 1 << 20), (86, 300), (1, 64)])
def test_connections_stay_within_what_the_process_may_open(served: int, max_files: int) -> None:
    assert connections_within(max_files) == served
