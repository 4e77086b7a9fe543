"""`starsd bench ahead`: a bound on what drafting ahead could bring."""

from __future__ import annotations

from pathlib import Path

import click

from starsd_edge.bench.ahead import OUTCOMES, gain, hit_rates
from starsd_edge.bench.policy import PROMPTS, recorded
from starsd_edge.bench.report import json_option, write_json
from starsd_edge.decoding.costs import load_profile

__all__ = ["command"]

SIZES = (4, 8, 16, 32)


@click.command(name="ahead")
@click.option("--profile", default="agx-orin-int4", show_default=True, help="The device's timing.")
@click.option("--rtt-ms", default=10.0, show_default=True, type=click.FloatRange(0))
@click.option("--draft-ms", default=8.0, show_default=True, type=click.FloatRange(0), help="Of a tree.")
@json_option
def command(profile: str, rtt_ms: float, draft_ms: float, json_file: Path | None) -> None:
    """How often a round ends as the draft service could have guessed, and what that would be worth at best.

    On the recorded answers, one device, nothing else to draft.
    """
    curve, traces = load_profile(profile).curve, recorded()
    wait_s = (rtt_ms + draft_ms) / 1e3
    rows = [(name, hit_rates(traces[name], nodes)) for name in PROMPTS for nodes in SIZES]
    click.echo(f"{profile}, {rtt_ms:g} ms round trip, {draft_ms:g} ms a tree: hits and the gain they bound")
    click.echo("prompts  nodes  tokens  " + "".join(f"{f'{count} ahead':>14}" for count in OUTCOMES))
    for name, row in rows:
        cells = "".join(f"{hit:>7.0%} x{gain(curve, row.nodes, wait_s, hit):.2f}" for hit in row.hits)
        click.echo(f"{name:<7} {row.nodes:>6} {row.tokens:>7.2f}   {cells}")
    figures = [
        {"prompts": name, **row.as_dict(), "gains": [gain(curve, row.nodes, wait_s, hit) for hit in row.hits]}
        for name, row in rows
    ]
    write_json(json_file, {"profile": profile, "rtt_ms": rtt_ms, "outcomes": OUTCOMES, "rows": figures})
