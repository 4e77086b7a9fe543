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

__all__ = ["interrupts_stop", "typed_ahead_unseen"]


@contextmanager
def interrupts_stop(backend: Backend) -> Iterator[None]:
    """Ctrl-C ends the answer with what it has; a second one does not wait for the round to end."""
    pressed = 0

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal pressed
        pressed += 1
        backend.cancel()
        if pressed > 1:
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, stop)
    try:
        yield
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
