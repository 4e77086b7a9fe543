"""Gateway and worker over a local stream socket: whole messages, and neither end ever waits for the other.

The worker listens in the service's private folder, so that either of the two can die and come back. A message
is a length of four bytes and as many bytes; `ipc` says what they mean. What the kernel does not take at once
stays in a queue that is bounded in messages. What was under way when the other end went is lost, which the
link's protocol is made for.

A plain socket, because a ZeroMQ socket has a thread of its own at either end, and waking two more threads
costs a message more than all that is done to it (docs/decisions/zeromq.md).
"""

from __future__ import annotations

import contextlib
import logging
import select
import socket
import struct
import time
from collections import deque
from itertools import islice
from pathlib import Path

__all__ = ["READ", "WRITE", "AwayError", "FullError", "GatewayEnd", "Stream", "WorkerEnd"]

log = logging.getLogger("starsd.ipc")

SOCKET_NAME = "engine.sock"
LENGTH = struct.Struct("<I")
# A message of an edge is 256 KiB and two small frames, a snapshot at most 2 MiB.
# More is a stream out of step.
MAX_MESSAGE_BYTES = 4 * 2**20
# Of all edges together; beyond it the gateway says BUSY. A chunk is 256 KiB, so this is 64 MiB at most.
QUEUE_MESSAGES = 256
# Beyond so many its owner takes nothing new in, for a while: what is in line is in front of everybody.
CROWD_MESSAGES = 16
SEND_BUFFER_BYTES = 64 * 1024  # and so is what the system holds: a round's update fits, and few more
READ_BYTES = 64 * 1024  # a round's update in one piece; larger blocks are not kept by the allocator
READS_AT_ONCE = 16  # from the other end before anything else is looked at
MOST_BUFFERS = 1024  # one call of the system takes (IOV_MAX)
READ, WRITE = select.POLLIN, select.POLLOUT
RETRY_S = 0.02  # between attempts to reach a worker that is away


class AwayError(Exception):
    """The process at the other end is not there."""


class FullError(Exception):
    """It does not read, or not fast enough: as many messages wait for it as may."""


class ClosedError(AwayError):
    """It ended, or was ended."""


def gone(error: OSError) -> AwayError:
    """What it means that a call on the connection failed with `error`."""
    ended = isinstance(error, BrokenPipeError | ConnectionResetError)
    return (ClosedError if ended else AwayError)(f"the other process has gone: {error}")


class Stream:
    """Messages over a connected stream socket. Any call raises AwayError when the other end has gone."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        self._socket = connection
        self.unsent: deque[bytes | memoryview] = deque()  # the line: of each message what is left
        self._torn: list[bytes] = []  # pieces of a message that is not whole yet
        self._missing = 0  # bytes of it, or of its length

    def fileno(self) -> int:
        return self._socket.fileno()

    def close(self) -> None:
        self._socket.close()

    def put(self, message: bytes, *, must_go: bool = False) -> None:
        """Put a message, its length in front, in line for `flush`. Raises FullError, unless it must go."""
        if len(self.unsent) >= QUEUE_MESSAGES and not must_go:
            raise FullError(f"{QUEUE_MESSAGES} messages wait for the other process")
        self.unsent.append(message)

    def flush(self) -> None:
        """Send what the system takes."""
        while self.unsent:
            try:
                sent = self._socket.sendmsg(islice(self.unsent, MOST_BUFFERS))
            except BlockingIOError:
                return
            except OSError as error:
                raise gone(error) from error
            self._forget(sent)

    def receive(self) -> list[memoryview]:
        """The next whole messages that are here, without their lengths. What is not read yet holds up the
        other end, and takes no memory of this one."""
        messages: list[memoryview] = []
        for _ in range(READS_AT_ONCE):
            try:
                data = self._socket.recv(READ_BYTES)
            except BlockingIOError:
                break
            except OSError as error:
                raise gone(error) from error
            if not data:
                raise ClosedError("the other process has closed")
            messages += self._whole(data)
            if messages or len(data) < READ_BYTES:
                break
        return messages

    def _forget(self, sent: int) -> None:
        """`sent` bytes have left."""
        while self.unsent and sent >= len(self.unsent[0]):
            sent -= len(self.unsent.popleft())
        if sent:
            self.unsent[0] = memoryview(self.unsent[0])[sent:]

    def _whole(self, data: bytes) -> list[memoryview]:
        """The messages that `data` completes."""
        if self._torn:
            self._torn.append(data)
            self._missing -= len(data)
            if self._missing > 0:
                return []
            data, self._torn = b"".join(self._torn), []
        messages: list[memoryview] = []
        view, start, end = memoryview(data), 0, 0
        while (left := len(data) - start) > 0:
            end = start + LENGTH.size
            if left >= LENGTH.size:
                end += LENGTH.unpack_from(data, start)[0]
                if end - start > MAX_MESSAGE_BYTES:
                    raise AwayError(f"the other process sent a message of {end - start} bytes")
            if left < LENGTH.size or end > len(data):
                self._torn, self._missing = [data[start:]], end - len(data)
                break
            messages.append(view[start + LENGTH.size : end])
            start = end
        return messages


class End:
    """One of the two ends. While the other is away, sending raises AwayError and nothing is received.

    `poller` is the owner's: what this end has to be woken for is registered there.
    """

    # What it is woken for while something is in line, by whether that is a crowd.
    _WHILE_SENDING = (READ | WRITE, READ | WRITE)

    def __init__(self, poller: select.poll) -> None:
        self._poller = poller
        self._stream: Stream | None = None
        self._woken_for = READ
        self.fileno = -1  # of the connection, while there is one
        # The other end is slow, as the latest `flush` found: whoever can waits before there is more for it.
        self.crowded = False

    @property
    def connected(self) -> bool:
        return self._stream is not None

    def put(self, message: bytes, *, must_go: bool = False) -> None:
        """Put a message in line for `flush`, or raise AwayError or, unless it must go, FullError."""
        if self._stream is None:
            raise AwayError("the other process is away")
        self._stream.put(message, must_go=must_go)

    def flush(self) -> None:
        """Send what is in line, as much as is taken now; the poller wakes for the rest."""
        stream = self._stream
        if stream is None or not stream.unsent:
            return
        try:
            stream.flush()
        except ClosedError:
            stream.unsent.clear()  # for nobody; `receive` finds what was said last, and then the end
        except AwayError as error:
            self._lose(error)
            return
        self.crowded = len(stream.unsent) >= CROWD_MESSAGES
        wake_for = self._WHILE_SENDING[self.crowded] if stream.unsent else READ
        if wake_for != self._woken_for:
            self._woken_for = wake_for
            self._poller.modify(self.fileno, wake_for)

    def receive(self) -> list[memoryview]:
        """What the other end has sent. Call it when the poller says so."""
        if self._stream is None:
            return []
        try:
            return self._stream.receive()
        except AwayError as error:
            self._lose(error)
            return []

    def close(self) -> None:
        if self._stream is not None:
            self._poller.unregister(self.fileno)
            self._stream.close()
            self._stream = None
            self.fileno, self.crowded = -1, False

    def _take(self, connection: socket.socket) -> None:
        self._stream = Stream(connection)
        self._woken_for = READ
        self.fileno = connection.fileno()
        self._poller.register(self.fileno, READ)

    def _lose(self, error: AwayError) -> None:
        # Of a process that ended, whoever started it says how.
        log.log(logging.DEBUG if isinstance(error, ClosedError) else logging.WARNING, "%s", error)
        End.close(self)  # the connection, and no more than that


class GatewayEnd(End):
    """The gateway's: it connects, as often as it takes."""

    def __init__(self, folder: Path, poller: select.poll) -> None:
        super().__init__(poller)
        self._path = str(folder / SOCKET_NAME)
        self.next_try_s = 0.0  # monotonic; infinity while connected

    def look(self, now_s: float) -> None:
        """Look for a worker, if there is none and it is time to."""
        if now_s < self.next_try_s:
            return
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.connect(self._path)  # at once or not at all: the other end is on this machine
        except OSError:
            connection.close()
            self.next_try_s = now_s + RETRY_S
            return
        self.next_try_s = float("inf")
        self._take(connection)

    def _lose(self, error: AwayError) -> None:
        super()._lose(error)
        self.next_try_s = 0.0


class WorkerEnd(End):
    """The worker's: it listens. A gateway that comes takes the place of the one before."""

    # It takes nothing in while its replies wait. The gateway does, or the two would wait for each other.
    _WHILE_SENDING = (READ | WRITE, WRITE)

    def __init__(self, folder: Path, poller: select.poll) -> None:
        super().__init__(poller)
        path = folder / SOCKET_NAME
        path.unlink(missing_ok=True)  # of a worker that was killed
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(path))
        self._listener.listen()
        self._listener.setblocking(False)
        poller.register(self.listener, READ)

    @property
    def listener(self) -> int:
        """What the poller tells when a gateway comes."""
        return self._listener.fileno()

    def accept(self) -> None:
        """Take the gateway that has come."""
        with contextlib.suppress(BlockingIOError):
            connection, _ = self._listener.accept()
            if self._stream is not None:
                self._lose(AwayError("another gateway has come"))
            self._take(connection)

    def wait(self, timeout_s: float) -> bool:
        """Whether something has come, within so long."""
        return bool(select.select([self._stream] if self._stream else [], [], [], timeout_s)[0])

    def finish(self, timeout_s: float) -> None:
        """Let the last replies leave, for so long."""
        until_s = time.monotonic() + timeout_s
        self.flush()
        while self._stream is not None and self._stream.unsent:
            left_s = until_s - time.monotonic()
            if left_s <= 0 or not select.select([], [self._stream], [], left_s)[1]:
                return
            self.flush()

    def close(self) -> None:
        super().close()
        self._poller.unregister(self.listener)
        self._listener.close()
