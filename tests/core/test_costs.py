"""Cost curves and the device profiles that ship."""

from __future__ import annotations

import pytest

from starsd_edge.decoding.costs import CostCurve, load_profile, profile_names
from starsd_edge.errors import UsageError

CURVE = CostCurve((1, 4, 8), (0.010, 0.016, 0.032))


@pytest.mark.parametrize(
    ("seconds", "n"), [(0.010, 1), (0.012, 2), (0.016, 4), (0.024, 6), (0.032, 8), (0.040, 10)]
)
def test_a_curve_is_linear_between_and_beyond_its_points(seconds: float, n: int) -> None:
    assert seconds == pytest.approx(CURVE(n))
    assert seconds == pytest.approx(CURVE.table(12)[n - 1])


def test_a_curve_of_one_point_grows_in_proportion() -> None:
    assert CostCurve((1,), (0.01,))(3) == pytest.approx(0.03)


def test_noisy_measurements_are_lifted_to_a_curve_that_never_falls() -> None:
    assert CostCurve((1, 2, 4), (0.010, 0.012, 0.012)) == CostCurve.monotone([1, 2, 4], [0.010, 0.012, 0.011])


@pytest.mark.parametrize(
    ("sizes", "seconds"),
    [
        ((), ()),
        ((2, 4), (0.1, 0.2)),
        ((1, 1), (0.1, 0.2)),
        ((1, 2), (0.1,)),
        ((1, 2), (0.2, 0.1)),
        ((1,), (0.0,)),
        ((1,), (float("nan"),)),
    ],
)
def test_what_is_no_curve_is_refused(sizes: tuple[int, ...], seconds: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="cost curve"):
        CostCurve(sizes, seconds)


def test_every_profile_names_its_source_and_what_was_measured() -> None:
    expected = ["agx-orin-fp16", "agx-orin-int4", "laptop-cpu", "orin-nano-int4", "orin-nx-int4", "thor-int4"]
    assert expected == profile_names()
    for name in profile_names():
        profile = load_profile(name)
        assert profile.source
        assert profile.derivation
        assert set(profile.measured_sizes) <= set(profile.curve.sizes)
        assert 1 in profile.measured_sizes


@pytest.mark.parametrize(
    ("name", "plain_ms", "ratio"),
    [
        ("agx-orin-int4", 30.77, 2.3),
        ("orin-nx-int4", 52.63, 2.6),
        ("orin-nano-int4", 26.74, 2.9),
        ("thor-int4", 20.28, 2.7),
        ("agx-orin-fp16", 84.77, 1.2),
        ("laptop-cpu", 9.6, 5.7),
    ],
)
def test_sixty_nodes_cost_as_many_plain_steps_as_was_published(
    name: str, plain_ms: float, ratio: float
) -> None:
    curve = load_profile(name).curve
    assert plain_ms == pytest.approx(curve.plain_s * 1e3, abs=0.01)
    assert ratio == pytest.approx(curve(60) / curve(1), abs=0.05)


def test_an_unknown_profile_is_answered_with_the_known_ones() -> None:
    with pytest.raises(UsageError, match="choose one of agx-orin-fp16"):
        load_profile("../profiles/thor-int4")
