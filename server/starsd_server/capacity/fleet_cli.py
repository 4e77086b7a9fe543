"""`starsd bench fleet`: many devices and several draft services in virtual time, with failures."""

from __future__ import annotations

import time
from pathlib import Path

import click
import numpy as np

from starsd_edge.bench.policy import PROMPTS, recorded
from starsd_edge.bench.report import json_option, write_json
from starsd_edge.decoding.costs import load_profile
from starsd_edge.errors import UsageError
from starsd_edge.ranges import FiniteRange
from starsd_server.capacity.cli import profile_steps
from starsd_server.capacity.fleet import Failure, FleetPlan, FleetResult, simulate
from starsd_server.capacity.recorded import Played
from starsd_server.emulate.engines import load_engine_profile
from starsd_server.scheduling import Limits, Policy

__all__ = ["command", "typical"]

MOST_SIMULATED = 4000  # devices: more are taken to be like these


@click.command("fleet")
@click.option("--devices", default=1000, show_default=True, type=click.IntRange(1, 100_000))
@click.option("--services", default=20, show_default=True, type=click.IntRange(1, 1000))
@click.option("--profile", default="agx-orin-int4", show_default=True, help="The devices' timing.")
@click.option("--engine", default="rtx-4090", show_default=True, help="The draft hosts' profile.")
@click.option(
    "--scheduler", type=click.Choice([p.value for p in Policy]), default="batched", show_default=True
)
@click.option("--rtt-ms", default=2.0, show_default=True, type=FiniteRange(0))
@click.option("--tokens", default=3.0, show_default=True, type=FiniteRange(1, 8), help="A round brings.")
@click.option(
    "--decide",
    is_flag=True,
    help="Devices wait and draft, or not, as real ones do: over the embedded model's answers, not --tokens. "
    "Takes half a millisecond a token.",
)
@click.option("--max-sessions", default=256, show_default=True, type=click.IntRange(1), help="Of a service.")
@click.option("--seconds", default=10.0, show_default=True, type=FiniteRange(0.1), help="Virtual ones.")
@click.option(
    "--fail", "failures", multiple=True, metavar="SERVICE@FROM[-UNTIL]", help="Seconds from the start."
)
@json_option
def command(
    devices: int,
    services: int,
    profile: str,
    engine: str,
    scheduler: str,
    rtt_ms: float,
    tokens: float,
    max_sessions: int,
    seconds: float,
    failures: tuple[str, ...],
    json_file: Path | None,
    *,
    decide: bool,
) -> None:
    """What a fleet gets from its draft services, and what a failure does to it.

    The product's own placement and scheduler, in virtual time; nothing is measured. Above 4,000 devices a
    part of the fleet with its share of the services stands for all of it.
    """
    share = min(1.0, MOST_SIMULATED / devices)
    plan = FleetPlan(
        devices=max(1, round(devices * share)),
        services=max(1, round(services * share)),
        curve=load_profile(profile).curve,
        step_s=profile_steps(load_engine_profile(engine)),
        conversations=() if decide else typical(tokens),
        traces=[trace for name in PROMPTS for trace in recorded()[name]] if decide else (),
        rtt_s=rtt_ms / 1e3,
        seconds=seconds,
        failures=tuple(map(parse_failure, failures)),
        limits=Limits(max_sessions=max_sessions, device_rows_per_s=1e9, rows_per_s=1e12),
        policy=Policy(scheduler),
    )
    if any(failure.service >= plan.services for failure in plan.failures):
        stand = "" if plan.services == services else f"{plan.services} stand for {services} here, and "
        raise UsageError(f"--fail: {stand}services are numbered from 0 to {plan.services - 1}")
    started_s = time.monotonic()
    result = simulate(plan)
    figures = figures_of(plan, result, devices / plan.devices)
    took_s = time.monotonic() - started_s
    write_json(json_file, figures)
    click.echo(f"{devices} devices, {services} draft services ({plan.devices} and {plan.services} simulated)")
    for name, value in figures.items():
        click.echo(f"  {name:<28} {value:.4g}" if isinstance(value, float) else f"  {name:<28} {value}")
    click.echo(f"simulated in {took_s:.1f} s")


def typical(tokens: float) -> list[list[Played]]:
    """Conversations of a prompt and 40 rounds that bring `tokens` each on average, more and less by turns."""
    rng = np.random.Generator(np.random.Philox(0))
    conversations = []
    for _ in range(16):
        brought = 1 + rng.binomial(7, min(1.0, (tokens - 1) / 7), 40)
        before = [int(rng.integers(20, 200)), *brought[:-1].tolist()]
        conversations.append(
            [
                Played(int(now), 16, (6, 8, 8, 6, 4), int(new))
                for now, new in zip(brought, before, strict=True)
            ]
        )
    return conversations


def figures_of(plan: FleetPlan, result: FleetResult, scale: float) -> dict[str, int | float]:
    each = result.device_tokens_per_s
    return {
        "tokens_per_s": result.tokens_per_s * scale,
        "device_tokens_per_s_mean": float(each.mean()),
        "device_tokens_per_s_p5": float(np.percentile(each, 5)),
        "ratio_to_plain_mean": float(each.mean() * plan.curve.plain_s),
        "plain_share": result.plain_share,
        "service_busy_mean": float(result.busy.mean()),
        "service_busy_max": float(result.busy.max()),
        "devices_at_a_service_max": max(result.devices_at),
        "moves": round(result.moves * scale),
        "refused": round(result.refused * scale),
    }


def parse_failure(text: str) -> Failure:
    """Raises UsageError for what is not SERVICE@FROM or SERVICE@FROM-UNTIL."""
    try:
        service, _, span = text.partition("@")
        start, _, end = span.partition("-")
        return Failure(int(service), float(start), float(end) if end else float("inf"))
    except ValueError:
        raise UsageError(f"--fail {text}: SERVICE@FROM[-UNTIL] is wanted, such as 3@2.5-6") from None
