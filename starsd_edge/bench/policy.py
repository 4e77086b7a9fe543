"""`starsd bench policy`: the adaptive policy against plain decoding and every fixed tree size.

Each cell is a device profile, a link, a load of the service and a kind of prompt; every way of decoding runs
the real decode loop over the same traces in virtual time (`virtual`). A way's speed in a cell is its tokens
over its virtual seconds, prefill left out.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from starsd_edge.bench.trace import EASY, HARD, PROMPT_TOKENS, Difficulty, Trace, simulate
from starsd_edge.bench.virtual import Conditions, TraceTarget, VirtualService
from starsd_edge.decoding.costs import DeviceProfile, load_profile, profile_names
from starsd_edge.decoding.decoder import Decoder
from starsd_edge.decoding.policy import AdaptivePolicy, FixedPolicy, Policy
from starsd_edge.decoding.sampling import SamplingParams
from starsd_edge.testing import FakeClock

__all__ = ["FIXED_SIZES", "Cell", "cells", "overall", "run"]

FIXED_SIZES = (2, 4, 8, 16, 32, 60)
RTTS_MS = (0.0, 2.0, 10.0, 50.0, 200.0)
LOSSES_PCT = (0.0, 2.0)
LOADS_PCT: tuple[int | None, ...] = (0, 50, 100, 150, None)
DIFFICULTIES = (EASY, HARD)
TOKENS = 300
TRACES_PER_DIFFICULTY = 2
QUICK_STEP = 10  # --quick runs every tenth cell


@dataclass(frozen=True, slots=True)
class Cell:
    """Speeds in tokens per second: `adaptive`, `plain`, and `fixed[size]`."""

    profile: str
    conditions: Conditions
    prompts: str
    adaptive: float
    plain: float
    fixed: dict[int, float]
    plain_share: float  # of the adaptive policy's rounds

    @property
    def ratio_to_plain(self) -> float:
        return self.adaptive / self.plain

    @property
    def ratio_to_best_fixed(self) -> float:
        """Plain decoding counts as the fixed size 1."""
        return self.adaptive / max(self.plain, *self.fixed.values())


def run(quick: bool) -> Iterator[Cell]:
    """All cells, or every tenth."""
    traces = {
        difficulty: [
            simulate(difficulty, TOKENS + PROMPT_TOKENS, seed) for seed in range(TRACES_PER_DIFFICULTY)
        ]
        for difficulty in DIFFICULTIES
    }
    chosen = list(cells())
    if quick:
        # A fixed random tenth: every n-th would hit the same profiles again and again.
        order = np.random.Generator(np.random.Philox(0)).permutation(len(chosen))
        chosen = [chosen[i] for i in sorted(order[: len(chosen) // QUICK_STEP])]
    for profile, conditions, difficulty in chosen:
        yield measure(profile, conditions, difficulty.name, traces[difficulty])


def cells() -> Iterator[tuple[DeviceProfile, Conditions, Difficulty]]:
    profiles = [load_profile(name) for name in profile_names()]
    for load, difficulty, rtt, loss, profile in itertools.product(
        LOADS_PCT, DIFFICULTIES, RTTS_MS, LOSSES_PCT, profiles
    ):
        yield profile, Conditions(rtt, loss, load), difficulty


def measure(profile: DeviceProfile, conditions: Conditions, prompts: str, traces: list[Trace]) -> Cell:
    plain = 1.0 / profile.curve.plain_s
    # Without a service every fixed size is plain decoding.
    dead = conditions.load_pct is None
    fixed = {
        size: plain if dead else decode(profile, conditions, traces, FixedPolicy(size))[0]
        for size in FIXED_SIZES
    }
    adaptive, plain_share = decode(profile, conditions, traces, AdaptivePolicy(profile.curve))
    return Cell(profile.name, conditions, prompts, adaptive, plain, fixed, plain_share)


def decode(
    profile: DeviceProfile, conditions: Conditions, traces: list[Trace], policy: Policy
) -> tuple[float, float]:
    """Tokens per second over all traces, and the share of plain rounds; the policy learns all along."""
    tokens = rounds = plain_rounds = 0
    seconds = 0.0
    for seed, trace in enumerate(traces):
        clock = FakeClock()
        service = VirtualService(trace, conditions, clock, seed)
        decoder = Decoder(TraceTarget(trace, profile, clock), service, policy, clock)
        prompt, expected = np.split(trace.tokens, [trace.prompt_len])
        rounds_run = decoder.generate(prompt, SamplingParams(), len(expected))
        text = [token for round_ in rounds_run for token in round_.tokens]
        assert text == expected.tolist(), "a policy changed the text"
        stats = decoder.stats
        tokens += stats.tokens - stats.prefills
        seconds += stats.decode_s
        rounds += stats.rounds
        plain_rounds += stats.plain_rounds
    return float(tokens / seconds), plain_rounds / rounds


def overall(measured: list[Cell]) -> dict[str, float]:
    """Geometric mean over the cells of each way's speed over plain."""
    ways = {str(size): [cell.fixed[size] / cell.plain for cell in measured] for size in FIXED_SIZES}
    ways["adaptive"] = [cell.ratio_to_plain for cell in measured]
    return {way: math.exp(sum(map(math.log, ratios)) / len(ratios)) for way, ratios in ways.items()}
