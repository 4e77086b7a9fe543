"""The plan for waiting against brute force: every way of deciding, played out."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from starsd_edge.decoding.waiting import plan_waiting

PLAIN_S = 0.03


def speed_of(
    until_s: Sequence[float], survival: Sequence[float], verify_s: float, ages_s: Sequence[float]
) -> float:
    """Tokens per second of deciding by `until_s`, all answer times and outcomes played through."""
    tokens = seconds = 0.0
    for age_s in ages_s:
        for accepted, probability in outcomes(survival):
            got, took = play(until_s, accepted, len(survival) - 1, verify_s, age_s)
            tokens += probability * got
            seconds += probability * took
    return tokens / seconds


def outcomes(survival: Sequence[float]) -> list[tuple[int, float]]:
    """(draft tokens that would be accepted, probability)."""
    ends = [*survival[1:], 0.0]
    return [(depth, here - deeper) for depth, (here, deeper) in enumerate(zip(survival, ends, strict=True))]


def play(
    until_s: Sequence[float], accepted: int, depth: int, verify_s: float, age_s: float
) -> tuple[float, float]:
    """One cycle: tokens gained and time taken, from the update to the end of its tree."""
    now_s, behind, waited = 0.0, 0, False
    while True:
        if behind > accepted:  # off the path: plain steps until the answer is out of the way
            left_s = max(age_s - now_s, 0.0)
            return behind + left_s / PLAIN_S, now_s + left_s
        if age_s <= now_s:  # the tree is there: verify the rest of it
            if behind == depth + 1:
                return behind, now_s
            return behind + (accepted - behind) + 1, now_s + verify_s
        deadline_s = until_s[behind] if behind < len(until_s) and not waited else 0.0
        if deadline_s > now_s:
            waited = True
            if age_s <= deadline_s:
                now_s = age_s
                continue
            now_s = deadline_s
        now_s += PLAIN_S
        behind += 1


trees = st.lists(st.floats(0.05, 0.95), min_size=1, max_size=3).map(
    lambda steps: [1.0, *itertools.accumulate(steps, lambda a, b: a * b)]
)


@given(
    survival=trees,
    verify_s=st.floats(0.03, 0.1),
    ages_s=st.lists(st.floats(0.001, 0.2), min_size=1, max_size=4, unique=True),
)
@settings(max_examples=60, deadline=None)
def test_the_plan_is_near_the_best_of_all_plans(
    survival: list[float], verify_s: float, ages_s: list[float]
) -> None:
    """Deadlines only matter at answer times: all combinations of them are tried. The model behind the plan
    leaves out what is left of a tree after a wait in vain, so a little may be lost there, and only there."""
    plan = plan_waiting(np.array(survival), verify_s, PLAIN_S, np.array(ages_s))
    choices = [0.0, *ages_s]
    best = max(
        speed_of(until_s, survival, verify_s, ages_s)
        for until_s in itertools.product(choices, repeat=min(len(survival), 3))
    )
    best = max(best, 1 / PLAIN_S)
    reached = max(speed_of(plan.until_s, survival, verify_s, ages_s), 1 / PLAIN_S)
    assert reached >= 0.97 * best


def test_an_answer_that_comes_at_once_is_waited_for() -> None:
    plan = plan_waiting(np.array([1.0, 0.7, 0.5]), 0.032, PLAIN_S, np.array([0.002, 0.003]))
    assert plan.until_s[0] >= 0.002
    assert plan.rate == pytest.approx(2.2 / 0.0345, rel=0.02)


def test_a_drafter_on_the_device_answers_in_no_time_at_all() -> None:
    plan = plan_waiting(np.array([1.0, 0.7, 0.5]), 0.032, PLAIN_S, np.zeros(5))
    assert plan.rate == pytest.approx(2.2 / 0.032)


def test_an_answer_that_takes_longer_than_it_saves_is_not() -> None:
    plan = plan_waiting(np.array([1.0, 0.7, 0.5]), 0.04, PLAIN_S, np.array([0.2, 0.25]))
    assert set(plan.until_s) == {0.0}
    assert plan.rate == pytest.approx(1 / PLAIN_S, rel=0.05)


def test_the_tail_of_answer_times_is_cut_off() -> None:
    """One answer in ten was lost and sent again: it is not worth waiting for, the others are."""
    ages_s = np.array([0.01] * 9 + [0.5])
    plan = plan_waiting(np.array([1.0, 0.8, 0.6, 0.5]), 0.04, PLAIN_S, ages_s)
    assert 0.01 <= plan.until_s[0] < 0.5


def test_the_latest_of_the_usual_answers_is_waited_for_and_a_little_longer() -> None:
    """One later than all of twenty before it is to be expected, and not much later; a lost one is another."""
    ages_s = np.array([*np.linspace(0.010, 0.020, 20), 0.5])
    plan = plan_waiting(np.array([1.0, 0.8, 0.6, 0.5]), 0.04, PLAIN_S, ages_s)
    assert plan.until_s[0] == pytest.approx(0.025)


def test_a_useless_drafter_earns_the_plain_rate() -> None:
    plan = plan_waiting(np.array([1.0]), PLAIN_S, PLAIN_S, np.array([0.01]))
    assert plan.rate == pytest.approx(1 / PLAIN_S)
