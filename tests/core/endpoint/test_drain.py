"""Told to stop in the middle of an answer: it ends first, or its client is told that its time is up."""

from __future__ import annotations

import json
import socket
import threading
import time

import pytest

from starsd_edge.decoding.roles import TargetOutput
from starsd_edge.decoding.tree import DraftTree
from tests.core.chat.toys import CountingTarget, toy_speaker
from tests.core.endpoint.serving import Served, httpx, serving

FOX = "The quick brown fox jumps over the lazy dog."
ASK = {"model": "toy", "messages": [{"role": "user", "content": "go"}], "stream": True}


class Gated(CountingTarget):
    """Holds the forward after its first ones until it is let go on."""

    go_on = threading.Event()
    free_forwards = 3

    def forward(self, tree: DraftTree) -> TargetOutput:
        self.free_forwards -= 1
        if self.free_forwards < 0:
            assert self.go_on.wait(120)
        return super().forward(tree)


@pytest.fixture(autouse=True)
def gate() -> threading.Event:
    Gated.go_on = threading.Event()
    return Gated.go_on


def stop_listening(served: Served) -> None:
    """What SIGTERM does; returns when nobody new is let in."""
    served.server.should_exit = True
    while True:
        try:
            httpx.get(f"{served.url}/health", timeout=5)
        except httpx.HTTPError:
            return


def said(lines: list[str]) -> str:
    return "".join(
        json.loads(line[6:])["choices"][0]["delta"].get("content", "")
        for line in lines
        if line.startswith("data: {")
    )


def test_an_answer_under_way_ends_first(gate: threading.Event) -> None:
    with (
        serving(toy_speaker(target=Gated, script=FOX)) as served,
        httpx.stream("POST", f"{served.url}/v1/chat/completions", json=ASK, timeout=120) as response,
    ):
        lines = response.iter_lines()
        begun = [next(lines)]
        stop_listening(served)
        gate.set()
        assert said(begun + list(lines)) == FOX


def test_at_the_end_of_its_time_everybody_without_an_answer_is_told(gate: threading.Event) -> None:
    """An event for the stream under way, 503 for the request behind it. Both saw the connection end."""
    body = json.dumps({**ASK, "stream": False}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
    with (
        serving(toy_speaker(target=Gated, script=FOX), drain_s=0.0) as served,
        httpx.stream("POST", f"{served.url}/v1/chat/completions", json=ASK, timeout=120) as response,
        socket.create_connection(("127.0.0.1", served.port), timeout=120) as behind,
    ):
        lines = response.iter_lines()
        next(lines)
        behind.sendall(head.encode() + body)
        while not served.endpoint.worker.num_waiting:
            time.sleep(0.005)
        served.server.should_exit = True
        told = [line for line in lines if line]
        refused = b"".join(iter(lambda: behind.recv(4096), b""))
        gate.set()
    assert json.loads(told[-1].removeprefix("data: "))["error"]["message"] == "the server is stopping"
    status, _, words = refused.partition(b"\r\n")
    assert status.startswith(b"HTTP/1.1 503")
    assert b"retry-after: " in words
    assert b"the server is stopping" in words


def test_a_body_under_way_at_the_end_is_told_when_to_come_again() -> None:
    """Its request was cancelled in the middle: 500, and a traceback in the log."""
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{"
    with (
        serving(toy_speaker(script=FOX), drain_s=0.0) as served,
        socket.create_connection(("127.0.0.1", served.port), timeout=120) as client,
    ):
        client.sendall(head)
        while not served.endpoint.bodies.num_under_way:
            time.sleep(0.005)
        served.server.should_exit = True
        told = b"".join(iter(lambda: client.recv(4096), b"")).decode()
    status, _, words = told.partition("\r\n")
    assert status.startswith("HTTP/1.1 503")
    assert "retry-after: " in words
    assert "the server is stopping" in words
