"""`starsd bench paper`: the StarSD paper's claims as experiments."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import click

from starsd_edge.bench.report import json_option, write_json
from starsd_edge.bench.result_files import picture_option, save_picture
from starsd_edge.cli.drafts import software
from starsd_edge.cli.runtime import EMBEDDED, ModelChoice
from starsd_edge.decoding.costs import load_profile
from starsd_edge.ranges import FiniteRange
from starsd_server.capacity.paper import Paper, Point, reproduce
from starsd_server.capacity.recorded import work_of
from starsd_server.cli_serve import head_sources
from starsd_server.config import ServiceConfig
from starsd_server.emulate.bench import BenchPlan
from starsd_server.emulate.cli import parse_counts
from starsd_server.emulate.devices import FleetPlan
from starsd_server.emulate.engines import load_engine_profile
from starsd_server.emulate.record import open_trace, recorded_trees
from starsd_server.emulate.trace import RecordedTrees
from starsd_server.heads.checkpoint import read_manifest
from starsd_server.scheduling import Limits

__all__ = ["command", "draw", "lines_of"]

WAIT_S = 0.01  # what a device is taken to wait for a tree, when its size is chosen by cost
MAX_NODES = 60
ANSWER_TOKENS = 128


@click.command("paper")
@click.option(
    "--targets", default="1,2,4,8,16,32,64", show_default=True, help="Numbers of devices, by commas."
)
@click.option("--profile", default="agx-orin-int4", show_default=True, help="The devices' timing.")
@click.option("--engine", default="rtx-4090", show_default=True, help="The draft host's profile.")
@click.option("--rtt-ms", default=2.0, show_default=True, type=FiniteRange(0))
@click.option("--seconds", default=6.0, show_default=True, type=FiniteRange(0.5), help="Virtual, a point.")
@click.option(
    "--host-factor",
    default=1.0,
    show_default=True,
    type=FiniteRange(0),
    help="The host's processor time; 0: none.",
)
@json_option
@picture_option("--png", "png_file", "Draw them there.")
def command(
    targets: str,
    profile: str,
    engine: str,
    rtt_ms: float,
    seconds: float,
    host_factor: float,
    json_file: Path | None,
    png_file: Path | None,
) -> None:
    """The StarSD paper's claims, its serial service beside the batched one, in virtual time.

    Tokens, acceptance, scheduler, sessions and messages are real; devices and the draft host take the time
    that their profiles say.
    """
    logging.basicConfig(level=logging.WARNING)
    counts = sorted(parse_counts(targets))
    device, source = load_profile(profile), head_sources((), ())[0]
    trace, folder = open_trace(ModelChoice(EMBEDDED), Path(source.folder), ANSWER_TOKENS, say)
    file = recorded_trees(trace, folder, Path(source.folder), None, device, MAX_NODES, WAIT_S, say)
    config = ServiceConfig(
        heads=(source,),
        bind="",
        folder="",
        software=software(),
        limits=Limits(max_sessions=max(counts), device_rows_per_s=1e6, rows_per_s=1e9),
        max_nodes=MAX_NODES,
        engine=engine,
        trees=str(file),
        log_level="warning",
    )
    identity = read_manifest(Path(source.folder)).identity
    fleet = FleetPlan(identity, trace, device, MAX_NODES, WAIT_S, rtt_ms / 1e3)
    plan = BenchPlan(config, fleet, warm_up_s=2.0, seconds=seconds)
    work = work_of(trace, RecordedTrees.load(file))
    paper = reproduce(plan, device, load_engine_profile(engine), work, counts, host_factor, say)
    for line in lines_of(paper):
        click.echo(line)
    facts = {
        "profile": profile,
        "engine": engine,
        "rtt_ms": rtt_ms,
        "seconds": seconds,
        "host_factor": host_factor,
    }
    write_json(json_file, {**facts, **paper.as_dict()})
    if png_file is not None:
        draw(paper, f"devices as {profile}, draft host as {engine}, {rtt_ms:g} ms (emulated)", png_file)


def lines_of(paper: Paper) -> list[str]:
    """A table of the points, and what becomes of the claims."""
    lines = ["scheduler  devices  tokens/s  model  formula  each   busy  idle ms  round ms  draft p50/p99 ms"]
    for point in paper.points:
        row = point.row
        formula = f"{point.paper_tokens_per_s:>7.0f}" if point.paper_tokens_per_s else "       "
        lines.append(
            f"{row.scheduler:<10} {row.targets:>7} {row.system_tokens_per_s:>9.0f} "
            f"{point.model_tokens_per_s:>6.0f}  {formula} {row.per_target_tokens_per_s:>5.1f} "
            f"{row.engine_busy_fraction:>6.2f} {row.idle_ms_per_round:>8.2f} {point.per_round_ms:>9.1f}  "
            f"{row.queue_ms_p50 + row.draft_ms_p50:>7.1f}/{row.queue_ms_p99 + row.draft_ms_p99:.1f}"
        )
    for claim in paper.claims:
        lines.append(f"{'holds' if claim.holds else 'DOES NOT HOLD'}: {claim.claim} ({claim.found})")
    return lines


def draw(paper: Paper, title: str, file: Path) -> None:
    """Throughput, per-device speed, idle time and round time against N. Raises UsageError."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, 2, figsize=(11, 8), layout="constrained")
    panels: dict[str, Callable[[Point], float]] = {
        "tokens/s of all devices": lambda point: point.row.system_tokens_per_s,
        "tokens/s of one device": lambda point: point.row.per_target_tokens_per_s,
        "engine idle, ms a round": lambda point: point.row.idle_ms_per_round,
        "draft and queue, ms (p50; bar to p99)": lambda point: (
            point.row.queue_ms_p50 + point.row.draft_ms_p50
        ),
    }
    for axis, (label, of) in zip(axes.flat, panels.items(), strict=True):
        for scheduler, marker in (("serial", "s--"), ("batched", "o-")):
            points = [point for point in paper.points if point.row.scheduler == scheduler]
            counts = [point.row.targets for point in points]
            axis.plot(counts, [of(point) for point in points], marker, label=f"{scheduler}, measured")
            if label.startswith("tokens/s of all"):
                axis.plot(
                    counts, [point.model_tokens_per_s for point in points], ":", label=f"{scheduler}, model"
                )
            if label.startswith("draft"):
                tops = [point.row.queue_ms_p99 + point.row.draft_ms_p99 for point in points]
                axis.vlines(counts, [of(point) for point in points], tops, alpha=0.4)
        axis.axvline(paper.full, color="grey", linewidth=0.8)
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.set_xlabel("devices (grey: N_full of the serial service)")
        axis.set_ylabel(label)
        axis.grid(visible=True, alpha=0.3)
        axis.legend(fontsize=8)
    figure.suptitle(title, fontsize=10)
    save_picture(figure, file, 110)
    pyplot.close(figure)


def say(text: str) -> None:
    click.echo(text, err=True)
