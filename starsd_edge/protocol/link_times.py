"""How long answers take: smoothed round trips, split into link and service.

The service says in each reply how long it kept the request (its dwell), so `link = round trip - dwell` and no
clock of one host is compared with another's. Smoothing is that of TCP's retransmission timer (RFC 6298): mean
with gain 1/8, deviation with gain 1/4.
"""

from __future__ import annotations

__all__ = ["LARGEST_TIMED_BYTES", "LinkTimes"]

MEAN_GAIN = 1 / 8
DEVIATION_GAIN = 1 / 4
# A round trip with more than this on the line says more of the bandwidth than of the waiting.
LARGEST_TIMED_BYTES = 96 * 1024


class LinkTimes:
    """All values in seconds; 0 before the first sample."""

    def __init__(self) -> None:
        self.samples = 0
        self.link_s = 0.0
        self.dwell_s = 0.0
        self.last_link_s = 0.0
        self.last_dwell_s = 0.0
        self.last_draft_s = 0.0  # of that, what a tree took; the rest was waiting in line
        self.deviation_s = 0.0  # of the round trip; what monitors call jitter
        self._drafted = False

    @property
    def expected_s(self) -> float:
        """When an answer is to be expected: the smoothed round trip and one deviation."""
        return self.link_s + self.dwell_s + self.deviation_s

    def note(self, round_trip_s: float, dwell_s: float, *, drafted: bool) -> None:
        """A round trip was measured. `drafted`: its dwell is that of a tree, not of a ping."""
        dwell_s = min(dwell_s, round_trip_s)
        link_s = round_trip_s - dwell_s
        self.last_link_s = link_s
        if drafted:
            self.last_dwell_s = dwell_s
        if self.samples == 0:
            self.link_s, self.deviation_s = link_s, link_s / 2
        else:
            expected = self.link_s + (self.dwell_s if drafted else dwell_s)
            self.deviation_s += DEVIATION_GAIN * (abs(round_trip_s - expected) - self.deviation_s)
            self.link_s += MEAN_GAIN * (link_s - self.link_s)
        if drafted:
            gain = MEAN_GAIN if self._drafted else 1.0
            self.dwell_s += gain * (dwell_s - self.dwell_s)
            self._drafted = True
        self.samples += 1
