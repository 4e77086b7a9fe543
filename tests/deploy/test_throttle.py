"""A shared limit is kept in the long run, whoever sends, and costs nothing while it isn't reached."""

from __future__ import annotations

import pytest

from starsd_deploy.throttle import NO_LIMIT, Throttle, parse_rate
from starsd_edge.errors import UsageError


class Clock:
    """Sleeping is what makes its time go by."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def now(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


def test_bytes_go_at_the_limit_in_whatever_pieces() -> None:
    clock = Clock()
    throttle = Throttle(1000, now=clock.now, sleep=clock.sleep)
    for count in (500, 1, 499, 3000, 1000):
        throttle.take(count)
    # the last piece goes once those before it have
    assert clock.now_s == pytest.approx(104.0)


def test_time_without_sending_is_not_saved_up() -> None:
    clock = Clock()
    throttle = Throttle(1000, now=clock.now, sleep=clock.sleep)
    throttle.take(1000)
    clock.now_s += 50
    throttle.take(2000)
    assert clock.now_s == 150.0
    throttle.take(1)
    assert clock.now_s == pytest.approx(152.0)


@pytest.mark.parametrize(
    ("expected", "text"), [(0.0, "0"), (800.0, "800"), (500e3, "500k"), (1.5e6, "1.5M"), (2e9, "2G")]
)
def test_rates_as_people_write_them(expected: float, text: str) -> None:
    assert parse_rate(text) == expected


@pytest.mark.parametrize("text", ["", "-1", "fast", "10MB", "1e6"])
def test_rate_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--limit-rate"):
        parse_rate(text)


def test_no_limit_waits_for_nothing() -> None:
    NO_LIMIT.take(1 << 40)
