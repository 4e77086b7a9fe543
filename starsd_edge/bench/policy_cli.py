"""`starsd bench policy`: run the matrix, print what it says, write it as JSON or as a heat map."""

from __future__ import annotations

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
    calibration_error,
    overall,
    recorded,
    run,
    simulated,
)
from starsd_edge.bench.report import json_option, write_json
from starsd_edge.bench.result_files import picture_option, save_picture
from starsd_edge.decoding.costs import profile_names

__all__ = ["command"]

NEVER_SLOWER = 0.98
NEAR_THE_BEST = 0.95


@click.command(name="policy")
@click.option("--quick", is_flag=True, help="A fixed random tenth of the matrix.")
@click.option(
    "--traces",
    "source",
    type=click.Choice(["recorded", "simulated"]),
    default="recorded",
    show_default=True,
    help="Answers and trees of the embedded model and its head, or of a model of a large model's.",
)
@json_option
@picture_option("--heatmap", "heatmap", "Draw the matrix there (.png or .svg).")
def command(quick: bool, source: str, json_file: Path | None, heatmap: Path | None) -> None:
    """Run the adaptive policy against plain decoding and every fixed tree size.

    Everything happens in virtual time, with the real decode loop: device profiles x round trips x losses x
    loads of the service x easy and hard prompts.
    """
    console = Console()
    prompts = recorded() if source == "recorded" else simulated()
    measured: list[Cell] = []
    with console.status("measuring") as status:
        for cell in run(prompts, quick):
            measured.append(cell)
            status.update(f"measured {len(measured)} cells")
    console.print(by_profile(measured))
    for line in verdict(measured):
        console.print(line)
    write_json(json_file, as_json(measured, source))
    if heatmap is not None:
        draw(measured, heatmap)


def by_profile(measured: list[Cell]) -> Table:
    """Speed over plain decoding by profile and round trip; the mean over the other conditions."""
    table = Table(title="speed over plain decoding (mean over loss, load and prompts; service alive)")
    table.add_column("profile")
    for rtt in RTTS_MS:
        table.add_column(f"{rtt:g} ms", justify="right")
    for profile in profile_names():
        row = [profile]
        for rtt in RTTS_MS:
            ratios = [
                cell.ratio_to_plain
                for cell in measured
                if (cell.profile, cell.conditions.rtt_ms) == (profile, rtt)
                and cell.conditions.load_pct is not None
            ]
            row.append(f"{sum(ratios) / len(ratios):.2f}" if ratios else "")
        table.add_row(*row)
    return table


def verdict(measured: list[Cell]) -> list[str]:
    slowest = min(measured, key=lambda cell: cell.ratio_to_plain)
    farthest = min(measured, key=lambda cell: cell.ratio_to_best_fixed)
    ways = overall(measured)
    best_fixed = max((way for way in ways if way != "adaptive"), key=lambda way: ways[way])
    slower = sum(cell.ratio_to_plain < NEVER_SLOWER for cell in measured)
    far = sum(cell.ratio_to_best_fixed < NEAR_THE_BEST for cell in measured)
    return [
        f"{len(measured)} cells; below {NEVER_SLOWER} of plain: {slower}; "
        f"below {NEAR_THE_BEST} of the cell's best fixed size (plain included): {far}",
        f"slowest over plain: {slowest.ratio_to_plain:.3f} ({slowest.profile}, {slowest.conditions})",
        f"farthest from the best fixed: {farthest.ratio_to_best_fixed:.3f} "
        f"({farthest.profile}, {farthest.conditions})",
        f"geometric mean over plain: adaptive {ways['adaptive']:.3f}, best single fixed size {best_fixed}: "
        f"{ways[best_fixed]:.3f}",
        "calibration error by depth: " + ", ".join(f"{error:.3f}" for error in calibration_error(measured)),
    ]


def as_json(measured: list[Cell], source: str) -> dict[str, object]:
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
        "overall_ratio_to_plain": overall(measured),
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
