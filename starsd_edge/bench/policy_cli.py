"""`starsd bench policy`: run the matrix, print what it says, write it as JSON, as CSV or as a heat map."""

from __future__ import annotations

import sys
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from starsd_edge.bench.policy import (
    LOADS_PCT,
    LOSSES_PCT,
    PROMPTS,
    RTTS_MS,
    Cell,
    recorded,
    run,
    simulated,
)
from starsd_edge.bench.policy_table import table_of
from starsd_edge.bench.policy_verdict import Verdict
from starsd_edge.bench.report import json_option, write_json
from starsd_edge.bench.result_files import picture_option, result_option, save_picture, write_result
from starsd_edge.decoding.costs import profile_names

__all__ = ["command"]


@click.command(name="policy")
@click.option("--quick", is_flag=True, help="A fixed random tenth of the matrix.")
@click.option(
    "--traces",
    "source",
    type=click.Choice(["recorded", "simulated"]),
    default="recorded",
    show_default=True,
    help="Answers and trees of the embedded model and its head, or simulated ones as a large model's head "
    "would draft them.",
)
@json_option
@result_option("--csv", "csv_file", "Write the cells there, a line each.")
@picture_option("--heatmap", "heatmap", "Draw the matrix there (.png or .svg).")
def command(
    quick: bool, source: str, json_file: Path | None, csv_file: Path | None, heatmap: Path | None
) -> None:
    """Run the adaptive policy against plain decoding and every fixed tree size.

    Everything happens in virtual time, with the real decode loop: device profiles x round trips x losses x
    loads of the service x easy and hard prompts. Exits with 1 where the policy misses a goal: never below
    0.98 of plain decoding nor 0.95 of a cell's best fixed size, and above every single fixed size overall.
    """
    console = Console()
    prompts = recorded() if source == "recorded" else simulated()
    measured: list[Cell] = []
    with console.status("measuring") as status:
        for cell in run(prompts, quick):
            measured.append(cell)
            status.update(f"measured {len(measured)} cells")
    console.print(by_profile(measured))
    write_json(json_file, as_json(measured, source))
    if csv_file is not None:
        write_result(csv_file, table_of(measured))
    if heatmap is not None:
        draw(measured, heatmap)
    judge(Verdict(measured))


def judge(verdict: Verdict) -> None:
    """Say what the cells say. Raises SystemExit where a goal is missed."""
    for line in verdict.lines():
        click.echo(line)
    for goal in verdict.missed():
        click.echo(f"missed: {goal}", err=True)
    if verdict.missed():
        sys.exit(1)


def by_profile(measured: list[Cell]) -> Table:
    """Speed over plain decoding by profile and round trip; the mean over the other conditions."""
    table = Table(title="speed over plain decoding (mean over loss, load and prompts; service alive)")
    table.add_column("profile")
    for rtt in RTTS_MS:
        table.add_column(f"{rtt:g} ms", justify="right")
    for profile in profile_names():
        speeds = Verdict(measured).by_round_trip(profile)
        table.add_row(profile, *(f"{speeds[rtt]:.2f}" if rtt in speeds else "" for rtt in RTTS_MS))
    return table


def as_json(measured: list[Cell], source: str) -> dict[str, object]:
    verdict = Verdict(measured)
    return {
        "traces": source,
        "cells": [
            {
                "profile": cell.profile,
                "rtt_ms": cell.conditions.rtt_ms,
                "loss": cell.conditions.loss_pct / 100,
                "load": "dead" if cell.conditions.load_pct is None else cell.conditions.load_pct / 100,
                "prompts": cell.prompts,
                "tokens_per_s": cell.adaptive,
                "ratio_to_plain": cell.ratio_to_plain,
                "ratio_to_best_fixed": cell.ratio_to_best_fixed,
                "plain_share": cell.plain_share,
                "calibration_error": list(cell.calibration_error),
                "fixed_ratio_to_plain": {str(n): speed / cell.plain for n, speed in cell.fixed.items()},
            }
            for cell in measured
        ],
        "overall_ratio_to_plain": {
            **{str(size): ratio for size, ratio in verdict.overall_fixed.items()},
            "adaptive": verdict.overall,
        },
        "missed": verdict.missed(),
    }


def draw(measured: list[Cell], path: Path) -> None:
    """Profiles and prompts down, conditions across; colour is speed over plain."""
    import matplotlib.pyplot as plt

    rows = [(profile, prompts) for profile in profile_names() for prompts in PROMPTS]
    columns = [(load, rtt, loss) for load in LOADS_PCT for rtt in RTTS_MS for loss in LOSSES_PCT]
    values = [[float("nan")] * len(columns) for _ in rows]
    for cell in measured:
        conditions = cell.conditions
        column = columns.index((conditions.load_pct, conditions.rtt_ms, conditions.loss_pct))
        values[rows.index((cell.profile, cell.prompts))][column] = cell.ratio_to_plain
    figure, axes = plt.subplots(figsize=(14, 5), layout="constrained")
    image = axes.imshow(values, aspect="auto", cmap="viridis", vmin=1.0)
    axes.set_yticks(range(len(rows)), [f"{profile}, {prompts}" for profile, prompts in rows])
    labels = [f"{_load_name(load)}, {rtt:g} ms, {loss:g} %" for load, rtt, loss in columns]
    axes.set_xticks(range(len(columns)), labels, rotation=90, fontsize=7)
    axes.set_title("speed over plain decoding, by load of the service, round trip and loss")
    figure.colorbar(image)
    save_picture(figure, path, 120)
    plt.close(figure)


def _load_name(load_pct: int | None) -> str:
    return "dead" if load_pct is None else f"load {load_pct} %"
