"""A limit on bytes a second, shared by all who send. The clock and the sleep are arguments."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable
from typing import Protocol

from starsd_edge.errors import UsageError

__all__ = ["NO_LIMIT", "Pacer", "Throttle", "parse_rate"]

UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9}


def parse_rate(text: str) -> float:
    """ "500k" -> 500000.0 bytes a second; 0 is no limit.

    Raises:
        UsageError: no such number.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMG]?)", text.strip().upper())
    if match is None:
        raise UsageError(f"--limit-rate {text!r} is no number of bytes a second, such as 500k or 10M")
    return float(match[1]) * UNITS[match[2]]


class Pacer(Protocol):
    """Whoever sends asks it before."""

    def take(self, count: int) -> None: ...


class _NoLimit:
    def take(self, count: int) -> None:
        """Send what you like."""


NO_LIMIT: Pacer = _NoLimit()


class Throttle:
    """Returns from `take` when so many more bytes may go; in the long run `bytes_per_s` for all threads."""

    def __init__(
        self,
        bytes_per_s: float,
        *,
        now: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._bytes_per_s, self._now, self._sleep = bytes_per_s, now, sleep
        self._lock = threading.Lock()
        self._free_s = now()  # when all that was let through will have gone

    def take(self, count: int) -> None:
        """Wait for the turn of `count` bytes."""
        with self._lock:
            begin_s = max(self._now(), self._free_s)
            self._free_s = begin_s + count / self._bytes_per_s
        self._sleep(max(0.0, begin_s - self._now()))
