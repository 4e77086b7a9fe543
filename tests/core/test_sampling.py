"""The sampling rule: what the filters keep, which token a uniform picks, how far a pick is from flipping."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from starsd_edge.decoding.philox import philox, uniform
from starsd_edge.decoding.sampling import Pick, SamplingParams, pick, token_law
from starsd_edge.errors import BundleError, UsageError
from starsd_edge.types import Float32Array

ALL_ONES = 0xFFFFFFFF
GOLDEN = (0.9545971261687, 0.4069604044303493, 0.006075128914893813, 0.3842993451737111)

# Half steps make equal logits common, which is where definitions go wrong.
logit_lists = st.lists(st.integers(-12, 12).map(lambda n: n / 2), min_size=1, max_size=300)
sampled_params = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.3, 0.7, 1.0, 2.5]),
    top_k=st.sampled_from([0, 1, 2, 5, 40]),
    top_p=st.sampled_from([1.0, 0.999, 0.9, 0.5, 0.01]),
    min_p=st.sampled_from([0.0, 0.02, 0.3, 1.0]),
    repetition_penalty=st.sampled_from([1.0, 1.3]),
    seed=st.integers(0, 2**64 - 1),
)


def as_logits(values: list[float]) -> Float32Array:
    return np.array(values, np.float32)


def reference_law(logits: list[float], params: SamplingParams) -> dict[int, float]:
    """The filters written with lists and loops, in rank order (no penalties)."""
    ranked = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    if params.top_k:
        ranked = ranked[: params.top_k]
    weight = {i: math.exp((logits[i] - logits[ranked[0]]) / params.temperature) for i in ranked}
    total = sum(weight.values())
    kept: list[int] = []
    for i in ranked:
        if params.top_p < 1 and kept and sum(weight[k] for k in kept) >= params.top_p * total:
            break
        kept.append(i)
    kept = [i for i in kept if weight[i] >= params.min_p]
    total = sum(weight[i] for i in kept)
    return {i: weight[i] / total for i in kept}


@pytest.mark.parametrize(
    ("expected", "counter", "key"),
    [
        ((0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8), (0, 0, 0, 0), (0, 0)),
        ((0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD), (ALL_ONES,) * 4, (ALL_ONES,) * 2),
        (
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
        ),
    ],
)
def test_philox_gives_the_known_answers_of_its_authors(
    expected: tuple[int, ...], counter: tuple[int, int, int, int], key: tuple[int, int]
) -> None:
    assert expected == philox(counter, key)


def test_uniforms_of_a_seed_never_change() -> None:
    """A seed is a promise: these values may not depend on platform, numpy or release."""
    assert [uniform(7, p) for p in range(3)] == list(GOLDEN[:3])
    assert uniform(2**64 - 1, 2**33) == GOLDEN[3]


def test_uniforms_fill_the_unit_interval_evenly() -> None:
    counts = np.bincount([int(16 * uniform(3, p)) for p in range(4096)], minlength=16)
    chi_square = ((counts - 256) ** 2 / 256).sum()
    assert chi_square < 44.3  # 15 degrees of freedom, alpha = 1e-4; a fixed seed, so never flaky


@given(logit_lists)
def test_greedy_takes_the_best_token_and_the_lowest_id_among_equals(values: list[float]) -> None:
    best = max(values)
    rest = sorted(values)[:-1]
    expected = Pick(values.index(best), best - rest[-1] if rest else math.inf)
    assert expected == pick(as_logits(values), SamplingParams(), 5, [])


@given(logit_lists, sampled_params)
@settings(max_examples=200)
def test_filters_keep_what_their_definition_says(values: list[float], params: SamplingParams) -> None:
    law = token_law(as_logits(values), params)
    reference = reference_law(values, params)
    mass_at_top_p = abs(sum(reference.values()) - 1.0)
    assert mass_at_top_p < 1e-9
    if set(reference) != set(np.flatnonzero(law)):
        # Only a mass that equals top_p up to rounding may be decided either way.
        assert pick(as_logits(values), params, 0, []).margin < 1e-6
    else:
        for token, probability in reference.items():
            assert law[token] == pytest.approx(probability, abs=1e-12)


@given(logit_lists, sampled_params, st.integers(0, 5000))
def test_a_sampled_token_is_the_inverse_cdf_at_the_positions_uniform(
    values: list[float], params: SamplingParams, position: int
) -> None:
    cdf = np.cumsum(token_law(as_logits(values), params))
    token = pick(as_logits(values), params, position, []).token
    u = uniform(params.seed, position)
    assert cdf[token] > u - 1e-9
    assert token == 0 or cdf[token - 1] <= u + 1e-9


@given(logit_lists, sampled_params, st.integers(0, 500), st.integers(0, 2**32 - 1))
@settings(max_examples=300)
def test_a_pick_holds_while_noise_stays_below_half_its_margin(
    values: list[float], params: SamplingParams, position: int, noise_seed: int
) -> None:
    """The margin guard rests on this: extreme noise (every logit moved by the full bound) included."""
    logits = as_logits(values)
    context = [0, len(values) - 1]
    decided = pick(logits, params, position, context)
    bound = min(decided.margin, 8.0) * 0.499
    rng = np.random.default_rng(noise_seed)
    for noise in (rng.uniform(-1, 1, len(values)), rng.choice([-1.0, 1.0], len(values))):
        moved = (logits + bound * noise).astype(np.float32)
        assert decided.token == pick(moved, params, position, context).token


def test_large_vocabularies_are_ranked_like_small_ones() -> None:
    """Selection by block maxima, with the best tokens packed into one block and ties across blocks."""
    rng = np.random.default_rng(5)
    logits = np.round(rng.normal(0, 2, 10_000), 1).astype(np.float32)
    logits[640:700] = np.linspace(8, 9, 60)
    for top_k in (1, 3, 50, 70, 200):
        params = SamplingParams(temperature=1.0, top_k=top_k)
        ranked = sorted(range(len(logits)), key=lambda i: (-logits[i], i))[:top_k]
        assert set(ranked) == set(np.flatnonzero(token_law(logits, params)))


def test_a_repetition_penalty_pushes_seen_tokens_down_on_both_sides_of_zero() -> None:
    logits = as_logits([2.0, 1.9, -1.0, -1.1])
    params = SamplingParams(repetition_penalty=1.5)
    assert pick(logits, params, 0, [0]).token == 1
    assert pick(logits, params, 0, [0, 1]).token == 0
    law = token_law(logits, SamplingParams(temperature=1.0, repetition_penalty=2.0), [2])
    assert law[2] / law[3] == pytest.approx(math.exp(-2.0 + 1.1))


def test_presence_counts_once_and_frequency_each_time() -> None:
    logits = as_logits([1.0, 0.0, 0.5])
    assert pick(logits, SamplingParams(presence_penalty=0.4), 0, [0, 0, 0]).token == 0
    assert pick(logits, SamplingParams(frequency_penalty=0.4), 0, [0, 0, 0]).token == 2
    assert logits.tolist() == [1.0, 0.0, 0.5]


def test_overflowed_logits_never_win() -> None:
    logits = as_logits([math.nan, 1.0, math.inf, 3.0, -math.inf])
    assert pick(logits, SamplingParams(), 0, []).token == 3
    law = token_law(logits, SamplingParams(temperature=1.0, top_k=4, top_p=0.99))
    assert law[0] == law[2] == law[4] == 0.0


def test_logits_without_a_number_are_named_with_their_position() -> None:
    with pytest.raises(BundleError, match="position 17"):
        pick(as_logits([math.nan, math.nan]), SamplingParams(), 17, [])


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": -0.1},
        {"temperature": math.nan},
        {"top_k": -1},
        {"top_p": 0.0},
        {"top_p": 1.01},
        {"min_p": 1.5},
        {"repetition_penalty": 0.0},
        {"seed": -1},
        {"seed": 2**64},
    ],
)
def test_settings_out_of_range_are_refused_by_name(wrong: dict[str, float]) -> None:
    with pytest.raises(UsageError, match=next(iter(wrong))):
        SamplingParams(**wrong)  # type: ignore[arg-type]  # ints and floats of a table
