"""SFTP (version 3) as transfers need it: requests that nobody waits for. No socket, no clock.

A lane is one SFTP channel, driven by one thread: requests go out as fast as the channel's window takes them,
answers are looked at when they are there. paramiko's own client waits for every open answer once it looks for
one. One thread that feeds several lanes in turn is also twice as fast as a thread for each: those spend
their time handing the interpreter and the connection's lock to each other.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Callable
from typing import Protocol

__all__ = ["ByteChannel", "Mode", "SftpLane"]

VERSION_3 = 3
INIT, VERSION, OPEN, CLOSE, READ, WRITE = 1, 2, 3, 4, 5, 6
STATUS, HANDLE, DATA, EXTENDED, EXTENDED_REPLY = 101, 102, 103, 200, 201
OK, FAILURE = 0, 4
LIMITS = b"limits@openssh.com"
# A write goes out in SSH packets of 32 KiB less 64 bytes; a few bytes more would be one more packet for them.
PACKET_BYTES, WRITE_HEADER_BYTES = 32 * 1024 - 64, 32
LEAST_WRITE_BYTES = PACKET_BYTES - WRITE_HEADER_BYTES  # what every server takes
# Fewer and larger writes are fewer answers, but the lanes take turns after each and shall all be busy.
MOST_WRITE_BYTES = 4 * PACKET_BYTES - WRITE_HEADER_BYTES
MOST_ANSWER_BYTES = 256 * 1024
RECEIVE_BYTES = 64 * 1024
NONSENSE = "the SFTP server's answers make no sense: does a login print something there?"


class ByteChannel(Protocol):
    """What a lane needs of an SSH channel; as paramiko's."""

    def send(self, s: bytes, /) -> int: ...
    def recv(self, nbytes: int, /) -> bytes: ...
    def recv_ready(self) -> bool: ...


class Mode(enum.Enum):
    """How a file is opened. Bits: 1 reads, 2 writes, 4 at its end, 8 makes it if it is not there."""

    READ = 1
    WRITE = 2
    APPEND = 2 | 4 | 8


class SftpLane:
    """One SFTP channel, from its greeting on.

    All methods raise EOFError when the server ends the channel, and OSError when it refuses a request, which
    may be an earlier one.
    """

    def __init__(self, channel: ByteChannel) -> None:
        self._channel = channel
        self._inbox = bytearray()
        self._count = 0
        self._waiting: dict[int, Callable[[int, bytes], None]] = {}
        self._handles: dict[str, bytes] = {}  # empty while the answer is under way
        self.write_bytes = LEAST_WRITE_BYTES
        self._greet()

    def open(self, path: str, mode: Mode) -> None:
        """Open a file, unless it is open."""
        if path in self._handles:
            return
        self._handles[path] = b""

        def opened(kind: int, body: bytes) -> None:
            if kind != HANDLE:
                _check(path, kind, body)
            self._handles[path] = _text(body, 0)
            if not self._handles[path]:
                raise OSError(NONSENSE)

        self._request(OPEN, _string(path.encode()) + struct.pack(">II", mode.value, 0), opened)

    def write(
        self, path: str, offset: int, size: int, read: Callable[[int], bytes], written: Callable[[], None]
    ) -> None:
        """Write `size` bytes, at most `write_bytes`, to an open file.

        `written` is called once the device has them, by a later call of whatever method.
        `read` gives as many bytes as it is asked for, or raises, which leaves the lane unusable.
        """
        handle = self._handle(path)

        def answered(kind: int, body: bytes) -> None:
            _check(path, kind, body)
            written()

        body = _string(handle) + struct.pack(">QI", offset, size)
        head = self._head(WRITE, len(body) + size, answered) + body
        first = min(size, PACKET_BYTES - len(head))
        self._send(head + read(first))
        for start in range(first, size, PACKET_BYTES):
            self._send(read(min(PACKET_BYTES, size - start)))

    def append(self, path: str, data: bytes) -> None:
        """Write a little to the end of a file that was opened for that."""
        body = _string(self._handle(path)) + struct.pack(">Q", 0) + _string(data)
        self._request(WRITE, body, lambda kind, body: _check(path, kind, body))

    def read(self, path: str, offset: int, size: int, received: Callable[[bytes], None]) -> None:
        """Ask for `size` bytes of an open file; `received` gets them once they are here."""

        def answered(kind: int, body: bytes) -> None:
            if kind != DATA:
                _check(path, kind, body)
            data = _text(body, 0)
            if len(data) != size:
                raise OSError(f"{path} became shorter")
            received(data)

        self._request(READ, _string(self._handle(path)) + struct.pack(">QI", offset, size), answered)

    def close(self, path: str) -> None:
        """Close a file after what was written to it."""
        handle = self._handle(path)
        del self._handles[path]
        self._request(CLOSE, _string(handle), lambda kind, body: _check(path, kind, body))

    def collect(self) -> None:
        """Look at the answers that are there."""
        while self._channel.recv_ready():
            self._receive()

    def wait(self) -> None:
        """Wait for the next answers."""
        self._receive()

    def settle(self) -> None:
        """Wait for all answers."""
        while self._waiting:
            self._receive()

    def _handle(self, path: str) -> bytes:
        while not (handle := self._handles[path]):
            self._receive()
        return handle

    def _greet(self) -> None:
        """Agree on the version, and on how much a write may hold where the server tells."""
        self._send(struct.pack(">IBI", 5, INIT, VERSION_3))
        while (greeting := self._packet()) is None:
            self._inbox += self._more()
        if greeting[:1] != bytes([VERSION]):
            raise OSError(NONSENSE)
        if LIMITS in greeting:
            self._request(EXTENDED, _string(LIMITS), self._limit)
            self.settle()

    def _limit(self, kind: int, body: bytes) -> None:
        if kind == EXTENDED_REPLY:
            _packet, _read, write = _unpack(">QQQ", body)
            self.write_bytes = min(MOST_WRITE_BYTES, write or LEAST_WRITE_BYTES)

    def _request(self, kind: int, body: bytes, answered: Callable[[int, bytes], None]) -> None:
        self._send(self._head(kind, len(body), answered) + body)

    def _head(self, kind: int, body_bytes: int, answered: Callable[[int, bytes], None]) -> bytes:
        self._count += 1
        self._waiting[self._count] = answered
        return struct.pack(">IBI", 5 + body_bytes, kind, self._count)

    def _send(self, data: bytes) -> None:
        while data:
            sent = self._channel.send(data)
            if not sent:
                raise EOFError
            data = data[sent:]

    def _more(self) -> bytes:
        data = self._channel.recv(RECEIVE_BYTES)
        if not data:
            raise EOFError
        return data

    def _receive(self) -> None:
        """Wait for bytes, and hand whole answers to whoever waits for them."""
        self._inbox += self._more()
        while (packet := self._packet()) is not None:
            kind, number = _unpack(">BI", packet)
            if number not in self._waiting:
                raise OSError(NONSENSE)
            self._waiting.pop(number)(kind, packet[5:])

    def _packet(self) -> bytes | None:
        """The next whole message, without its length."""
        if len(self._inbox) < 4:
            return None
        (size,) = struct.unpack_from(">I", self._inbox)
        if size > MOST_ANSWER_BYTES:
            raise OSError(NONSENSE)
        if len(self._inbox) < 4 + size:
            return None
        packet = bytes(self._inbox[4 : 4 + size])
        del self._inbox[: 4 + size]
        return packet


def _check(path: str, kind: int, body: bytes) -> None:
    """Raises OSError unless the answer says that all went well."""
    if kind != STATUS:
        raise OSError(NONSENSE)
    (code,) = _unpack(">I", body)
    if code != OK:
        said = _text(body, 4).decode("utf-8", "replace")
        raise OSError(f"{path}: {said}{' (is the disk full?)' if code == FAILURE else ''}")


def _string(data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + data


def _text(body: bytes, offset: int) -> bytes:
    (size,) = _unpack(">I", body[offset:])
    begin = offset + 4
    if len(body) < begin + size:
        raise OSError(NONSENSE)
    return body[begin : begin + size]


def _unpack(form: str, body: bytes) -> tuple[int, ...]:
    try:
        return struct.unpack_from(form, body)
    except struct.error:
        raise OSError(NONSENSE) from None
