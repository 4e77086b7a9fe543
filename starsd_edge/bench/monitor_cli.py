"""`starsd bench monitor`."""

from __future__ import annotations

import dataclasses
import json

import click

from starsd_edge.bench.monitor import bench_monitor


@click.command("monitor")
@click.option(
    "--devices", default=50, show_default=True, type=click.IntRange(1, 1000), help="A session each."
)
@click.option("--columns", default=160, show_default=True, type=click.IntRange(20, 500))
@click.option("--lines", default=60, show_default=True, type=click.IntRange(5, 200))
@click.option("--seconds", default=20.0, show_default=True, type=click.FloatRange(1.0, 600.0))
@click.option("--json", "as_json", is_flag=True, help="For a script.")
def command(devices: int, columns: int, lines: int, seconds: float, *, as_json: bool) -> None:
    """What watching costs: CPU time of `starsd monitor` with many devices at two snapshots a second."""
    cost = bench_monitor(devices, columns, lines, seconds)
    if as_json:
        click.echo(json.dumps(dataclasses.asdict(cost)))
        return
    click.echo(f"{cost.devices} devices on a terminal of {cost.columns}x{cost.lines}, {cost.seconds:.0f} s")
    click.echo(f"monitor   {cost.cpu_share:.2%} of a core")
    click.echo(f"terminal  {cost.terminal_bytes_per_s / 1e3:.1f} kB/s")
    click.echo(f"link      {cost.link_bytes_per_s / 1e3:.1f} kB/s")
    click.echo(f"service   {cost.publish_ms:.2f} ms of CPU time a snapshot")
