"""What the keyboard does while an answer runs: Ctrl-C ends it, and typing ahead does not write into it. And
the terminal is given back as it was, whatever ends the chat."""

from __future__ import annotations

import contextlib
import signal
import sys
import termios
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, TextIO

from starsd_edge.chat.backend import Backend

__all__ = ["Interrupts", "interrupts_stop", "terminal_given_back", "typed_ahead_unseen"]

# Bracketed paste off, cursor shown, plain letters.
AS_FOUND = "\x1b[?2004l\x1b[?25h\x1b[0m"
SIGNAL_EXIT_CODE = 128  # and the signal's number, as shells report it


class Interrupts:
    """Ctrl-C pressed while an answer was wanted."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._pressed = 0

    def press(self, number: int, frame: FrameType | None) -> None:
        """A signal handler."""
        self._pressed += 1
        self._backend.cancel()
        if self._pressed > 1:
            raise KeyboardInterrupt

    def insist(self) -> None:
        """One that came before the backend had begun is said again."""
        if self._pressed:
            self._backend.cancel()


@contextmanager
def interrupts_stop(backend: Backend) -> Iterator[Interrupts]:
    """Ctrl-C ends the answer with what it has; a second one does not wait for the round to end. Whoever
    takes the answer's events calls `insist` with each."""
    interrupts = Interrupts(backend)
    before = signal.signal(signal.SIGINT, interrupts.press)
    try:
        yield interrupts
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def typed_ahead_unseen() -> Iterator[None]:
    """Keys are kept for the next prompt but not echoed into the answer. Without a terminal: nothing."""
    before = _modes()
    if before is None:
        yield
        return
    terminal = sys.stdin.fileno()
    silent = [*before[:3], before[3] & ~termios.ECHO, *before[4:]]
    termios.tcsetattr(terminal, termios.TCSANOW, silent)
    try:
        yield
    finally:
        with contextlib.suppress(termios.error):  # the terminal has gone
            termios.tcsetattr(terminal, termios.TCSANOW, before)


@contextmanager
def terminal_given_back(out: TextIO) -> Iterator[None]:
    """The terminal is as it was before, also after an exception, SIGTERM or SIGHUP; these two end the program
    in order."""
    before = _modes()
    handlers = {number: signal.signal(number, _end) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        if before is not None:
            with contextlib.suppress(OSError, ValueError, termios.error):  # the terminal has gone
                termios.tcsetattr(sys.stdin.fileno(), termios.TCSANOW, before)
                out.write(AS_FOUND)
                out.flush()


def _modes() -> list[Any] | None:
    """What the terminal does with keys; None without one."""
    try:
        return termios.tcgetattr(sys.stdin.fileno())
    except (OSError, ValueError, AttributeError, termios.error):
        return None


def _end(number: int, frame: FrameType | None) -> None:
    raise SystemExit(SIGNAL_EXIT_CODE + number)
