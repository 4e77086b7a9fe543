"""`starsd bench service`: emulated targets against a real draft service."""

from __future__ import annotations

import logging
import signal
import sys
from dataclasses import asdict
from pathlib import Path

import click

from starsd_edge.bench.report import json_option, write_json
from starsd_edge.bench.result_files import picture_option
from starsd_edge.cli.drafts import software
from starsd_edge.cli.runtime import EMBEDDED, ModelChoice
from starsd_edge.decoding.costs import load_profile
from starsd_edge.errors import UsageError
from starsd_edge.protocol.features import FeatureDtype
from starsd_edge.ranges import FiniteRange
from starsd_server.cli_serve import head_sources
from starsd_server.config import REAL_ENGINE, ServiceConfig
from starsd_server.emulate.bench import BenchPlan, BenchRow, measure
from starsd_server.emulate.devices import FleetPlan
from starsd_server.emulate.engines import load_engine_profile
from starsd_server.emulate.record import open_trace, recorded_trees
from starsd_server.emulate.soak import MAX_GROWTH_MIB, growth_mib, soak
from starsd_server.emulate.virtual import measure_virtually
from starsd_server.heads.checkpoint import read_manifest
from starsd_server.scheduling import Limits, Policy

__all__ = ["command"]

HOST_FACTOR = 1.0  # virtual time: the host's part of a step, in units of this machine's processor time
WAIT_S = 0.01  # what a device is taken to wait for a tree, when its size is chosen by cost
COLUMNS = (
    "scheduler  engine    targets  tokens/s  per target   tau  busy/waited for  idle ms  rows  "
    "queue p50/p99   draft p50/p99  jain   cpu wait"
)
AT_LEAST_ONE = click.IntRange(1)


@click.command("service")
@click.option(
    "--targets", default="1,2,4,8,16,32,64", show_default=True, help="Numbers of targets, by commas."
)
@click.option(
    "--profile", default="agx-orin-int4", show_default=True, help="What the targets' timing is that of."
)
@click.option("--engine", default=REAL_ENGINE, show_default=True, help="real, or a profile such as rtx-4090.")
@click.option(
    "--scheduler",
    type=click.Choice([*(policy.value for policy in Policy), "both"]),
    default="both",
    show_default=True,
)
@click.option(
    "--rtt-ms", default=2.0, show_default=True, type=FiniteRange(0), help="Emulated delay of the line."
)
@click.option(
    "--seconds",
    default=10.0,
    show_default=True,
    type=FiniteRange(0, min_open=True),
    help="Measured time of each row.",
)
@click.option("--max-nodes", default=60, show_default=True, type=click.IntRange(2, 256), help="Largest tree.")
@click.option(
    "--features",
    default="fp16",
    show_default=True,
    type=click.Choice([dtype.wire_name for dtype in FeatureDtype]),
    help="How they travel: what their precision costs.",
)
@click.option(
    "--answer-tokens", default=128, show_default=True, type=click.IntRange(8), help="Of each recording."
)
@click.option("--head", type=click.Path(path_type=Path), help="Draft head; the embedded model's without it.")
@click.option("--target", type=click.Path(path_type=Path), help="The head's target, needed once.")
@click.option("--bundle", default=EMBEDDED, show_default=True, help="The target whose answers are recorded.")
@click.option("--threads", default=1, show_default=True, type=AT_LEAST_ONE, help="Of the real engine.")
@click.option("--virtual", is_flag=True, help="In virtual time, without sockets: no noise of this machine.")
@click.option(
    "--greedy",
    type=AT_LEAST_ONE,
    help="Instead: what a device with that many sessions costs another with one (batched).",
)
@click.option(
    "--soak",
    "soak_rounds",
    type=click.IntRange(10),
    help="Instead: the service's memory over that many rounds, with the largest number of targets; fails "
    f"where it grows by more than {MAX_GROWTH_MIB:.0f} MiB.",
)
@click.option(
    "--profile-round",
    "profiled_rounds",
    is_flag=False,
    flag_value=2000,
    type=AT_LEAST_ONE,
    help="Instead: where the time of that many rounds goes, with the largest number of targets.",
)
@json_option
@picture_option("--png", "png_file", "Draw throughput and busy fraction.")
def command(
    targets: str,
    profile: str,
    engine: str,
    scheduler: str,
    rtt_ms: float,
    seconds: float,
    max_nodes: int,
    features: str,
    answer_tokens: int,
    head: Path | None,
    target: Path | None,
    bundle: str,
    threads: int,
    virtual: bool,
    greedy: int | None,
    soak_rounds: int | None,
    profiled_rounds: int | None,
    json_file: Path | None,
    png_file: Path | None,
) -> None:
    """Serve 1 to 64 emulated targets and count what they get.

    Tokens, features, acceptance, scheduler, wire and processes are real; the targets' time to verify is that
    of --profile, and with --engine PROFILE the head's time is that of a GPU.
    """
    logging.basicConfig(level=logging.WARNING)
    for number in (signal.SIGTERM, signal.SIGHUP):  # its service ends with it, as after Ctrl-C
        signal.signal(number, signal.default_int_handler)
    counts = parse_counts(targets)
    device = load_profile(profile)
    dtype = FeatureDtype[features.upper()]
    if engine != REAL_ENGINE:
        load_engine_profile(engine)
    elif virtual:
        raise UsageError("virtual time needs an emulated engine: --engine rtx-4090")
    sources = head_sources((head,) if head else (), (target,) if target else ())
    source = sources[0]
    manifest = read_manifest(Path(source.folder))
    trace, folder = open_trace(ModelChoice(bundle), Path(source.folder), answer_tokens, progress)
    target_path = Path(source.target) if source.target else None
    trees = ""
    if engine != REAL_ENGINE:
        file = recorded_trees(
            trace, folder, Path(source.folder), target_path, device, max_nodes, WAIT_S, progress, dtype
        )
        trees = str(file)
    most = max(*counts, (greedy or 0) + 1)
    plan = BenchPlan(
        config=ServiceConfig(
            heads=sources,
            bind="tcp://127.0.0.1:0",
            monitor="tcp://127.0.0.1:0",
            folder="",
            software=software(),
            threads=threads,
            limits=Limits(max_sessions=most, device_sessions=most, device_rows_per_s=1e6),
            max_nodes=max_nodes,
            engine=engine,
            trees=trees,
            log_level="warning",
        ),
        fleet=FleetPlan(
            manifest.identity,
            trace,
            device,
            max_nodes,
            WAIT_S,
            rtt_ms / 1e3,
            dtype,
        ),
        seconds=seconds,
    )
    if profiled_rounds is not None:
        profile_round(plan, max(counts), profiled_rounds, json_file)
        return
    if soak_rounds is not None:
        show_soak(plan, max(counts), soak_rounds, json_file)
        return
    policies = [Policy.BATCHED.value, Policy.SERIAL.value] if scheduler == "both" else [scheduler]
    if greedy:
        policies = [Policy.BATCHED.value]
    clock = "virtual time" if virtual else "real processes and sockets"
    timed_as = f"{device.device}, {device.model} {device.precision}"
    click.echo(f"targets timed as {timed_as} (emulated); engine: {engine}; {clock}")
    click.echo(COLUMNS)
    rows: list[BenchRow] = []
    for edges in beside_greed(greedy) if greedy else [[None] * count for count in counts]:
        for policy in policies:
            rows.append(
                measure_virtually(plan, policy, edges, HOST_FACTOR)
                if virtual
                else measure(plan, policy, edges)
            )
            click.echo(line_of(rows[-1]))
    if greedy:
        alone, beside = (row.first_rounds_per_s for row in rows)
        lost = 1 - beside / alone if alone else 0.0
        click.echo(
            f"a device with one session: {alone:.2f} rounds/s alone, {beside:.2f} beside one with {greedy}: "
            f"{lost:.0%} lost"
        )
    if any(row.machine_bound for row in rows):
        click.echo("* this machine, not the engine, was the limit: a process stood in line for a processor")
    facts = {
        "profile": profile,
        "engine": engine,
        "rtt_ms": rtt_ms,
        "features": features,
        "seconds": seconds,
        "clock": clock,
    }
    write_json(json_file, {**facts, "rows": [row.as_dict() for row in rows]})
    if png_file is not None:
        from starsd_server.emulate.plot import draw

        draw(rows, f"targets as {profile} (emulated), engine {engine}, {rtt_ms:g} ms round trip", png_file)


def beside_greed(sessions: int) -> list[list[str | None]]:
    """A device with one session, alone and beside one that has many."""
    return [["modest"], ["modest", *["greedy"] * sessions]]


def show_soak(plan: BenchPlan, targets: int, rounds: int, json_file: Path | None) -> None:
    click.echo("rounds   worker MiB  gateway MiB")
    readings = soak(
        plan,
        Policy.BATCHED.value,
        [None] * targets,
        rounds,
        lambda r: click.echo(f"{r.rounds:>6}  {r.worker_mib:>10.1f}  {r.gateway_mib:>10.1f}"),
    )
    grown = growth_mib(readings)
    click.echo(f"grew by {grown:+.1f} MiB from the second reading on")
    facts = {"targets": targets, "engine": plan.config.engine, "growth_mib": grown}
    write_json(json_file, {**facts, "readings": [asdict(r) for r in readings]})
    if grown > MAX_GROWTH_MIB:
        click.echo(f"memory grows: more than {MAX_GROWTH_MIB:.0f} MiB in {rounds} rounds", err=True)
        sys.exit(1)


def profile_round(plan: BenchPlan, targets: int, rounds: int, json_file: Path | None) -> None:
    from starsd_server.emulate.round_profile import profile_rounds

    if plan.config.engine != REAL_ENGINE:
        raise click.UsageError("--profile-round looks at the real engine: leave --engine out")
    found = profile_rounds(plan, targets, rounds)
    click.echo(f"processor time of a round, {targets} targets, {found.rounds} rounds, real engine")
    for line in found.lines():
        click.echo(line)
    write_json(json_file, {"targets": targets, **asdict(found)})


def parse_counts(text: str) -> list[int]:
    try:
        counts = [int(part) for part in text.split(",")]
    except ValueError:
        counts = []
    if not counts or min(counts) < 1:
        raise click.UsageError(f"--targets {text}: numbers from 1 up, separated by commas")
    return counts


def line_of(row: BenchRow) -> str:
    """One line below COLUMNS."""
    cells = [
        f"{row.scheduler:<10} {row.engine:<9} {row.targets:>7}",
        f"{row.system_tokens_per_s:>8.1f}",
        f"{row.per_target_tokens_per_s:>10.2f}",
        f"{row.acceptance_length:>4.2f}",
        f"{row.engine_busy_fraction:>4.2f}/{row.busy_while_waited_for:<10.3f}",
        f"{row.idle_ms_per_round:>7.2f}",
        f"{row.batch_rows_mean:>4.0f}",
        f"{row.queue_ms_p50:>5.1f}/{row.queue_ms_p99:<7.1f}",
        f"{row.draft_ms_p50:>5.1f}/{row.draft_ms_p99:<7.1f}",
        f"{row.fairness_jain:.3f}",
        f"{row.machine_wait_fraction:>5.0%} {'*' if row.machine_bound else ''}",
    ]
    return "  ".join(cells)


def progress(text: str) -> None:
    click.echo(text, err=True)
