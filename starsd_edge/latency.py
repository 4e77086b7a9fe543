"""Two small summaries of a series of durations: a histogram on a log scale, and the jitter of RFC 3550.

Both are plain values: they can be sent, added and subtracted, and they never keep the series. A histogram has
eight buckets an octave, so that any percentile read from it is within 4.5% of the true one, from a
microsecond to days, in at most 320 counts. The same buckets count whatever else is positive (rows of a
batch, nodes of a tree).
"""

from __future__ import annotations

import math
import operator
from bisect import bisect_left
from itertools import accumulate
from typing import Annotated

import msgspec

__all__ = ["BUCKETS_PER_OCTAVE", "LOWEST", "MAX_BUCKETS", "MAX_COUNT", "Histogram", "Jitter"]

BUCKETS_PER_OCTAVE = 8  # a bucket is 9% wide: its middle is at most 4.5% off
LOWEST = 1e-6  # what the first bucket ends at: no stage we time is shorter than a microsecond
MAX_BUCKETS = 40 * BUCKETS_PER_OCTAVE  # up to 2**40 microseconds, twelve days: nothing lasts longer
HIGHEST = LOWEST * 2.0 ** (MAX_BUCKETS / BUCKETS_PER_OCTAVE)
TOLERANCE = 1e-9  # of a bucket: keeps a power of two in the one it ends, however it was rounded
MAX_COUNT = 2**53  # what a reader that knows floats alone still has exactly
JITTER_GAIN = 1 / 16  # RFC 3550, 6.4.1


class Histogram(msgspec.Struct, omit_defaults=True):
    """Counts of positive values in log-spaced buckets.

    first   index of the bucket that counts[0] counts
    counts  how many values fell into each bucket from there on
    total   sum of all values, so that the mean is exact

    Bucket i holds values in (LOWEST * 2**((i-1)/8), LOWEST * 2**(i/8)]; bucket 0 everything up to LOWEST.
    Raises ValueError for counts outside the scale or below zero.
    """

    first: int = 0
    counts: list[Annotated[int, msgspec.Meta(ge=0, le=MAX_COUNT)]] = []
    total: float = 0.0

    def __post_init__(self) -> None:
        if self.first < 0 or self.first + len(self.counts) > MAX_BUCKETS:
            raise ValueError(f"a histogram has buckets 0 to {MAX_BUCKETS - 1}")
        if self.counts and min(self.counts) < 0:
            raise ValueError("a histogram cannot count below zero")

    def add(self, value: float, times: int = 1) -> None:
        """Count `value`, `times` over."""
        index, counts = bucket_of(value), self.counts
        if not self.first <= index < self.first + len(counts):
            self._reach(index)
        counts[index - self.first] += times
        self.total += value * times

    def _reach(self, index: int) -> None:
        """Have a count for the bucket `index`."""
        if not self.counts:
            self.first = index
        if index < self.first:
            self.counts[:0] = [0] * (self.first - index)
            self.first = index
        self.counts.extend([0] * (index - self.first - len(self.counts) + 1))

    @property
    def count(self) -> int:
        return sum(self.counts)

    @property
    def mean(self) -> float | None:
        """Exact mean; None without values."""
        count = self.count
        return self.total / count if count else None

    def quantile(self, q: float) -> float | None:
        """The value below which a share `q` of the values lies, to 4.5%; None without values."""
        running = list(accumulate(self.counts))
        if not running or not running[-1]:
            return None
        rank = max(1, math.ceil(q * running[-1]))
        return middle_of(self.first + bisect_left(running, rank))

    def up_to(self, bound: float) -> int:
        """How many values lie at or below `bound`; exact where `bound` is LOWEST times a power of two."""
        last = bucket_of(bound)
        return sum(self.counts[: max(0, last - self.first + 1)])

    def plus(self, other: Histogram) -> Histogram:
        """Both series in one histogram."""
        return self._combine(other, 1)

    def minus(self, earlier: Histogram) -> Histogram:
        """What was added since `earlier`, an older state of the same series.

        Raises ValueError when `earlier` is not such a state."""
        return self._combine(earlier, -1)

    def _combine(self, other: Histogram, sign: int) -> Histogram:
        if not other.counts:
            return Histogram(self.first, list(self.counts), self.total)
        if not self.counts:
            return Histogram(other.first, [sign * n for n in other.counts], sign * other.total)
        first = min(self.first, other.first)
        end = max(self.first + len(self.counts), other.first + len(other.counts))
        combine = operator.add if sign > 0 else operator.sub
        counts = list(map(combine, self._between(first, end), other._between(first, end)))
        return Histogram(first, counts, self.total + sign * other.total)

    def _between(self, first: int, end: int) -> list[int]:
        """The counts of the buckets from `first` to before `end`, all of ours among them."""
        above = end - self.first - len(self.counts)
        return [0] * (self.first - first) + self.counts + [0] * above


class Jitter(msgspec.Struct, omit_defaults=True):
    """Smoothed mean change between one round trip and the next, in seconds (RFC 3550, 6.4.1)."""

    value_s: float = 0.0
    last_s: float | None = None

    def add(self, trip_s: float) -> None:
        """Take in the next round trip."""
        if self.last_s is not None:
            self.value_s += (abs(trip_s - self.last_s) - self.value_s) * JITTER_GAIN
        self.last_s = trip_s


def bucket_of(value: float) -> int:
    """Index of the bucket that holds `value`; what exceeds the scale is counted in the last one."""
    if value <= LOWEST:
        return 0
    if value >= HIGHEST:
        return MAX_BUCKETS - 1
    # By a search in the ends of all buckets it took longer: they are in no cache once a round comes.
    return min(math.ceil(math.log2(value / LOWEST) * BUCKETS_PER_OCTAVE - TOLERANCE), MAX_BUCKETS - 1)


def middle_of(index: int) -> float:
    """Geometric middle of a bucket."""
    return LOWEST if index == 0 else LOWEST * 2.0 ** ((index - 0.5) / BUCKETS_PER_OCTAVE)
