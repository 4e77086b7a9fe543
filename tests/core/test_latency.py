import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from starsd_edge.latency import BUCKETS_PER_OCTAVE, LOWEST, MAX_BUCKETS, Histogram, Jitter

HALF_BUCKET = 2 ** (1 / 16)  # the most that a bucket's middle is off, as a factor

durations = st.floats(min_value=1e-6, max_value=1e5)


def histogram_of(values: list[float]) -> Histogram:
    histogram = Histogram()
    for value in values:
        histogram.add(value)
    return histogram


@given(st.lists(durations, min_size=1, max_size=60), st.floats(min_value=0.01, max_value=1.0))
def test_a_quantile_is_within_half_a_bucket_of_the_true_one(values: list[float], q: float) -> None:
    true = sorted(values)[max(1, math.ceil(q * len(values))) - 1]
    read = histogram_of(values).quantile(q)
    assert read is not None
    assert true / HALF_BUCKET * 0.999 <= read <= true * HALF_BUCKET * 1.001


@given(st.lists(durations, max_size=30), st.lists(durations, max_size=30))
def test_what_was_added_since_is_the_difference(before: list[float], after: list[float]) -> None:
    since = histogram_of(before + after).minus(histogram_of(before))
    assert [n for n in since.counts if n] == [n for n in histogram_of(after).counts if n]
    assert since.quantile(0.5) == histogram_of(after).quantile(0.5)
    assert since.total == pytest.approx(sum(after), abs=1e-6)


@given(st.lists(durations, max_size=30), st.lists(durations, max_size=30))
def test_two_series_add_up(one: list[float], other: list[float]) -> None:
    both = histogram_of(one).plus(histogram_of(other))
    assert both.count == len(one) + len(other)
    assert both.quantile(0.9) == histogram_of(one + other).quantile(0.9)


@given(st.lists(durations, min_size=1), st.integers(min_value=0, max_value=36))
def test_a_power_of_two_is_an_exact_bound(values: list[float], octave: int) -> None:
    bound = LOWEST * 2**octave
    exact = sum(value <= bound for value in values)
    assert abs(histogram_of(values).up_to(bound) - exact) <= sum(
        math.isclose(value, bound, rel_tol=1e-9) for value in values
    )


def test_a_bucket_holds_its_end_and_nothing_above() -> None:
    for index in range(1, MAX_BUCKETS - 1):
        end = LOWEST * 2 ** (index / BUCKETS_PER_OCTAVE)
        for rounding in (1 - 1e-12, 1.0, 1 + 1e-12):
            assert histogram_of([end * rounding]).first == index
        assert histogram_of([end * (1 + 1e-8)]).first == index + 1


def test_values_off_the_scale_are_counted_at_its_ends() -> None:
    histogram = histogram_of([0.0, 1e-9, 1e30, math.inf])
    assert (histogram.first, histogram.counts[0], histogram.counts[-1]) == (0, 2, 2)
    assert len(histogram.counts) == MAX_BUCKETS


def test_an_empty_histogram_says_nothing() -> None:
    assert Histogram().quantile(0.5) is None
    assert Histogram().mean is None
    assert Histogram().up_to(1.0) == 0


@pytest.mark.parametrize(("first", "counts"), [(-1, [1]), (MAX_BUCKETS, [1]), (0, [-1])])
def test_counts_outside_the_scale_are_refused(first: int, counts: list[int]) -> None:
    with pytest.raises(ValueError, match="histogram"):
        Histogram(first, counts)


def test_subtracting_a_later_state_is_refused() -> None:
    with pytest.raises(ValueError, match="below zero"):
        histogram_of([1.0]).minus(histogram_of([1.0, 1.0]))


def test_jitter_follows_rfc_3550() -> None:
    """Expected by hand: changes of 16 ms, then 0, each weighed with 1/16."""
    jitter = Jitter()
    seen = []
    for trip_s in [0.010, 0.026, 0.026]:
        jitter.add(trip_s)
        seen.append(jitter.value_s)
    assert seen == pytest.approx([0.0, 0.001, 0.0009375])


def test_a_steady_link_has_no_jitter() -> None:
    jitter = Jitter()
    for _ in range(10):
        jitter.add(0.5)
    assert jitter.value_s == 0.0
