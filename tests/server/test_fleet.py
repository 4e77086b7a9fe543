"""The fleet in virtual time: small ones against the service's own benchmark, larger ones through failures."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

from starsd_edge.bench.policy import measure, recorded
from starsd_edge.bench.virtual import Conditions
from starsd_edge.decoding.costs import load_profile
from starsd_edge.errors import UsageError
from starsd_server.capacity.fleet import Failure, FleetPlan, simulate
from starsd_server.capacity.fleet_cli import command, typical
from starsd_server.capacity.model import DraftWork
from starsd_server.capacity.recorded import Played, play
from starsd_server.emulate.bench import BenchPlan
from starsd_server.emulate.trace import RecordedTrees
from starsd_server.emulate.virtual import measure_virtually
from starsd_server.scheduling import Limits, Policy

from .test_capacity import ORIN, RTT_S, RTX, recording

__all__ = ["recording"]

# Three rounds of a conversation: a prompt of 40 rows, then what the round before brought.
CONVERSATION = [Played(3, 8, (4, 6, 4), 40), Played(2, 8, (4, 6, 4), 3), Played(4, 8, (4, 6, 4), 2)] * 4


def plan(devices: int, services: int = 1, **changes: object) -> FleetPlan:
    base = FleetPlan(devices, services, ORIN.curve, RTX.step_s, [CONVERSATION], seconds=4.0)
    return dataclasses.replace(base, **changes)


@pytest.mark.parametrize(
    ("policy", "targets"),
    [
        (Policy.BATCHED, 1),
        (Policy.BATCHED, 10),
        (Policy.BATCHED, 40),
        (Policy.SERIAL, 3),
        (Policy.SERIAL, 16),
    ],
)
def test_a_small_fleet_gets_what_the_benchmark_measures(
    recording: tuple[BenchPlan, DraftWork], policy: Policy, targets: int
) -> None:
    bench, _ = recording
    measured = measure_virtually(bench, policy.value, [None] * targets, host_factor=0.0)
    trees = RecordedTrees.load(bench.config.trees)
    simulated = simulate(
        plan(
            targets,
            conversations=play(bench.fleet.trace, trees),
            rtt_s=RTT_S,
            policy=policy,
            limits=bench.config.limits,
        )
    )
    assert simulated.tokens_per_s == pytest.approx(measured.system_tokens_per_s, rel=0.1)


def deciding(devices: int, services: int = 1, **changes: object) -> FleetPlan:
    return plan(devices, services, traces=recorded()["easy"][2:], **changes)


@pytest.mark.parametrize("rtt_ms", [2.0, 10.0, 200.0])
def test_a_device_that_decides_is_as_fast_as_in_the_benchmark_of_the_policy(rtt_ms: float) -> None:
    """Alone, with a head step of 2 ms there and here: near, farther, and so far that it rarely drafts."""
    traces = recorded()["easy"][2:]
    measured = measure(load_profile("agx-orin-int4"), Conditions(rtt_ms, 0.0, 0), "easy", traces)
    result = simulate(deciding(1, rtt_s=rtt_ms / 1e3, seconds=12.0, step_s=lambda rows, kv_rows: 0.002))
    assert result.tokens_per_s == pytest.approx(measured.adaptive, rel=0.1)


def test_devices_that_decide_are_not_slowed_down_where_those_that_wait_are() -> None:
    """The paper's order, forty devices: who always waits gets less than it would alone."""
    crowded = {"policy": Policy.SERIAL, "seconds": 3.0}
    alone = 1 / ORIN.curve.plain_s
    waiting, decided = simulate(plan(40, **crowded)), simulate(deciding(40, **crowded))
    assert waiting.device_tokens_per_s.mean() < 0.8 * alone
    assert decided.device_tokens_per_s.mean() > 0.98 * alone
    assert decided.plain_share > 0.3


def test_devices_that_decide_go_on_elsewhere_when_their_service_fails() -> None:
    healthy, failed = (
        simulate(deciding(8, 2, seconds=6.0, failures=failures)) for failures in ((), (Failure(1, 2.0),))
    )
    assert failed.devices_at[1] == 0 < healthy.devices_at[1]
    assert failed.moves > 0
    assert failed.device_tokens_per_s.min() > 0.9 / ORIN.curve.plain_s


@pytest.mark.parametrize("plan_of", [plan, deciding])
def test_the_same_plan_has_the_same_result(plan_of: Callable[..., FleetPlan]) -> None:
    first, again = simulate(plan_of(6, 2)), simulate(plan_of(6, 2))
    assert first.device_tokens_per_s.tolist() == again.device_tokens_per_s.tolist()


def test_devices_spread_over_services_and_all_get_their_share() -> None:
    result = simulate(plan(300, 6))
    assert sum(result.devices_at) <= 300
    assert min(result.devices_at) > 25
    assert result.device_tokens_per_s.min() > 0.8 * result.device_tokens_per_s.mean()
    assert (0, 0.0) == (result.moves, result.plain_share)


def test_more_services_give_a_crowded_fleet_more() -> None:
    limits = Limits(max_sessions=256, device_rows_per_s=1e9, rows_per_s=1e12)
    one, four = (
        simulate(plan(120, services, policy=Policy.SERIAL, limits=limits)).tokens_per_s for services in (1, 4)
    )
    assert four > 3 * one


def test_devices_of_a_failed_service_decode_plainly_go_elsewhere_and_come_back() -> None:
    healthy = simulate(plan(60, 3, seconds=8.0))
    failed = simulate(plan(60, 3, seconds=8.0, failures=(Failure(1, 3.0),)))
    assert failed.devices_at[1] == 0
    assert sum(failed.devices_at) >= 55
    assert failed.moves >= healthy.devices_at[1] - 2
    assert 0 < failed.plain_share < 0.2
    # Nobody falls below what it could do alone, but for the seconds in which a failure is not noticed yet.
    alone = (8.0 - 2.0) / 8.0 / ORIN.curve.plain_s
    assert failed.device_tokens_per_s.min() > alone


def test_without_any_service_a_fleet_decodes_plainly() -> None:
    result = simulate(plan(10, 2, seconds=30.0, failures=(Failure(0, 0.0), Failure(1, 0.0))))
    assert result.plain_share > 0.99
    assert result.tokens_per_s == pytest.approx(10 / ORIN.curve.plain_s, rel=0.15)


def test_a_full_service_spills_over_to_one_that_has_room() -> None:
    limits = Limits(max_sessions=24, device_rows_per_s=1e9, rows_per_s=1e12)
    result = simulate(plan(44, 2, limits=limits))
    assert max(result.devices_at) <= 24
    assert sum(result.devices_at) >= 42


def test_hundreds_of_devices_on_eight_services_keep_every_engine_at_work() -> None:
    result = simulate(plan(400, 8, seconds=0.5, warm_up_s=0.5))
    assert result.device_tokens_per_s.min() > 0
    assert 0.9 < result.busy.mean() <= 1.01  # a step that began in the warm-up counts where it ends


def test_the_command_prints_figures_and_refuses_nonsense(tmp_path: Path) -> None:
    arguments = ["--devices", "40", "--services", "2", "--seconds", "6", "--fail", "1@1.5-3"]
    result = CliRunner().invoke(
        command, [*arguments, "--json", str(tmp_path / "f.json")], catch_exceptions=False
    )
    assert "40 devices, 2 draft services" in result.output
    figures = json.loads((tmp_path / "f.json").read_text())
    assert 0 < figures["plain_share"] < 0.5
    assert figures["moves"] > 0
    decided = CliRunner().invoke(
        command, ["--devices", "2", "--services", "1", "--seconds", "1", "--decide"], catch_exceptions=False
    )
    assert "plain_share" in decided.output
    for nonsense in ("1", "a@2", "9@1"):
        refused = CliRunner().invoke(command, ["--devices", "4", "--services", "2", "--fail", nonsense])
        assert isinstance(refused.exception, UsageError)


def test_typical_rounds_bring_what_was_asked() -> None:
    rounds = [round_ for conversation in typical(3.0) for round_ in conversation]
    assert sum(round_.tokens for round_ in rounds) / len(rounds) == pytest.approx(3.0, rel=0.05)
