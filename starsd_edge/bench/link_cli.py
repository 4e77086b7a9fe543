"""`starsd bench link`."""

from __future__ import annotations

import dataclasses
import json

import click

from starsd_edge.bench.link import bench_link


@click.command("link")
@click.option("--rounds", default=1000, show_default=True, type=click.IntRange(25), help="Of each kind.")
@click.option("--json", "as_json", is_flag=True, help="For a script.")
def command(rounds: int, *, as_json: bool) -> None:
    """What the link costs: messages, and a round trip against a bare encrypted echo, over loopback."""
    result = bench_link(rounds)
    if as_json:
        click.echo(json.dumps(dataclasses.asdict(result)))
        return
    click.echo(f"draft of 60 nodes      {result.draft_bytes} bytes, {result.draft_codec_us:.1f} us of CPU")
    click.echo(f"update of 5 rows       {result.update_codec_us:.1f} us of CPU, features included")
    click.echo(f"bare CURVE echo        {result.echo_us:.0f} us (32 KiB up, a tree down; the best tenth)")
    for label, value in (
        ("with messages", result.messages_us),
        ("with both sessions", result.protocol_us),
        ("through RemoteDrafter", result.drafter_us),
    ):
        click.echo(f"{label:<22} {value:.0f} us, {value / result.echo_us:.2f} times the echo")
