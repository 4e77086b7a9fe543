"""Virtual time: what is to happen, in order of when, and one generator of chance for all of it."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable

__all__ = ["World"]


class World:
    """Everything that happens does so at a time and in an order that the seed alone decides."""

    def __init__(self, seed: int) -> None:
        self.now_s = 0.0
        self.chance = random.Random(seed)
        self._order = 0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._clocks: list[tuple[Callable[[], float | None], Callable[[], None]]] = []

    def clock(self) -> float:
        return self.now_s

    def after(self, delay_s: float, act: Callable[[], None]) -> None:
        self._order += 1
        heapq.heappush(self._events, (self.now_s + delay_s, self._order, act))

    def watch(self, due_s: Callable[[], float | None], act: Callable[[], None]) -> None:
        """Something with a deadline of its own, which may change at any time."""
        self._clocks.append((due_s, act))

    def run_until(self, time_s: float, stop: Callable[[], bool] = lambda: False) -> None:
        """Let time pass up to `time_s`, or until `stop` holds after something happened."""
        while not stop():
            next_s, act = self._next()
            if act is None or next_s > time_s:
                self.now_s = time_s
                return
            self.now_s = max(self.now_s, next_s)
            act()

    def _next(self) -> tuple[float, Callable[[], None] | None]:
        best_s, best = float("inf"), None
        for due, act in self._clocks:
            due_s = due()
            if due_s is not None and due_s < best_s:
                best_s, best = due_s, act
        if self._events and self._events[0][0] <= best_s:
            return self._events[0][0], self._pop
        return best_s, best

    def _pop(self) -> None:
        heapq.heappop(self._events)[2]()
