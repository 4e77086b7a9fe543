"""`starsd bench ahead`: bounds on what drafting ahead could bring."""

from __future__ import annotations

from pathlib import Path

import click

from starsd_edge.bench.ahead import OUTCOMES, Ahead, Timing, hit_rates
from starsd_edge.bench.policy import PROMPTS, recorded
from starsd_edge.bench.report import json_option, write_json
from starsd_edge.decoding.costs import load_profile
from starsd_edge.ranges import FiniteRange

__all__ = ["command"]

SIZES = (2, 4, 8, 16, 32)


@click.command(name="ahead")
@click.option("--profile", default="agx-orin-int4", show_default=True, help="The device's timing.")
@click.option("--rtt-ms", default=10.0, show_default=True, type=FiniteRange(0))
@click.option("--step-ms", default=2.0, show_default=True, type=FiniteRange(0), help="Of the head.")
@json_option
def command(profile: str, rtt_ms: float, step_ms: float, json_file: Path | None) -> None:
    """How often a round ends as the draft service could have guessed, and what that would be worth at best.

    On the recorded answers, one device, nothing else to draft. Gains are over the best size without drafting
    ahead, or over plain decoding where that is better. `rest`: going on with the same tree, not drafting
    for each outcome; the bound, and with the tokens that it really brings.
    """
    timing = Timing(load_profile(profile).curve, rtt_ms / 1e3, step_ms / 1e3)
    traces = recorded()
    click.echo(f"{profile}, {rtt_ms:g} ms round trip, {step_ms:g} ms a step: hits, and gains at best")
    click.echo(
        "prompts nodes tokens "
        + "".join(f"{f'{count} ahead':>12}" for count in OUTCOMES)
        + "   rest: hits bound  real"
    )
    figures: list[dict[str, object]] = []
    for name in PROMPTS:
        rows = [hit_rates(traces[name], nodes) for nodes in SIZES]
        without = max(1.0 / timing.curve.plain_s, *map(timing.tokens_per_s, rows))
        for row in rows:
            gains = [timing.tokens_per_s(row, hit) / without for hit in row.hits]
            bound = timing.tokens_per_s(row, row.rest.hit) / without
            real = timing.tokens_per_s_with_rest(row) / without
            click.echo(line(name, row, gains) + f"{row.rest.hit:>13.0%} x{bound:.2f} x{real:.2f}")
            figures.append(
                {"prompts": name, **row.as_dict(), "gains": gains, "rest_bound": bound, "rest_gain": real}
            )
    write_json(json_file, {"profile": profile, "rtt_ms": rtt_ms, "outcomes": OUTCOMES, "rows": figures})


def line(name: str, row: Ahead, gains: list[float]) -> str:
    cells = "".join(f"{hit:>6.0%} x{gain:.2f}" for hit, gain in zip(row.hits, gains, strict=True))
    return f"{name:<7} {row.nodes:>5} {row.tokens:>6.2f} {cells}"
