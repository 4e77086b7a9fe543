"""What batching is for: never less than the paper's order gives, and many times as much where many draft."""

from __future__ import annotations

import pytest

from starsd_server.capacity.model import DraftWork
from starsd_server.emulate.bench import BenchPlan
from starsd_server.emulate.virtual import measure_virtually
from starsd_server.scheduling import Policy

from .test_capacity import recording

__all__ = ["recording"]

AS_GOOD = 0.98  # short runs accept a little more or less by chance


@pytest.mark.parametrize("targets", [1, 2, 4, 8, 16, 32, 64])
def test_batched_drafting_is_never_behind_and_four_times_ahead_of_serial_with_64_targets(
    recording: tuple[BenchPlan, DraftWork], targets: int
) -> None:
    """In virtual time: the real scheduler, sessions and messages, a step as long as a 4090's."""
    plan, _ = recording
    batched, serial = (
        measure_virtually(plan, policy.value, [None] * targets, host_factor=0.0)
        for policy in (Policy.BATCHED, Policy.SERIAL)
    )
    gain = batched.system_tokens_per_s / serial.system_tokens_per_s
    assert gain >= (4.0 if targets == 64 else AS_GOOD)
    assert batched.fairness_jain > 0.95
