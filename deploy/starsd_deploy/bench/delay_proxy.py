"""A TCP proxy on loopback that holds every byte back: a Wi-Fi's or WAN's round trip, full bandwidth.

It is a process of its own: in the process that uploads, its threads would wait for the interpreter's lock
with ours, and slow down one of the methods that are compared.

    python -m starsd_deploy.bench.delay_proxy TARGET_PORT DELAY_S     # prints its port; ends with its stdin
"""

from __future__ import annotations

import contextlib
import queue
import socket
import subprocess
import sys
import threading
import time
from types import TracebackType

__all__ = ["DelayProxy"]

PIECE_BYTES = 256 * 1024


class DelayProxy:
    """Forwards connections on `port` to `target_port` while its context is open; each way takes `delay_s`."""

    def __init__(self, target_port: int, delay_s: float) -> None:
        command = [sys.executable, "-m", __name__, str(target_port), str(delay_s)]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # Ctrl-C is for who measures, who then ends this
        )
        assert self._process.stdout is not None
        self.port = int(self._process.stdout.readline())

    def __enter__(self) -> DelayProxy:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.communicate()  # closes its stdin, which ends it


def serve(target_port: int, delay_s: float) -> None:
    """Print the port, then forward until stdin ends."""
    listener = socket.create_server(("127.0.0.1", 0))
    sys.stdout.write(f"{listener.getsockname()[1]}\n")
    sys.stdout.flush()
    threading.Thread(target=_accept, args=(listener, target_port, delay_s), daemon=True).start()
    sys.stdin.read()


def _accept(listener: socket.socket, target_port: int, delay_s: float) -> None:
    while True:
        near, _ = listener.accept()
        far = socket.create_connection(("127.0.0.1", target_port))
        for sock in (near, far):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        _forward(near, far, delay_s)
        _forward(far, near, delay_s)


def _forward(source: socket.socket, sink: socket.socket, delay_s: float) -> None:
    held: queue.SimpleQueue[tuple[float, bytes]] = queue.SimpleQueue()

    def read() -> None:
        data = b"x"
        while data:
            try:
                data = source.recv(PIECE_BYTES)
            except OSError:
                data = b""
            held.put((time.monotonic() + delay_s, data))

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


if __name__ == "__main__":
    serve(int(sys.argv[1]), float(sys.argv[2]))
