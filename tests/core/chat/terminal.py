"""A real terminal for a program under test: a pty, with pyte to know what stands on the screen."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import signal
import struct
import subprocess
import termios
import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any

import pyte

__all__ = ["Terminal"]

PATIENCE_S = 120.0  # before a test says that something never came; only a failing test waits that long


class Terminal:
    """Runs `command` on a terminal of its own. `expect` waits for the screen, never for a time."""

    def __init__(
        self, command: Sequence[str], environ: Mapping[str, str], columns: int = 80, rows: int = 24
    ) -> None:
        self._screen = pyte.HistoryScreen(columns, rows, history=1000)
        self._stream = pyte.ByteStream(self._screen)
        self.raw = b""  # everything the program ever wrote
        ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        self._fd = ours
        self.process = subprocess.Popen(
            list(command),
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env={**os.environ, **environ, "TERM": "xterm-256color"},
            start_new_session=True,
            preexec_fn=_take_terminal,
        )
        os.close(theirs)

    def __enter__(self) -> Terminal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        os.close(self._fd)

    @property
    def lines(self) -> list[str]:
        """What scrolled off and what is on the screen, without trailing spaces."""
        above = [
            "".join(line[x].data for x in range(self._screen.columns)).rstrip()
            for line in self._screen.history.top
        ]
        return above + [line.rstrip() for line in self._screen.display]

    @property
    def cursor_line(self) -> str:
        """The line that is written on now."""
        return str(self._screen.display[self._screen.cursor.y]).rstrip()

    @property
    def text(self) -> str:
        return "\n".join(self.lines)

    def resize(self, columns: int, rows: int) -> None:
        """The user pulls at the window's corner."""
        fcntl.ioctl(self._fd, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        self._screen.resize(rows, columns)

    @property
    def modes(self) -> list[Any]:
        """What the terminal does with keys now."""
        return termios.tcgetattr(self._fd)

    def send(self, keys: str) -> None:
        os.write(self._fd, keys.encode())

    def expect(self, condition: str | Callable[[str], bool]) -> str:
        """Wait until the screen holds a text, or fulfils a condition; its text."""
        holds = condition if callable(condition) else lambda text: condition in text
        deadline = time.monotonic() + PATIENCE_S
        while not holds(self.text):
            if not self._read(deadline - time.monotonic()):
                raise AssertionError(f"the terminal never showed {condition!r}:\n{self.text}")
        return self.text

    def expect_exit(self) -> int:
        """Wait until the program ends; its exit code."""
        deadline = time.monotonic() + PATIENCE_S
        while self._read(deadline - time.monotonic()):
            pass
        return self.process.wait(timeout=PATIENCE_S)

    def _read(self, timeout_s: float) -> bool:
        """Take in what was written, answer where the cursor is. False: time is up or the program ended."""
        ready, _, _ = select.select([self._fd], [], [], max(timeout_s, 0.0))
        if not ready:
            return False
        try:
            data = os.read(self._fd, 65536)
        except OSError:  # Linux reports the end of the other side like this
            return False
        if not data:
            return False
        self.raw += data
        self._stream.feed(data)
        if b"\x1b[6n" in data:
            cursor = self._screen.cursor
            self.send(f"\x1b[{cursor.y + 1};{cursor.x + 1}R")
        return True


def _take_terminal() -> None:
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
