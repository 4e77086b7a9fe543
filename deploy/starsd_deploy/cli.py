"""`starsd deploy`: the commands, and how their options become values; the work is in the modules it calls."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import msgspec
from rich.console import Console

from starsd_deploy.apply import Outcome, Pace, apply_plan, parse_batch
from starsd_deploy.checks import Level
from starsd_deploy.cli_operate import exec_, keys, logs, rollback, unlock_
from starsd_deploy.cli_options import (
    DEFAULT_FLEET,
    Selection,
    confirm_on_terminal,
    end_with,
    selecting,
    sudo_from,
)
from starsd_deploy.folders import require_folders
from starsd_deploy.inventory import inventory_schema
from starsd_deploy.lease import this_holder
from starsd_deploy.matches import require_matches
from starsd_deploy.plan import Plan, read_plan, write_plan
from starsd_deploy.progress import FleetProgress
from starsd_deploy.show import (
    check_lines,
    outcome_lines,
    plan_lines,
    report_lines,
    status_line,
    status_record,
)
from starsd_deploy.starter import starter_fleet
from starsd_deploy.sudo import SudoPassword
from starsd_deploy.survey import Planned, Workshop, plan_fleet, survey, whole_plan, with_drafts
from starsd_deploy.throttle import parse_rate
from starsd_edge.config import cache_dir
from starsd_edge.errors import ConfigError, DeployError, StarSDError, UsageError
from starsd_edge.ranges import FiniteRange
from starsd_edge.whole_file import save_as, write_whole

__all__ = ["command"]

FLEET_MODE = 0o666  # less what umask takes: an inventory has no secrets
UPLOADS = 5  # the workstation's uplink is one; more uploads at once only share it


@click.group()
def command() -> None:
    """Provision and update a fleet of devices over SSH."""


@command.command(short_help="Write a first inventory for HOSTS.")
@click.argument("hosts", nargs=-1, required=True)
@click.option("--fleet", type=click.Path(path_type=Path), default=DEFAULT_FLEET, show_default=True)
@click.option("--draft", help="Which of the hosts runs the draft service.")
def init(hosts: tuple[str, ...], fleet: Path, draft: str | None) -> None:
    """Write a first inventory for HOSTS, each user@host[:port] or a name of ~/.ssh/config."""
    text = starter_fleet(hosts, draft)
    if os.path.lexists(fleet):
        raise UsageError(f"{fleet} is there already; edit it, or name another with --fleet")
    with _told(fleet):
        write_whole(fleet, text, FLEET_MODE)
    click.echo(f"{fleet} written; set `bundle`, then: starsd deploy doctor")


@command.command(short_help="Print the JSON Schema of a device's table.")
def schema() -> None:
    """Print the JSON Schema of a device's table, for editors."""
    click.echo(json.dumps(inventory_schema(), indent=1))


@command.command(short_help="Look at every device; say what would hinder it.")
@selecting
@click.option("--report", is_flag=True, help="What a bug report needs; no keys, addresses or host names.")
@click.option("--json", "as_json", is_flag=True, help="For scripts.")
def doctor(selection: Selection, report: bool, as_json: bool) -> None:
    """Look at every device and say what would hinder it, with the fix. Changes nothing."""
    found = survey(selection.fleet, selection.devices, selection.login, selection.parallel, time.time)
    if as_json:
        click.echo(
            msgspec.json.format(msgspec.json.encode([_doctor_record(seen) for seen in found.values()]))
        )
    elif report:
        for number, seen in enumerate(found.values(), start=1):
            click.echo(f"device {number}")
            lines = report_lines(seen.device, seen.facts) if seen.facts else ["unreachable"]
            click.echo("\n".join(f"  {line}" for line in lines))
    else:
        click.echo("\n".join(check_lines(found)))
    end_with(tuple(seen.error for seen in found.values()))
    blocked = [name for name, seen in found.items() if any(c.level is Level.BLOCKER for c in seen.checks)]
    if blocked:
        raise DeployError(f"cannot be deployed as they are: {', '.join(blocked)}")


@command.command()
@selecting
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Write the plan for `apply FILE`.")
@click.option("--refresh-wheels", is_flag=True, help="Resolve packages anew instead of taking the last set.")
@click.option("--json", "as_json", is_flag=True, help="For scripts.")
def plan(selection: Selection, output: Path | None, refresh_wheels: bool, as_json: bool) -> None:
    """Show what apply would do. Changes nothing."""
    planned = _make_plan(selection, refresh_wheels)
    whole = whole_plan(selection.fleet, planned)
    if output:
        with _told(output):
            if output.exists() and not output.is_file():  # a pipe takes it as it comes
                output.write_bytes(write_plan(whole))
            else:
                save_as(output, write_plan(whole).decode())
    click.echo(write_plan(whole) if as_json else "\n".join(plan_lines(planned)))
    end_with(tuple(one.error for one in planned))


@command.command(short_help="Bring devices to what the inventory or a plan says.")
@selecting
@click.argument("plan_file", type=click.Path(path_type=Path), required=False)
@click.option(
    "--uploads", type=click.IntRange(1), default=UPLOADS, show_default=True, help="Uploads at once."
)
@click.option("--batch", default="100%", show_default=True, help="Targets at once: a count or a percentage.")
@click.option("--wait", "wait_s", type=FiniteRange(0), default=0.0, help="Seconds between batches.")
@click.option("--limit-rate", default="0", help="Bytes a second of all uploads together: 500k, 10M.")
@click.option("--fail-percent", type=FiniteRange(0, 100), default=0.0, show_default=True)
@click.option("--sudo-password-file", type=click.File(), help="Instead of asking; - is stdin.")
@click.option("--refresh-wheels", is_flag=True, help="Resolve them anew.")
@click.option("-y", "--yes", is_flag=True, help="Do not ask.")
@click.option("--json", "as_json", is_flag=True, help="For scripts.")
def apply(
    selection: Selection,
    plan_file: Path | None,
    uploads: int,
    batch: str,
    wait_s: float,
    limit_rate: str,
    fail_percent: float,
    sudo_password_file: Any,
    refresh_wheels: bool,
    yes: bool,
    as_json: bool,
) -> None:
    """Bring devices to what the inventory says; with PLAN_FILE do exactly what that plan says."""
    errors: tuple[StarSDError | None, ...] = ()
    if plan_file:
        chosen = {device.name for device in selection.devices}
        whole = read_plan(plan_file.read_bytes(), str(plan_file))
        whole = msgspec.structs.replace(whole, devices=tuple(p for p in whole.devices if p.device in chosen))
    else:
        planned = _make_plan(selection, refresh_wheels)
        errors = tuple(one.error for one in planned)
        whole = whole_plan(selection.fleet, planned)
        for line in plan_lines(planned):
            click.echo(line, err=as_json)
    changing = [one for one in whole.devices if one.steps]
    if changing and not yes:
        confirm_on_terminal(f"Change {len(changing)} of {len(whole.devices)} devices?", err=as_json)
    pace = Pace(
        parallel=selection.parallel,
        uploads=uploads,
        batch=parse_batch(batch, len(whole.devices)),
        pause_s=wait_s,
        bytes_per_s=parse_rate(limit_rate),
        fail_percent=fail_percent,
    )
    outcomes = _carry_out(selection, whole, pace, sudo_from(sudo_password_file), "apply", quiet=as_json)
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode([_outcome_record(one) for one in outcomes])))
    else:
        for line in outcome_lines(outcomes):
            click.echo(line)
    end_with((*errors, *(one.error for one in outcomes)), already_shown=not as_json)


def _make_plan(selection: Selection, refresh: bool) -> tuple[Planned, ...]:
    require_folders(Path(selection.fleet.path), selection.devices)
    require_matches(selection.fleet, selection.devices)
    devices = with_drafts(selection.fleet, selection.devices)
    found = survey(selection.fleet, devices, selection.login, selection.parallel, time.time)
    workshop = Workshop(cache_dir(), refresh=refresh, report=lambda line: click.echo(line, err=True))
    return plan_fleet(selection.fleet, selection.devices, found, workshop, selection.login)


def _carry_out(
    selection: Selection, plan: Plan, pace: Pace, sudo: SudoPassword, doing: str, *, quiet: bool
) -> tuple[Outcome, ...]:
    console = Console(stderr=True, quiet=quiet)
    with FleetProgress(console, plan.devices) as progress:
        return apply_plan(selection.fleet, plan, selection.login, pace, this_holder(doing), sudo, progress)


@command.command()
@selecting
@click.option("--json", "as_json", is_flag=True, help="For scripts.")
def status(selection: Selection, as_json: bool) -> None:
    """Which release is live on each device, and whether it runs."""
    found = survey(selection.fleet, selection.devices, selection.login, selection.parallel, time.time)
    records = [status_record(seen.device, seen) for seen in found.values()]
    if as_json:
        click.echo(json.dumps(records, indent=1))
    else:
        for record in records:
            click.echo(status_line(record))
    end_with(tuple(seen.error for seen in found.values()), already_shown=not as_json)


@contextlib.contextmanager
def _told(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be written: {getattr(error, 'strerror', error)}") from None


def _doctor_record(seen: Any) -> dict[str, object]:
    return {
        "device": seen.device.name,
        "error": str(seen.error or ""),
        "facts": seen.facts,
        "checks": seen.checks,
    }


def _outcome_record(outcome: Outcome) -> dict[str, object]:
    return {
        "device": outcome.device,
        "ending": outcome.ending.value,
        "sent_bytes": outcome.sent_bytes,
        "error": str(outcome.error or ""),
    }


for operating in (rollback, logs, exec_, unlock_, keys):
    command.add_command(operating)
