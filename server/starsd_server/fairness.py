"""What devices may bring and what they were given. Pure.

Service is shared by cost, with virtual token counters: the device that was given least is next, and one that
comes back from a pause is lifted to the others' level, so that nobody saves up service (Sheng et al., arXiv
2401.00588). What comes in is bounded by an allowance that fills up at a constant rate.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["TURN_COST", "Allowance", "Share", "turn_cost"]

TURN_COST = 8  # a turn costs its rows and this much: a step's fixed price, in rows (measured on a CPU head)


def turn_cost(rows: int) -> int:
    return rows + TURN_COST


class Allowance:
    """Rows that may still be brought: `per_s` more every second, never more than `full`."""

    __slots__ = ("_at", "_full", "_left", "_per_s")

    def __init__(self, per_s: float, window_s: float, now: float) -> None:
        self._per_s, self._full = per_s, per_s * window_s
        self._left, self._at = self._full, now

    def missing_s(self, rows: int, now: float) -> float:
        """Seconds until `rows` may be brought; 0 when they may be now. More than fit at all count as full."""
        self._left = min(self._full, self._left + max(0.0, now - self._at) * self._per_s)
        self._at = now
        return max(0.0, min(rows, self._full) - self._left) / self._per_s

    def take(self, rows: int) -> None:
        """`rows` were brought."""
        self._left -= rows


@dataclass(slots=True)
class Share:
    """What one device was given, in cost; `backlogged` while it has anything that is not done."""

    counter: float = 0.0
    backlogged: bool = False

    def enter(self, virtual_time: float) -> None:
        """The device has work again: it starts level with the others."""
        if not self.backlogged:
            self.backlogged = True
            self.counter = max(self.counter, virtual_time)
