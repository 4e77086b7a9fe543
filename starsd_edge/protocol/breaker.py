"""How long to wait for an answer, when to give a service up, and when to try it again."""

from __future__ import annotations

from collections.abc import Callable

from starsd_edge.protocol.limits import EdgeTiming

__all__ = ["CONNECT_PATIENCE_S", "MAX_RESENDS_IN_A_ROW", "Breaker"]

CONNECT_PATIENCE_S = 6.0  # two TCP connection attempts and the security handshake
# A service that forgets what it was just given is broken, and asking on costs bandwidth.
MAX_RESENDS_IN_A_ROW = 8

JITTER_SHARE = 0.5  # pauses are spread over 0.75 to 1.25 of their length, so that edges don't probe in step
REFUSED_PAUSE_S = 30.0  # a key must be trusted or a head loaded by a person first
LONGEST_PAUSE_S = 60.0  # whatever a service says
USUAL_TRIPS = 4  # an answer that takes so many usual round trips is late
MAX_DOUBLINGS = 10  # of patience; the longest one bounds it long before


class Breaker:
    """Counts misses and paces probes. `jitter()` gives a number in [0, 1).

    Every outage by misses doubles the patience, until an answer says how long answers take now. Without that
    a service slower than all attempts together would be left and greeted again for ever, and never measured.
    """

    def __init__(self, timing: EdgeTiming, jitter: Callable[[], float]) -> None:
        self._timing = timing
        self._jitter = jitter
        self._failures = 0
        self._doublings = 0
        self.misses = 0

    def patience_s(self, usual_s: float) -> float:
        """How long to wait for an answer that usually takes `usual_s`."""
        first_s = max(self._timing.answer_s, USUAL_TRIPS * usual_s)
        return min(first_s * 2.0**self._doublings, max(first_s, self._timing.chunk_s))

    def worked(self) -> None:
        """An answer came."""
        self.misses = 0

    def recovered(self) -> None:
        """Work was done, not only a greeting exchanged: the next outage starts with short pauses again."""
        self.misses = self._failures = 0

    def measured(self) -> None:
        """It is known how long that answer took: patience is the usual one again."""
        self._doublings = 0

    def missed(self) -> bool:
        """An answer did not come in time; True when that was one too many."""
        self.misses += 1
        if self.misses < self._timing.max_misses:
            return False
        self._doublings = min(self._doublings + 1, MAX_DOUBLINGS)
        return True

    def probe_at(self, now_s: float) -> float:
        """The link is down: when to try again. Longer after every failure."""
        pause_s = min(
            self._timing.probe_first_s * 2.0 ** min(self._failures, MAX_DOUBLINGS), self._timing.probe_max_s
        )
        self._failures += 1
        self.misses = 0
        return now_s + self.spread(pause_s)

    def told_to_wait(self, now_s: float, pause_s: float) -> float:
        """The service is busy: when to ask again."""
        return now_s + self.spread(min(pause_s, LONGEST_PAUSE_S))

    def refused_until(self, now_s: float) -> float:
        self.misses = 0
        return now_s + self.spread(REFUSED_PAUSE_S)

    def spread(self, pause_s: float) -> float:
        return pause_s * (1 + JITTER_SHARE * (self._jitter() - 0.5))
