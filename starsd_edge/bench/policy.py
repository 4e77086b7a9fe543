"""`starsd bench policy`: the adaptive policy against plain decoding and every fixed tree size.

Each cell is a device profile, a link, a load of the service and a kind of prompt; every way of decoding runs
the real decode loop over the same traces in virtual time (`virtual`). A way's speed in a cell is its tokens
over its virtual seconds, prefill left out.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import resources

import numpy as np

from starsd_edge.bench.recorder import CHAT, COPY, load
from starsd_edge.bench.trace import EASY, HARD, PROMPT_TOKENS, Trace, simulate
from starsd_edge.bench.virtual import Conditions, TraceTarget, VirtualService
from starsd_edge.decoding.costs import DeviceProfile, load_profile, profile_names
from starsd_edge.decoding.decoder import Decoder
from starsd_edge.decoding.policy import AdaptivePolicy, FixedPolicy, Policy
from starsd_edge.decoding.sampling import SamplingParams
from starsd_edge.testing import FakeClock

__all__ = [
    "FIXED_SIZES",
    "PROMPTS",
    "Cell",
    "cells",
    "decode",
    "halves",
    "measure",
    "recorded",
    "run",
    "simulated",
]

FIXED_SIZES = (2, 4, 8, 16, 32, 60)
RTTS_MS = (0.0, 2.0, 10.0, 50.0, 200.0)
LOSSES_PCT = (0.0, 2.0)
LOADS_PCT: tuple[int | None, ...] = (0, 50, 100, 150, None)
PROMPTS = ("easy", "hard")
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
    calibration_error: tuple[float, ...]  # of its expectations, by depth from 1 on; () where none were had

    @property
    def ratio_to_plain(self) -> float:
        return self.adaptive / self.plain

    @property
    def ratio_to_best_fixed(self) -> float:
        """Plain decoding counts as the fixed size 1."""
        return self.adaptive / max(self.plain, *self.fixed.values())


def run(prompts: dict[str, list[Trace]], quick: bool) -> Iterator[Cell]:
    """All cells, or every tenth. `prompts`: traces by the names in PROMPTS."""
    chosen = list(cells())
    if quick:
        # A fixed random tenth: every n-th would hit the same profiles again and again.
        order = np.random.Generator(np.random.Philox(0)).permutation(len(chosen))
        chosen = [chosen[i] for i in sorted(order[: len(chosen) // QUICK_STEP])]
    for profile, conditions, name in chosen:
        yield measure(profile, conditions, name, prompts[name])


def recorded() -> dict[str, list[Trace]]:
    """Answers and trees of the embedded model and its head: the half that drafts well and the other one, and
    under `COPY` answers that repeat much of their prompt."""
    with resources.as_file(resources.files("starsd_edge.bench") / "traces.npz") as file:
        traces = load(file)
    copies = [trace for trace in traces if trace.name == COPY]
    return {**halves([trace for trace in traces if trace.name == CHAT]), COPY: copies}


def halves(traces: list[Trace]) -> dict[str, list[Trace]]:
    """The half that drafts better is easy, the other one hard."""
    traces = sorted(traces, key=mean_walk)
    half = len(traces) // 2
    return {"easy": traces[half:], "hard": traces[:half]}


def simulated(*, ahead: bool = False) -> dict[str, list[Trace]]:
    """Traces of a model of drafting (`trace`), with the acceptance of a large model's head; `ahead`: and with
    what it drafts ahead."""
    return {
        difficulty.name: [
            simulate(difficulty, TOKENS + PROMPT_TOKENS, seed, ahead=ahead)
            for seed in range(TRACES_PER_DIFFICULTY)
        ]
        for difficulty in (EASY, HARD)
    }


def mean_walk(trace: Trace) -> float:
    """Draft tokens that the answer follows in its trees, on average: how easy the answer is to draft."""
    walks = [len(tree.walk(trace.tokens[tree.base_len :].tolist())) - 1 for tree in trace.trees]
    return sum(walks) / len(walks)


def cells() -> Iterator[tuple[DeviceProfile, Conditions, str]]:
    profiles = [load_profile(name) for name in profile_names()]
    for load_pct, name, rtt, loss, profile in itertools.product(
        LOADS_PCT, PROMPTS, RTTS_MS, LOSSES_PCT, profiles
    ):
        yield profile, Conditions(rtt, loss, load_pct), name


def measure(profile: DeviceProfile, conditions: Conditions, prompts: str, traces: list[Trace]) -> Cell:
    plain = 1.0 / profile.curve.plain_s
    # Without a service every fixed size is plain decoding.
    dead = conditions.load_pct is None
    fixed = {
        size: plain if dead else decode(profile, conditions, traces, FixedPolicy(size)).tokens_per_s
        for size in FIXED_SIZES
    }
    policy = AdaptivePolicy(profile.curve)
    adaptive = decode(profile, conditions, traces, policy)
    errors = () if dead else tuple(policy.calibration_error())
    return Cell(
        profile.name, conditions, prompts, adaptive.tokens_per_s, plain, fixed, adaptive.plain_share, errors
    )


@dataclass(frozen=True, slots=True)
class Decoded:
    """All traces of a cell, decoded one way. `ahead_share`: of verified trees, those drafted ahead."""

    tokens_per_s: float
    rounds_per_s: float
    plain_share: float
    ahead_share: float


def decode(
    profile: DeviceProfile,
    conditions: Conditions,
    traces: list[Trace],
    policy: Policy,
    service_of: type[VirtualService] = VirtualService,
) -> Decoded:
    """The policy learns all along, from one trace to the next."""
    tokens = rounds = plain_rounds = ahead = 0
    seconds = 0.0
    for seed, trace in enumerate(traces):
        clock = FakeClock()
        service = service_of(trace, conditions, clock, seed)
        decoder = Decoder(TraceTarget(trace, profile.curve, clock), service, policy, clock)
        prompt, expected = np.split(trace.tokens, [trace.prompt_len])
        rounds_run = decoder.generate(prompt, SamplingParams(), len(expected))
        text = [token for round_ in rounds_run for token in round_.tokens]
        assert text == expected.tolist(), "a policy changed the text"
        stats = decoder.stats
        tokens += stats.tokens - stats.prefills
        seconds += stats.decode_s
        rounds += stats.rounds
        plain_rounds += stats.plain_rounds
        ahead += stats.ahead
    trees = max(1, rounds - plain_rounds)
    return Decoded(tokens / seconds, rounds / seconds, plain_rounds / rounds, ahead / trees)
