"""`starsd bench link`."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import click

from starsd_edge.bench.link import bench_link
from starsd_edge.bench.report import json_option, write_json


@click.command("link")
@click.option("--rounds", default=1000, show_default=True, type=click.IntRange(25), help="Of each kind.")
@json_option
def command(rounds: int, json_file: Path | None) -> None:
    """What the link costs: messages, and a round trip against a bare encrypted echo, over loopback."""
    result = bench_link(rounds)
    click.echo(f"draft of 60 nodes      {result.draft_bytes} bytes, {result.draft_codec_us:.1f} us of CPU")
    click.echo(f"update of 5 rows       {result.update_codec_us:.1f} us of CPU, features included")
    click.echo(f"bare CURVE echo        {result.echo_us:.0f} us (32 KiB up, a tree down; the best tenth)")
    for label, value in (
        ("with messages", result.messages_us),
        ("with both sessions", result.protocol_us),
        ("through RemoteDrafter", result.drafter_us),
    ):
        click.echo(f"{label:<22} {value:.0f} us, {value / result.echo_us:.2f} times the echo")
    write_json(json_file, dataclasses.asdict(result))
