"""A TCP proxy on loopback that holds every byte back: a Wi-Fi's or WAN's round trip, full bandwidth."""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
import time
from types import TracebackType

__all__ = ["DelayProxy"]

PIECE_BYTES = 256 * 1024


class DelayProxy:
    """Forwards connections on `port` to `target_port`; each direction takes `delay_s`."""

    def __init__(self, target_port: int, delay_s: float) -> None:
        self._target = ("127.0.0.1", target_port)
        self._delay_s = delay_s
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self._sockets: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self) -> DelayProxy:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # a thread that blocks in accept or recv wakes up on shutdown, not on close
        for sock in (self._listener, *self._sockets):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = socket.create_connection(self._target)
                for sock in (near, far):
                    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._sockets += [near, far]
                self._forward(near, far)
                self._forward(far, near)

    def _forward(self, source: socket.socket, sink: socket.socket) -> None:
        held: queue.SimpleQueue[tuple[float, bytes]] = queue.SimpleQueue()

        def read() -> None:
            data = b"x"
            while data:
                try:
                    data = source.recv(PIECE_BYTES)
                except OSError:
                    data = b""
                held.put((time.monotonic() + self._delay_s, data))

        def write() -> None:
            with contextlib.suppress(OSError):
                while True:
                    due_s, data = held.get()
                    time.sleep(max(0.0, due_s - time.monotonic()))
                    if not data:
                        sink.shutdown(socket.SHUT_WR)
                        return
                    sink.sendall(data)

        threading.Thread(target=read, daemon=True).start()
        threading.Thread(target=write, daemon=True).start()
