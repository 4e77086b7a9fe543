"""When to give a service up, and when to try it again."""

from __future__ import annotations

from collections.abc import Callable

from starsd_edge.protocol.limits import EdgeTiming

__all__ = ["Breaker"]

JITTER_SHARE = 0.5  # pauses are spread over 0.75 to 1.25 of their length, so that edges don't probe in step
REFUSED_PAUSE_S = 30.0  # a key must be trusted or a head loaded by a person first


class Breaker:
    """Counts misses and paces probes. `jitter()` gives a number in [0, 1)."""

    def __init__(self, timing: EdgeTiming, jitter: Callable[[], float]) -> None:
        self._timing = timing
        self._jitter = jitter
        self._failures = 0
        self.misses = 0

    def worked(self) -> None:
        """An answer came."""
        self.misses = 0

    def recovered(self) -> None:
        """Work was done, not only a greeting exchanged: the next outage starts with short pauses again."""
        self.misses = self._failures = 0

    def missed(self) -> bool:
        """An answer did not come in time; True when that was one too many."""
        self.misses += 1
        return self.misses >= self._timing.max_misses

    def probe_at(self, now_s: float) -> float:
        """The link is down: when to try again. Longer after every failure."""
        pause_s = min(self._timing.probe_first_s * 2.0**self._failures, self._timing.probe_max_s)
        self._failures += 1
        self.misses = 0
        return now_s + self.spread(pause_s)

    def refused_until(self, now_s: float) -> float:
        self.misses = 0
        return now_s + self.spread(REFUSED_PAUSE_S)

    def spread(self, pause_s: float) -> float:
        return pause_s * (1 + JITTER_SHARE * (self._jitter() - 0.5))
