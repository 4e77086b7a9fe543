"""`starsd bench ahead`: what drafting ahead brings."""

from __future__ import annotations

from pathlib import Path

import click

from starsd_edge.bench.ahead import compare, mean_gain
from starsd_edge.bench.policy import halves, simulated
from starsd_edge.bench.report import json_option, write_json
from starsd_edge.decoding.costs import load_profile, profile_names
from starsd_edge.ranges import FiniteRange
from starsd_server.cli_serve import head_sources
from starsd_server.emulate.ahead import recorded_ahead
from starsd_server.emulate.cli import progress

__all__ = ["command"]

TRACES = ("recorded", "simulated")


@click.command(name="ahead")
@click.option("--traces", type=click.Choice(TRACES), default=TRACES[0], show_default=True)
@click.option("--head", type=click.Path(path_type=Path), help="Draft head; the embedded model's without it.")
@click.option("--target", type=click.Path(path_type=Path), help="The head's target, needed once.")
@click.option(
    "--profile", "profiles", multiple=True, help="A device's timing; all but laptop-cpu without it."
)
@click.option("--rtt-ms", "rtts_ms", multiple=True, default=[10.0], show_default=True, type=FiniteRange(0))
@json_option
def command(
    traces: str,
    head: Path | None,
    target: Path | None,
    profiles: tuple[str, ...],
    rtts_ms: tuple[float, ...],
    json_file: Path | None,
) -> None:
    """Decode with and without what is drafted ahead, in virtual time: one device, an idle service.

    recorded: the embedded model's answers, and what its head really drafts ahead at every token (recorded
    once, which takes minutes). simulated: a calibrated head with the acceptance of a large model's.
    """
    if traces == "simulated":
        prompts = simulated(ahead=True)
    else:
        (source,) = head_sources((head,) if head else (), (target,) if target else ())
        trained_on = Path(source.target) if source.target else None
        prompts = halves(recorded_ahead(Path(source.folder), trained_on, progress))
    names = profiles or tuple(name for name in profile_names() if name != "laptop-cpu")
    click.echo(f"{traces} traces; speeds over plain decoding, and gains of drafting ahead")
    click.echo(f"{'profile':<16} {'rtt':>6}  prompts  without  ahead   hits  rounds/s  tokens/s")
    found = []
    for row in compare([load_profile(name) for name in names], rtts_ms, prompts):
        found.append(row)
        without, ahead = (way.tokens_per_s / row.plain_tokens_per_s for way in (row.without, row.ahead))
        click.echo(
            f"{row.profile:<16} {row.rtt_ms:>3g} ms  {row.prompts:<7}  {without:>7.2f}  {ahead:>5.2f}  "
            f"{row.ahead.ahead_share:>5.0%}  {row.rounds_gain:>7.2f}x  {row.tokens_gain:>7.2f}x"
        )
    rounds, tokens = (
        mean_gain(gains) for gains in ([row.rounds_gain for row in found], [row.tokens_gain for row in found])
    )
    click.echo(f"geometric mean: rounds/s x{rounds:.3f}, tokens/s x{tokens:.3f}")
    rows = [row.as_dict() for row in found]
    write_json(json_file, {"traces": traces, "rounds_gain": rounds, "tokens_gain": tokens, "rows": rows})
