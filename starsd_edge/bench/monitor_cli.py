"""`starsd bench monitor`."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import click

from starsd_edge.bench.monitor import bench_monitor
from starsd_edge.bench.report import json_option, write_json
from starsd_edge.ranges import FiniteRange


@click.command("monitor")
@click.option(
    "--devices", default=50, show_default=True, type=click.IntRange(1, 1000), help="A session each."
)
@click.option("--columns", default=160, show_default=True, type=click.IntRange(20, 500))
@click.option("--lines", default=60, show_default=True, type=click.IntRange(5, 200))
@click.option("--seconds", default=20.0, show_default=True, type=FiniteRange(1.0, 600.0))
@json_option
def command(devices: int, columns: int, lines: int, seconds: float, json_file: Path | None) -> None:
    """What watching costs: CPU time of `starsd monitor` with many devices at two snapshots a second."""
    cost = bench_monitor(devices, columns, lines, seconds)
    click.echo(f"{cost.devices} devices on a terminal of {cost.columns}x{cost.lines}, {cost.seconds:.0f} s")
    click.echo(f"monitor   {cost.cpu_share:.2%} of a core")
    click.echo(f"terminal  {cost.terminal_bytes_per_s / 1e3:.1f} kB/s")
    click.echo(f"link      {cost.link_bytes_per_s / 1e3:.1f} kB/s")
    click.echo(f"service   {cost.publish_ms:.2f} ms of CPU time a snapshot")
    write_json(json_file, dataclasses.asdict(cost))
