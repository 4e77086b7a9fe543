"""`starsd capacity`: what a draft host carries, and what would change it."""

from __future__ import annotations

import json

import click
from click.core import ParameterSource

from starsd_edge.decoding.costs import CostCurve, profile_names
from starsd_edge.errors import UsageError
from starsd_edge.ranges import FiniteRange
from starsd_server.capacity.groups import parse_groups
from starsd_server.capacity.model import DraftWork, StepSeconds
from starsd_server.capacity.scenario import Report, Scenario, changed, examine
from starsd_server.emulate.engines import EngineProfile, load_engine_profile
from starsd_server.scheduling import Limits, Policy

__all__ = ["command"]

GIB = 2**30


@click.command("capacity")
@click.option(
    "--device",
    "devices",
    multiple=True,
    metavar="PROFILE=COUNT[,rtt_ms=N][,tokens=N]",
    help=f"Several may be given. Profiles: {', '.join(profile_names())}; or a file of `bench target --json`."
    "  [default: agx-orin-int4=8]",
)
@click.option("--engine", default="rtx-4090", show_default=True, help="The draft host's profile.")
@click.option("--step-ms", metavar="ROWS:MS,...", help="Measured instead: a step over so many rows.")
@click.option("--rtt-ms", default=2.0, show_default=True, type=FiniteRange(0), help="Of the links.")
@click.option("--tokens", default=3.0, show_default=True, type=FiniteRange(1), help="A round brings.")
@click.option("--nodes", default=16.0, show_default=True, type=FiniteRange(1), help="Of a tree.")
@click.option("--steps", default=6.0, show_default=True, type=FiniteRange(1), help="Head steps a tree.")
@click.option("--rows", default=45.0, show_default=True, type=FiniteRange(1), help="Head rows a tree.")
@click.option("--context", default=512.0, show_default=True, type=FiniteRange(0), help="Tokens, mean.")
@click.option(
    "--row-bytes",
    default=8196.0,
    show_default=True,
    type=FiniteRange(0),
    help="A token's features on the uplink.",
)
@click.option("--kv-gib", default=8.0, show_default=True, type=FiniteRange(0.001), help="For sessions.")
@click.option("--max-len", default=2048, show_default=True, type=click.IntRange(1), help="Tokens a session.")
@click.option("--uplink-mbps", type=FiniteRange(0.001), help="Into the host; no limit without it.")
@click.option(
    "--host-ms",
    default=0.3,
    show_default=True,
    type=FiniteRange(0),
    help="Processor time of a round besides its steps.",
)
@click.option("--hosts", default=1, show_default=True, type=click.IntRange(1), help="Draft hosts.")
@click.option(
    "--scheduler", type=click.Choice([p.value for p in Policy]), default="batched", show_default=True
)
@click.option(
    "--what-if", "changes", multiple=True, metavar="NAME=NUMBER", help="devices=+10, rtt_ms=50, hosts=2 ..."
)
@click.option("--json", "as_json", is_flag=True, help="Print the reports as JSON.")
def command(
    devices: tuple[str, ...],
    engine: str,
    step_ms: str | None,
    rtt_ms: float,
    tokens: float,
    nodes: float,
    steps: float,
    rows: float,
    context: float,
    row_bytes: float,
    kv_gib: float,
    max_len: int,
    uplink_mbps: float | None,
    host_ms: float,
    hosts: int,
    scheduler: str,
    changes: tuple[str, ...],
    as_json: bool,
) -> None:
    """How many devices a draft host carries, what each gets, and what is in the way of more.

    A model, not a measurement: docs/capacity.md says how it is made and how near it comes. `starsd bench
    service` measures the same.
    """
    profile = load_engine_profile(engine)
    scenario = Scenario(
        devices=parse_groups(devices or ("agx-orin-int4=8",)),
        work=DraftWork(tokens, nodes, steps, rows, context, tokens * row_bytes),
        step_s=measured_steps(step_ms, profile) if step_ms else profile_steps(profile),
        rtt_ms=rtt_ms,
        hosts=hosts,
        slots=max(1.0, kv_gib * GIB // (max_len * profile.kv_row_bytes)),
        uplink_mbps=uplink_mbps,
        host_ms=host_ms,
        policy=Policy(scheduler),
    )
    first = "as given" if _was_given(click.get_current_context()) else "by default"
    named = [(first, scenario), *((change, changed(scenario, change)) for change in changes)]
    reports = [(name, examine(each)) for name, each in named]
    if as_json:
        click.echo(json.dumps([{"case": name, **report.as_dict()} for name, report in reports], indent=2))
        return
    for name, report in reports:
        click.echo("\n".join(lines_of(name, report)))
    click.echo(models_line(scenario))


def _was_given(context: click.Context) -> bool:
    """Whether the user described anything: how it is printed and what it is compared with are not that."""
    about = set(context.params) - {"changes", "as_json"}
    return any(context.get_parameter_source(name) is not ParameterSource.DEFAULT for name in about)


def lines_of(name: str, report: Report) -> list[str]:
    scenario, fleet = report.scenario, report.fleet
    total = sum(group.count for group in scenario.devices)
    width = max(len(group.label) for group in scenario.devices)
    hosts = "1 draft host" if scenario.hosts == 1 else f"{scenario.hosts} draft hosts"
    link = f"{scenario.rtt_ms:g} ms round trip"
    lines = [f"{name}: {_count(total)} devices, {hosts}, {link}, {scenario.policy.value}"]
    for group, each in zip(scenario.devices, fleet.served, strict=True):
        lines.append(
            f"  {_count(group.count):>5} x {each.name:<{width}} {each.tokens_per_s:7.1f} tokens/s each, "
            f"{each.ratio_to_plain:.2f} x plain; a tree takes {each.draft_s * 1e3:.1f} ms"
        )
    if any(round(each.ratio_to_plain, 2) < 1 for each in fleet.served):
        lines.append(
            "  where it is below 1.00 x, a device decodes plainly and is no slower than alone; "
            "that is not in this model"
        )
    used = ", ".join(f"{each.name} {each.used:.0%}" for each in fleet.resources if each.used > 0)
    lines.append(f"  together {report.tokens_per_s:.0f} tokens/s; {used}")
    lines.append(
        f"  carries {report.carries} such devices before each slows down by a tenth, "
        f"{report.gains_up_to} before one is slower than plain; first in the way: {fleet.bottleneck.name}"
    )
    return lines


def models_line(scenario: Scenario) -> str:
    """Which model each profile was measured with."""
    models = {group.name: group.model for group in scenario.devices}
    apart = "; tokens/s of different models do not compare" if len(set(models.values())) > 1 else ""
    return f"models: {', '.join(f'{name} {model}' for name, model in models.items())}{apart}"


def _count(devices: float) -> str:
    """Scaled classes hold parts of devices."""
    return f"{round(devices, 1):.12g}"


def profile_steps(profile: EngineProfile) -> StepSeconds:
    return lambda rows, kv_rows: profile.step_s(round(rows), round(kv_rows))


def measured_steps(text: str, profile: EngineProfile) -> StepSeconds:
    """Seconds of a step from "ROWS:MS,...", growing on as the last two say; KV reading is the profile's.

    Raises UsageError for what is no such table.
    """
    try:
        pairs = sorted((int(rows), float(ms) / 1e3) for rows, ms in (p.split(":") for p in text.split(",")))
        curve = CostCurve(tuple(rows for rows, _ in pairs), tuple(seconds for _, seconds in pairs))
    except ValueError as error:
        raise UsageError(f"--step-ms {text}: ROWS:MS,... is wanted, from 1 row up ({error})") from None
    largest = Limits().step_rows

    def step_s(rows: float, kv_rows: float) -> float:
        return curve(max(1, min(round(rows), largest))) + kv_rows * profile.kv_row_bytes / profile.bytes_per_s

    return step_s
