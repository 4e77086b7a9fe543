"""The stream between gateway and worker: messages come whole and in order, and nobody waits for anybody."""

from __future__ import annotations

import itertools
import select
import socket
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from starsd_server.local_stream import (
    LENGTH,
    MAX_MESSAGE_BYTES,
    QUEUE_MESSAGES,
    READ_BYTES,
    RETRY_S,
    AwayError,
    ClosedError,
    FullError,
    GatewayEnd,
    Stream,
    WorkerEnd,
)

PATIENCE_MS = 60_000


def framed(payload: bytes) -> bytes:
    return LENGTH.pack(len(payload)) + payload


@given(
    st.lists(st.binary(max_size=40), max_size=8),
    st.lists(st.integers(0, 400), max_size=20),
)
def test_a_message_that_comes_in_pieces_comes_whole(payloads: list[bytes], cuts: list[int]) -> None:
    data = b"".join(map(framed, payloads))
    edges = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    near, far = socket.socketpair()
    with near, closing(Stream(far)) as stream:
        received: list[bytes] = []
        for start, stop in itertools.pairwise(edges):
            near.sendall(data[start:stop])
            received += map(bytes, stream.receive())
    assert payloads == received


@pytest.fixture
def pair() -> Iterator[tuple[Stream, Stream]]:
    near, far = socket.socketpair()
    with closing(Stream(near)) as one, closing(Stream(far)) as other:
        yield one, other


@pytest.mark.parametrize("unread", [b"", b"left behind"], ids=["closed", "reset"])
def test_an_end_that_was_closed_is_told_from_one_that_is_out_of_step(
    pair: tuple[Stream, Stream], unread: bytes
) -> None:
    """Whoever started a process says how it ended; nothing more is to be logged of it."""
    here, there = pair
    here.put(framed(unread))
    here.flush()
    there.close()
    with pytest.raises(ClosedError):
        here.receive()
    here.put(framed(b"late"))
    with pytest.raises(ClosedError):
        here.flush()


def test_what_the_system_does_not_take_at_once_follows_in_order(pair: tuple[Stream, Stream]) -> None:
    """Messages many times as large as what fits between two processes."""
    near, far = pair
    payloads = [bytes([number]) * (3 * READ_BYTES + number) for number in range(40)]
    for payload in payloads:
        near.put(framed(payload))
    near.flush()
    assert near.unsent
    received: list[bytes] = []
    while len(received) < len(payloads):
        received += map(bytes, far.receive())
        near.flush()
    assert payloads == received
    assert not near.unsent


def test_one_that_does_not_read_fills_the_queue_and_is_not_waited_for(pair: tuple[Stream, Stream]) -> None:
    near, far = pair

    def send_until_full() -> int:
        for number in itertools.count():
            try:
                near.put(framed(number.to_bytes(4, "little") * 4096))
            except FullError:
                return number
            near.flush()
        raise AssertionError

    number = send_until_full()
    assert number >= QUEUE_MESSAGES
    numbers: list[int] = []
    while len(numbers) < number:
        numbers += [int.from_bytes(message[:4], "little") for message in far.receive()]
        near.flush()
    assert list(range(number)) == numbers
    near.put(framed(b"there is room again"))


def test_a_length_that_nothing_has_ends_the_connection() -> None:
    """A stream out of step must not be waited for, nor take the memory it talks of."""
    near, far = socket.socketpair()
    with near, closing(Stream(far)) as stream:
        near.sendall(LENGTH.pack(MAX_MESSAGE_BYTES))
        with pytest.raises(AwayError, match="a message of"):
            stream.receive()


def test_what_came_before_the_end_is_received_first() -> None:
    near, far = socket.socketpair()
    with closing(Stream(far)) as stream:
        with near:
            near.sendall(framed(b"last") + framed(b"torn")[:-1])
        assert [b"last"] == stream.receive()
        with pytest.raises(AwayError):
            stream.receive()


# -------------------------------------------------------------------------------------------- the two ends


class Process:
    """A poller, and what it says of an end."""

    def __init__(self) -> None:
        self.poller = select.poll()

    def received(self, end: GatewayEnd | WorkerEnd) -> list[bytes]:
        """Messages, once the poller says that there is something."""
        while end.fileno not in dict(self.poller.poll(PATIENCE_MS)):
            pass
        return [*map(bytes, end.receive())]


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[tuple[Process, WorkerEnd]]:
    process = Process()
    end = WorkerEnd(tmp_path, process.poller)
    yield process, end
    end.close()


def accept(process: Process, worker: WorkerEnd) -> None:
    assert worker.listener in dict(process.poller.poll(PATIENCE_MS))
    worker.accept()


def test_a_gateway_waits_for_no_worker_and_finds_it_when_it_comes(tmp_path: Path) -> None:
    here, there = Process(), Process()
    gateway = GatewayEnd(tmp_path, here.poller)
    gateway.look(0.0)
    with pytest.raises(AwayError):
        gateway.put(framed(b"lost"))
    worker = WorkerEnd(tmp_path, there.poller)
    gateway.look(RETRY_S / 2)
    assert not gateway.connected  # it does not ask all the time
    gateway.look(RETRY_S)
    gateway.put(framed(b"up"))
    gateway.flush()
    accept(there, worker)
    assert [b"up"] == there.received(worker)
    worker.put(framed(b"down"))
    worker.finish(timeout_s=0)
    worker.close()
    assert [b"down"] == here.received(gateway)
    assert [] == here.received(gateway)  # the end
    assert not gateway.connected


def test_what_a_worker_said_last_is_heard_by_a_gateway_that_had_more_for_it(tmp_path: Path) -> None:
    """One that is drained answers and leaves, while edges go on asking: the answers went with it."""
    here, there = Process(), Process()
    worker = WorkerEnd(tmp_path, there.poller)
    gateway = GatewayEnd(tmp_path, here.poller)
    gateway.look(0.0)
    accept(there, worker)
    worker.put(framed(b"last"))
    worker.finish(timeout_s=0)
    worker.close()
    gateway.put(framed(b"for nobody"))
    gateway.flush()
    assert gateway.connected
    assert [b"last"] == here.received(gateway)
    assert [] == here.received(gateway)  # the end
    assert not gateway.connected


def test_a_worker_that_was_killed_is_followed_by_another_at_the_same_place(tmp_path: Path) -> None:
    """Its socket's file is left; what was in line for it is not for the next one."""
    here, there = Process(), Process()
    gateway = GatewayEnd(tmp_path, here.poller)
    killed = WorkerEnd(tmp_path, Process().poller)
    gateway.look(0.0)
    gateway.put(framed(b"for the one that was killed"))
    killed.close()
    assert [] == here.received(gateway)
    worker = WorkerEnd(tmp_path, there.poller)
    gateway.look(0.0)
    gateway.put(framed(b"for the next"))
    gateway.flush()
    accept(there, worker)
    assert [b"for the next"] == there.received(worker)
    gateway.close()
    worker.close()


def test_a_new_gateway_takes_the_place_of_the_one_before(
    tmp_path: Path, worker: tuple[Process, WorkerEnd]
) -> None:
    """Killed in the middle of a message: what it began is not joined with what the next one says."""
    there, end = worker
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as killed:
        killed.connect(str(tmp_path / "engine.sock"))
        killed.sendall(framed(b"half of this")[:8])
        accept(there, end)
        assert [] == there.received(end)
        gateway = GatewayEnd(tmp_path, Process().poller)
        gateway.look(0.0)
        accept(there, end)  # before the end of the other is noticed
    gateway.put(framed(b"whole"))
    gateway.flush()
    assert [b"whole"] == there.received(end)
    gateway.close()


def test_a_reply_while_no_gateway_is_there_is_refused_at_once(worker: tuple[Process, WorkerEnd]) -> None:
    _, end = worker
    with pytest.raises(AwayError):
        end.put(framed(b"nobody hears this"))
    assert not end.wait(0.0)


def test_the_rest_leaves_when_the_other_end_reads_again(
    tmp_path: Path, worker: tuple[Process, WorkerEnd]
) -> None:
    there, end = worker
    here = Process()
    gateway = GatewayEnd(tmp_path, here.poller)
    gateway.look(0.0)
    accept(there, end)
    payload = b"x" * (MAX_MESSAGE_BYTES // 2)
    gateway.put(framed(payload))
    gateway.flush()
    received: list[bytes] = []
    while not received:
        received = there.received(end)
        if gateway.fileno in dict(here.poller.poll(0)):
            gateway.flush()
    assert [payload] == received
    assert not dict(here.poller.poll(0))  # nothing is left to write, and nothing wakes for it
    gateway.close()
