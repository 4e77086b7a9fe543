"""A TCP line that can be made bad: cut, silent, slow, far away."""

from __future__ import annotations

import contextlib
import random
import selectors
import socket
import struct
import threading
import time
from collections import deque
from dataclasses import dataclass, field

__all__ = ["BadLine"]

CHUNK = 16 * 1024
TICK_S = 0.005
# A reset instead of a goodbye.
ABORT = struct.pack("ii", 1, 0)
RETRANSMITTED_S = 0.3


@dataclass
class Pipe:
    """One way of one connection: what was read and is still on its way."""

    source: socket.socket
    sink: socket.socket
    is_up: bool
    waiting: deque[tuple[float, bytes]] = field(default_factory=deque)
    line_free_s: float = 0.0
    last_s: float = 0.0  # nothing overtakes what was sent before
    lost: bool = False  # the other end is gone, and this one does not know


class BadLine:
    """Carries connections to `port` on a thread of its own.

    silent       nothing is read or delivered, and nobody is told: a half-open connection
    delay_s      each way
    bytes_per_s  up, 0: not limited
    stall_share  of all pieces of data, those that arrive a retransmission later, and what is behind them, too
    refusing     new connections are reset at once
    """

    def __init__(self, port: int) -> None:
        self.silent = self.refusing = False
        self.delay_s = 0.0
        self.bytes_per_s = 0.0
        self.stall_share = 0.0
        self.bytes_up = 0
        self._port = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.setblocking(False)
        self.port: int = self._listener.getsockname()[1]
        self.address = f"tcp://127.0.0.1:{self.port}"
        self._pipes: list[Pipe] = []
        self._chance = random.Random(1)
        self._cut = threading.Event()
        self._forget = threading.Event()
        self._stop = threading.Event()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def cut(self) -> None:
        """Reset all connections; new ones may be made."""
        self._cut.set()

    def forget(self) -> None:
        """The service's ends of all connections are reset; the edge is not told, what it sends vanishes."""
        self._forget.set()

    def lead_to(self, port: int) -> None:
        """New connections go to another service."""
        self._port = port
        self.cut()

    def close(self) -> None:
        self._stop.set()
        self._thread.join(5)

    def _run(self) -> None:
        while not self._stop.is_set():
            for key, _ in self._selector.select(TICK_S):
                if key.fileobj is self._listener:
                    self._accept()
                elif not self.silent:
                    self._read(key.data)
            if self._cut.is_set():
                self._cut.clear()
                for pipe in list(self._pipes):
                    self._drop(pipe)
            if self._forget.is_set():
                self._forget.clear()
                for pipe in [pipe for pipe in self._pipes if pipe.is_up]:
                    self._lose_service(pipe)
            if not self.silent:
                for pipe in list(self._pipes):
                    self._deliver(pipe)
        for pipe in list(self._pipes):
            self._drop(pipe)
        self._listener.close()
        self._selector.close()

    def _accept(self) -> None:
        client, _ = self._listener.accept()
        if self.refusing:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, ABORT)
            client.close()
            return
        try:
            server = socket.create_connection(("127.0.0.1", self._port), 2)
        except OSError:
            client.close()
            return
        for source, sink, is_up in ((client, server, True), (server, client, False)):
            source.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            pipe = Pipe(source, sink, is_up)
            self._pipes.append(pipe)
            source.setblocking(False)
            self._selector.register(source, selectors.EVENT_READ, pipe)

    def _read(self, pipe: Pipe) -> None:
        try:
            data = pipe.source.recv(CHUNK)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._drop(pipe)
            return
        if pipe.lost:
            return
        now_s = time.monotonic()
        start_s = now_s
        if pipe.is_up:
            self.bytes_up += len(data)
            if self.bytes_per_s:
                start_s = pipe.line_free_s = max(now_s, pipe.line_free_s) + len(data) / self.bytes_per_s
        arrives_s = start_s + self.delay_s
        if self._chance.random() < self.stall_share:
            arrives_s += RETRANSMITTED_S
        pipe.last_s = arrives_s = max(arrives_s, pipe.last_s)
        pipe.waiting.append((arrives_s, data))

    def _deliver(self, pipe: Pipe) -> None:
        while pipe.waiting and pipe.waiting[0][0] <= time.monotonic():
            data = pipe.waiting[0][1]
            try:
                sent = pipe.sink.send(data)
            except BlockingIOError:
                return
            except OSError:
                self._drop(pipe)
                return
            if sent < len(data):
                pipe.waiting[0] = (pipe.waiting[0][0], data[sent:])
                return
            pipe.waiting.popleft()

    def _lose_service(self, up: Pipe) -> None:
        up.lost = True
        up.waiting.clear()
        for down in [pipe for pipe in self._pipes if pipe.source is up.sink]:
            self._pipes.remove(down)
            self._selector.unregister(down.source)
            down.source.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, ABORT)
            down.source.close()

    def _drop(self, pipe: Pipe) -> None:
        for other in [p for p in self._pipes if p.source in (pipe.source, pipe.sink)]:
            self._pipes.remove(other)
            with contextlib.suppress(KeyError, ValueError):
                self._selector.unregister(other.source)
            with contextlib.suppress(OSError):
                other.source.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, ABORT)
            other.source.close()
