"""A lane's bytes on the wire, its patience with answers, what it says of servers that misbehave. No sshd."""

from __future__ import annotations

import io
import struct
from collections import deque
from collections.abc import Callable

import pytest

from starsd_deploy.sftp_lane import (
    LEAST_WRITE_BYTES,
    MOST_WRITE_BYTES,
    NONSENSE,
    PACKET_BYTES,
    Mode,
    SftpLane,
)

GREETING = struct.pack(">IBI", 5, 2, 3)
LIMITS = b"\x00\x00\x00\x12limits@openssh.com\x00\x00\x00\x011"


def message(kind: int, body: bytes) -> bytes:
    return struct.pack(">IB", 1 + len(body), kind) + body


def text(data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + data


def status(number: int, code: int = 0, said: bytes = b"") -> bytes:
    return message(101, struct.pack(">II", number, code) + text(said) + text(b""))


def handle(number: int, name: bytes = b"h") -> bytes:
    return message(102, struct.pack(">I", number) + text(name))


class Server:
    """The channel's far end: what was sent to it, and answers to be received as they are given."""

    def __init__(self, *answers: bytes) -> None:
        self.sent: list[bytes] = []
        self.answers = deque(answers)

    def send(self, s: bytes) -> int:
        self.sent.append(s)
        return len(s)

    def recv(self, nbytes: int) -> bytes:
        return self.answers.popleft() if self.answers else b""

    def recv_ready(self) -> bool:
        return bool(self.answers)


def reader(data: bytes) -> Callable[[int], bytes]:
    return io.BytesIO(data).read


def test_greeting_offers_version_3_and_plain_servers_get_small_writes() -> None:
    server = Server(GREETING)
    lane = SftpLane(server)
    assert server.sent == [b"\x00\x00\x00\x05\x01\x00\x00\x00\x03"]
    assert lane.write_bytes == LEAST_WRITE_BYTES


@pytest.mark.parametrize(
    ("limit", "expected"),
    [(100_000, 100_000), (261_120, MOST_WRITE_BYTES), (0, LEAST_WRITE_BYTES)],
)
def test_server_that_names_its_limits_gets_writes_within_them(limit: int, expected: int) -> None:
    answer = message(201, struct.pack(">IQQQQ", 1, 262_144, 261_120, limit, 1019))
    assert SftpLane(Server(message(2, struct.pack(">I", 3) + LIMITS), answer)).write_bytes == expected


def test_server_that_refuses_to_name_its_limits_gets_small_writes() -> None:
    server = Server(message(2, struct.pack(">I", 3) + LIMITS), status(1, 8, b"Operation unsupported"))
    assert SftpLane(server).write_bytes == LEAST_WRITE_BYTES


def test_writes_go_out_in_packets_before_any_answer_but_the_handles() -> None:
    server = Server(GREETING)
    lane = SftpLane(server)
    server.sent.clear()
    size = PACKET_BYTES + 10
    done: list[str] = []
    lane.open("/p", Mode.WRITE)
    lane.open("/p", Mode.WRITE)
    server.answers.append(handle(1))
    lane.write("/p", 7, size, reader(bytes(size)), lambda: done.append("first"))
    lane.write("/p", 9, 1, reader(b"x"), lambda: done.append("second"))
    opened = message(3, struct.pack(">I", 1) + text(b"/p") + struct.pack(">II", 2, 0))
    first = message(6, struct.pack(">I", 2) + text(b"h") + struct.pack(">Q", 7) + text(bytes(size)))
    second = message(6, struct.pack(">I", 3) + text(b"h") + struct.pack(">Q", 9) + text(b"x"))
    assert b"".join(server.sent) == opened + first + second
    assert [len(piece) for piece in server.sent[1:3]] == [PACKET_BYTES, len(first) - PACKET_BYTES]
    assert done == []
    server.answers += [status(2)[:5], status(2)[5:] + status(3)]  # pieces as a stream gives them
    lane.collect()
    assert done == ["first", "second"]


def test_appended_lines_and_closed_files() -> None:
    server = Server(GREETING)
    lane = SftpLane(server)
    server.sent.clear()
    lane.open("/j", Mode.APPEND)
    server.answers.append(handle(1))
    lane.append("/j", b"5\n")
    lane.close("/j")
    server.answers += [status(2), status(3)]
    lane.settle()
    opened = message(3, struct.pack(">I", 1) + text(b"/j") + struct.pack(">II", 2 | 4 | 8, 0))
    appended = message(6, struct.pack(">I", 2) + text(b"h") + struct.pack(">Q", 0) + text(b"5\n"))
    closed = message(4, struct.pack(">I", 3) + text(b"h"))
    assert b"".join(server.sent) == opened + appended + closed


def test_reads_are_asked_for_ahead_and_handed_over_as_they_come() -> None:
    server = Server(GREETING)
    lane = SftpLane(server)
    server.sent.clear()
    lane.open("/p", Mode.READ)
    server.answers.append(handle(1))
    got: list[bytes] = []
    lane.read("/p", 5, 3, got.append)
    lane.read("/p", 8, 2, got.append)
    opened = message(3, struct.pack(">I", 1) + text(b"/p") + struct.pack(">II", 1, 0))
    first = message(5, struct.pack(">I", 2) + text(b"h") + struct.pack(">QI", 5, 3))
    second = message(5, struct.pack(">I", 3) + text(b"h") + struct.pack(">QI", 8, 2))
    assert b"".join(server.sent) == opened + first + second
    server.answers.append(message(103, struct.pack(">I", 2) + text(b"abc")))
    lane.wait()
    assert got == [b"abc"]
    server.answers.append(message(103, struct.pack(">I", 3) + text(b"d")))
    with pytest.raises(OSError, match="/p became shorter"):
        lane.wait()


def test_read_beyond_the_end_is_the_servers_error() -> None:
    server = Server(GREETING)
    lane = SftpLane(server)
    lane.open("/p", Mode.READ)
    server.answers.append(handle(1))
    lane.read("/p", 5, 3, lambda data: None)
    server.answers.append(status(2, 1, b"End of file"))
    with pytest.raises(OSError, match="/p: End of file"):
        lane.settle()


@pytest.mark.parametrize(
    ("code", "said", "expected"),
    [(3, b"Permission denied", "/p: Permission denied$"), (4, b"Failure", "/p: Failure .is the disk full")],
)
def test_refused_write_names_the_file(code: int, said: bytes, expected: str) -> None:
    server = Server(GREETING)
    lane = SftpLane(server)
    lane.open("/p", Mode.WRITE)
    server.answers.append(handle(1))
    lane.write("/p", 0, 1, reader(b"x"), lambda: None)
    server.answers.append(status(2, code, said))
    with pytest.raises(OSError, match=expected):
        lane.settle()


def test_channel_that_ends_is_an_end_of_file() -> None:
    server = Server(GREETING)
    lane = SftpLane(server)
    lane.open("/p", Mode.WRITE)
    with pytest.raises(EOFError):
        lane.settle()


@pytest.mark.parametrize(
    "answer",
    [
        b"Welcome to the device!\n",  # what a login script prints
        status(77),
        message(101, b"\x00\x00\x00\x01"),
        message(105, struct.pack(">I", 1)),
        message(102, struct.pack(">II", 1, 9) + b"short"),
        message(102, struct.pack(">I", 1) + text(b"")),
        message(101, b""),
    ],
)
def test_answers_that_make_no_sense_are_refused(answer: bytes) -> None:
    server = Server(GREETING)
    lane = SftpLane(server)
    lane.open("/p", Mode.WRITE)
    server.answers.append(answer)
    with pytest.raises(OSError, match=NONSENSE[:30]):
        lane.settle()


def test_greeting_of_a_login_script_is_no_greeting() -> None:
    with pytest.raises(OSError, match=NONSENSE[:30]):
        SftpLane(Server(b"Welcome to the device!\n"))
