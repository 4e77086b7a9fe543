"""No network or server fault changes a token, blocks decoding, or lasts.

Thousands of seeds of a simulated bad line between the real decode loop, both state machines, the real
session handling and scheduler, in virtual time: messages lost, doubled, late and out of order, cables out,
connections reset, engines hung, restarted, drained and short of memory. `run_seed` states the promises.

    STARSD_SIM_SEEDS=10000 pytest tests/e2e/test_simulator.py      # `make test` runs 2,000
    STARSD_SIM_SEEDS=100000 STARSD_SIM_FIRST=10000 pytest tests/e2e/test_simulator.py
    python -m tests.e2e.simulator.run SEED        # one seed again, with its traceback
"""

from __future__ import annotations

import multiprocessing
import os
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict

import pytest

from tests.e2e.simulator.run import run_seed

SEEDS = int(os.environ.get("STARSD_SIM_SEEDS", "2000"))
FIRST = int(os.environ.get("STARSD_SIM_FIRST", "0"))
CHUNK = 250


def run_chunk(first: int) -> tuple[dict[str, int], list[str]]:
    """Sums over seeds [first, first + CHUNK), and what failed."""
    sums: Counter[str] = Counter()
    failures = []
    for seed in range(first, min(first + CHUNK, FIRST + SEEDS)):
        try:
            sums.update(asdict(run_seed(seed)))
        except Exception as error:
            failures.append(f"seed {seed}: {type(error).__name__}: {error}")
    return dict(sums), failures


@pytest.mark.slow
def test_no_fault_changes_the_text_or_stays() -> None:
    sums: Counter[str] = Counter()
    failures: list[str] = []
    # spawn: a fork would take torch's threads along half-alive.
    with ProcessPoolExecutor(os.cpu_count(), multiprocessing.get_context("spawn")) as pool:
        for part, failed in pool.map(run_chunk, range(FIRST, FIRST + SEEDS, CHUNK)):
            sums.update(part)
            failures += failed
    assert not failures, "\n".join([f"{len(failures)} of {SEEDS} seeds failed", *failures[:20]])
    # A simulator that breaks nothing proves nothing.
    assert min(sums["outages"], sums["restarts"], sums["misses"], sums["stale_trees"]) > SEEDS // 20
    assert sums["verify_rounds"] > SEEDS
    assert sums["ahead_rounds"] > SEEDS // 10
    assert sums["evictions"] > SEEDS // 20
    assert sums["in_flight"] > SEEDS // 5  # messages that came in while an accelerator ran a step


def test_a_seed_is_the_same_run_every_time() -> None:
    assert run_seed(42) == run_seed(42)
