"""A log that no peer can fill: of each kind of line a few in a while, and how many more there were."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["MAX_LINES", "WINDOW_S", "Sparing"]

MAX_LINES, WINDOW_S = 20, 10.0


@dataclass(slots=True)
class Kind:
    """Lines of one kind since `since_s`, monotonic seconds."""

    since_s: float
    lines: int = 0
    untold: int = 0


class Sparing(logging.Filter):
    """Lets MAX_LINES of a kind through within WINDOW_S; the first after that says what was left out.

    Lines are of a kind when they differ in what they are about (a device, a number) alone: those that one
    statement of the program writes. `clock` gives monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._kinds: dict[tuple[str, int], Kind] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the line is written."""
        now_s = self._clock()
        kind = self._kinds.setdefault((record.pathname, record.lineno), Kind(now_s))
        if now_s - kind.since_s >= WINDOW_S:
            if kind.untold:
                record.msg = f"{record.getMessage()} (and {kind.untold} more before)"
                record.args = ()
            kind.since_s, kind.lines, kind.untold = now_s, 0, 0
        kind.lines += 1
        kind.untold += kind.lines > MAX_LINES
        return kind.lines <= MAX_LINES
