"""Real processes, real sockets, and everything that goes wrong between them: the text stays the target's own.

The service is `starsd draft serve` with a small random head; the edge is the real decode loop over a
RemoteDrafter, on a target that takes its time as a device would. `make test-lab` repeats some of it over the
kernel's own TCP on a bad link.
"""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from starsd_edge.protocol.codec import encode
from starsd_edge.protocol.messages import Head, Ping
from starsd_edge.testing import plain_text
from tests.e2e.bad_line import BadLine
from tests.e2e.drafting import (
    GREEDY,
    HIDDEN,
    PATIENCE_S,
    PROMPT,
    QUICK,
    VOCAB,
    Edge,
    PacedTarget,
    Running,
    serving,
)

pytestmark = pytest.mark.slow

STOPPED_S = 2.0  # longer than QUICK's edge waits for three answers
PROCESSES = ["gateway", "worker"]
# ZMTP 3.0 by hand: a DEALER without security.
GREETING = b"\xff" + bytes(8) + b"\x7f" + b"\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
READY = b"\x04\x1c\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER"
LONG_FRAME_AND_MORE = b"\x03"
ENDLESS = bytes(64 * 1024)
MEMORY_MIB = 1024  # of address space, which the gateway may take
UNDER_WAY_MIB = 32  # what both systems hold of a connection
# Frames of ZMTP, each the last of its message and short: heads of a type that nobody knows.
UNKNOWN_TYPE = bytes([*encode(Ping(Head(1), 5))[0][:4], 99, *encode(Ping(Head(1), 5))[0][5:]])
QUESTIONS = bytes([0, len(UNKNOWN_TYPE), *UNKNOWN_TYPE]) * 500
UNREAD = 100_000
ANSWER_BYTES = (
    300  # what one takes where ZeroMQ keeps it: two frames of about 50 bytes, and what it knows of them
)


def hand_made_peer(service: Running) -> socket.socket:
    """The handshake is over: what is sent before its end may be taken for a part of it, and refused."""
    peer = socket.socket()
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    peer.settimeout(PATIENCE_S)
    peer.connect(("127.0.0.1", service.port))
    peer.sendall(GREETING + READY)
    heard = b""
    while b"ROUTER" not in heard:
        more = peer.recv(4096)
        assert more
        heard += more
    return peer


@pytest.fixture(scope="module")
def service(head_folder: Path) -> Iterator[Running]:
    """One for all tests: whatever was done to it, it must serve the next one."""
    with serving(head_folder) as running:
        yield running


@pytest.fixture
def line(service: Running) -> Iterator[BadLine]:
    line = BadLine(service.port)
    yield line
    line.close()


@pytest.fixture
def edge(line: BadLine) -> Iterator[Edge]:
    edge = Edge(line.address).joined()
    yield edge
    edge.close()


def test_a_line_that_flaps_costs_no_token(edge: Edge, line: BadLine) -> None:
    edge.generate(PROMPT, 60, at=dict.fromkeys(range(5, 60, 9), line.cut))
    edge.drafts_again()
    assert edge.drafter.stats().counters.outages >= 1


def test_a_cable_that_is_out_is_not_waited_for(edge: Edge, line: BadLine) -> None:
    """Half-open: nobody is told, and heartbeats are not due yet."""
    edge.generate(PROMPT, 120, at={20: lambda: setattr(line, "silent", True)})
    line.silent = False
    line.cut()
    edge.drafts_again()


def test_a_far_away_service_drafts_late_and_changes_nothing(edge: Edge, line: BadLine) -> None:
    """300 ms there and back."""
    line.delay_s = 0.15
    edge.generate(PROMPT, 30)
    line.delay_s = 0.0
    edge.drafts_again()


def test_a_line_that_loses_packets_stalls_and_loses_no_token(edge: Edge, line: BadLine) -> None:
    """What TCP makes of 5 % loss: the data arrives, now and then a retransmission later."""
    line.stall_share = 0.05
    edge.generate(PROMPT, 100)
    edge.drafts_again()


def test_a_slow_uplink_takes_a_long_prompt_in_chunks_and_is_not_cut(line: BadLine) -> None:
    """2,000 rows of 128 bytes at 100 kB/s: over two seconds, while the answer is decoded already.

    Each chunk takes several `answer_s`: it has its own patience, or it would be sent again and again.
    """
    line.bytes_per_s = 100_000
    edge = Edge(line.address, max_len=4096, timing=replace(QUICK, chunk_s=PATIENCE_S)).joined()
    try:
        prompt = (np.arange(2000) * 7 % VOCAB).tolist()
        edge.generate(prompt, 20)
        edge.joined()
        assert edge.drafter.stats().counters.outages == 0
        assert 2000 * HIDDEN * 2 < line.bytes_up < 1.5 * 2000 * HIDDEN * 2
    finally:
        edge.close()


@pytest.mark.parametrize("name", PROCESSES)
def test_a_process_that_stands_still_is_not_waited_for_and_goes_on(
    edge: Edge, service: Running, name: str
) -> None:
    """SIGSTOP: its sockets live, and nothing answers. SIGCONT: all that came meanwhile is there at once."""
    go_on = threading.Timer(STOPPED_S, service.signal, (name, signal.SIGCONT))

    def stop() -> None:
        service.signal(name, signal.SIGSTOP)
        go_on.start()

    edge.generate(PROMPT, 100, at={20: stop})
    go_on.join()
    edge.drafts_again()


@pytest.mark.parametrize("name", PROCESSES)
def test_a_killed_process_costs_no_token_and_is_replaced(edge: Edge, service: Running, name: str) -> None:
    edge.generate(PROMPT, 60, at={20: lambda: service.signal(name, signal.SIGKILL)})
    service.wait_for_another(name)
    edge.drafts_again()


def test_a_killed_gateway_keeps_the_sessions(edge: Edge, line: BadLine, service: Running) -> None:
    """The context is at the service still: it is not sent again."""
    prompt = (np.arange(400) * 5 % VOCAB).tolist()
    edge.generate(prompt, 8)
    edge.joined()
    before = line.bytes_up
    assert before > 400 * HIDDEN * 2
    service.signal("gateway", signal.SIGKILL)
    service.wait_for_another("gateway")
    edge.waits_for_reason("")
    edge.joined()
    edge.generate([*prompt, 1], 8)
    edge.joined()
    assert line.bytes_up - before < 200 * HIDDEN * 2


def test_a_message_that_never_ends_is_cut_off_at_the_gateways_cap(edge: Edge, service: Running) -> None:
    """Frame after frame, each to be followed by more: no option of ZeroMQ bounds that, and with CURVE only a
    trusted device gets so far. At its cap the gateway drops the connection, or dies and is replaced."""
    with hand_made_peer(service) as stranger:
        frame = LONG_FRAME_AND_MORE + len(ENDLESS).to_bytes(8, "big") + ENDLESS
        sent = 0
        with contextlib.suppress(ConnectionError):
            while sent < 2 * MEMORY_MIB << 20:
                stranger.sendall(frame)
                sent += len(frame)
    assert MEMORY_MIB // 8 << 20 < sent < MEMORY_MIB + UNDER_WAY_MIB << 20
    edge.generate(PROMPT, 30)
    edge.drafts_again()


@pytest.mark.parametrize("sips", [0, 1], ids=["never", "a byte at a time"])
def test_a_peer_that_asks_and_hardly_reads_loses_answers_and_takes_nothing_from_others(
    edge: Edge, service: Running, sips: int
) -> None:
    """A gateway that waited for it would stand still, and one that kept its answers would grow."""
    edge.drafts_again()
    before, said = service.resident_bytes("gateway"), len(service.log)
    with contextlib.ExitStack() as peers:
        peer = [peers.enter_context(hand_made_peer(service))]

        def ask() -> None:
            try:
                peer[-1].sendall(QUESTIONS)
                peer[-1].recv(sips)
            except ConnectionError:  # who reads nothing for ten seconds is cut off
                peer.append(peers.enter_context(hand_made_peer(service)))

        for _ in range(UNREAD // 500):
            ask()
        assert service.resident_bytes("gateway") - before < UNREAD * ANSWER_BYTES / 4
        deadline_s = time.monotonic() + PATIENCE_S
        while "dropped, slow peer" not in service.log[said:]:
            assert time.monotonic() < deadline_s
            ask()
        edge.generate(PROMPT, 60, at=dict.fromkeys(range(5, 60, 5), ask))
        edge.drafts_again()
    assert edge.drafter.stats().counters.outages == 0


def test_a_device_that_sleeps_goes_on_where_it_was(line: BadLine) -> None:
    """Its process stands still while the service's end of the connection goes; then it wakes up."""
    count = 80
    command = [sys.executable, "-m", "tests.e2e.drafting", line.address, str(count), "0.01"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as device:
        assert device.stdout is not None
        said = [json.loads(device.stdout.readline()) for _ in range(20)]
        device.send_signal(signal.SIGSTOP)
        line.forget()
        device.send_signal(signal.SIGCONT)
        said += map(json.loads, device.stdout)
        assert device.wait(PATIENCE_S) == 0
    text = [token for line in said for token in line["tokens"]]
    assert text == plain_text(PacedTarget(), GREEDY, PROMPT, count)


def test_a_service_that_says_goodbye_moves_and_is_found_again(head_folder: Path) -> None:
    """SIGTERM in the middle of an answer: GOAWAY, rounds under way end, another service is found behind the
    same name at another address."""
    with serving(head_folder) as first:
        line = BadLine(first.port)
        edge = Edge(line.address).joined()
        try:
            edge.generate(PROMPT, 60, at={20: first.process.terminate})
            assert first.leave() == 0
            edge.waits_for_reason("draft service")
            edge.generate(PROMPT, 20)
            with serving(head_folder) as second:
                line.lead_to(second.port)
                edge.drafts_again()
                # Told to leave while its worker hangs, it leaves all the same.
                second.signal("worker", signal.SIGSTOP)
                edge.generate(PROMPT, 20)
                assert second.leave() == 0
                assert "did not drain in time" in second.log
        finally:
            edge.close()
            line.close()


def test_a_service_whose_worker_still_loads_does_not_wait_for_it(service: Running) -> None:
    """The last test of this service: told to leave while a new worker takes the place of a killed one."""
    service.signal("worker", signal.SIGKILL)
    service.wait_for_another("worker")
    assert service.leave() == 0
