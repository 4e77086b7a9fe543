"""What the keyboard does while an answer runs: Ctrl-C ends it, and typing ahead does not write into it."""

from __future__ import annotations

import contextlib
import signal
import sys
import termios
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from starsd_edge.chat.backend import Backend

__all__ = ["Interrupts", "interrupts_stop", "typed_ahead_unseen"]


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
    try:
        terminal = sys.stdin.fileno()
        before = termios.tcgetattr(terminal)
    except (OSError, ValueError, termios.error):
        yield
        return
    silent = [*before[:3], before[3] & ~termios.ECHO, *before[4:]]
    termios.tcsetattr(terminal, termios.TCSANOW, silent)
    try:
        yield
    finally:
        with contextlib.suppress(termios.error):  # the terminal has gone
            termios.tcsetattr(terminal, termios.TCSANOW, before)
