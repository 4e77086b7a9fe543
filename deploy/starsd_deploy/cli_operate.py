"""`starsd deploy rollback|logs|exec|unlock|keys`: what is done to devices that are deployed already."""

from __future__ import annotations

import contextlib
import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import click

from starsd_deploy.cli_options import Selection, confirm_on_terminal, end_with, selecting, sudo_from
from starsd_deploy.device import DeviceShell
from starsd_deploy.facts import Facts
from starsd_deploy.inventory import Device, Role
from starsd_deploy.lease import this_holder
from starsd_deploy.operate import admitting, log_lines, revoke, roll_back, rotate_key, unlock
from starsd_deploy.runner import RunContext, gather_facts
from starsd_deploy.ssh import Connection
from starsd_deploy.steps import Step
from starsd_deploy.sudo import SudoPassword
from starsd_deploy.survey import survey
from starsd_edge.errors import StarSDError, UsageError

__all__ = ["exec_", "keys", "logs", "rollback", "unlock_"]

Result = TypeVar("Result")


class _Silent:
    def step_begins(self, device: str, step: Step) -> None:
        return

    def step_ends(self, device: str, step: Step) -> None:
        return

    def bytes_settled(self, device: str, count: int) -> None:
        return


def _context(facts: Facts, sudo: SudoPassword) -> RunContext:
    return RunContext(facts=facts, sudo=sudo, peers={}, uploads=threading.Semaphore(1), observer=_Silent())


def _on_each(
    selection: Selection, work: Callable[[Device], Result], parallel: int = 1
) -> tuple[dict[str, Result], tuple[StarSDError, ...]]:
    """Results by device, and what went wrong, told already: a device that fails stops none of the others."""
    results: dict[str, Result] = {}
    errors: list[StarSDError] = []

    def one(device: Device) -> None:
        try:
            results[device.name] = work(device)
        except StarSDError as error:
            click.echo(f"{device.name}: {str(error).removeprefix(device.name + ': ')}", err=True)
            errors.append(error)

    with ThreadPoolExecutor(max(1, parallel)) as pool:
        list(pool.map(one, selection.devices))
    return results, tuple(errors)


@contextlib.contextmanager
def _entered(selection: Selection, device: Device) -> Iterator[tuple[Connection, Facts]]:
    with selection.login.connect(device) as connection:
        yield connection, gather_facts(connection, device)


@click.command()
@selecting
@click.option("--to", default="", help="A release id of `status --json`; default: the one before.")
@click.option("-y", "--yes", is_flag=True, help="Do not ask.")
@click.option("--json", "as_json", is_flag=True, help="For scripts.")
@click.option("--sudo-password-file", type=click.File(), help="Instead of asking; - is stdin.")
def rollback(selection: Selection, to: str, yes: bool, as_json: bool, sudo_password_file: Any) -> None:
    """Make the earlier release live again. Sends nothing, removes nothing."""
    names = [device.name for device in selection.devices]
    if len(names) > 1 and not yes:
        confirm_on_terminal(f"Roll back {len(names)} devices: {', '.join(names)}?", err=as_json)
    sudo = sudo_from(sudo_password_file)

    def back(device: Device) -> str:
        with _entered(selection, device) as (connection, facts):
            release = roll_back(connection, device, to, _context(facts, sudo), this_holder("rollback"))
        if not as_json:
            click.echo(f"{device.name}: {release} is live")
        return release

    live, errors = _on_each(selection, back, selection.parallel)
    if as_json:
        click.echo(json.dumps([{"device": name, "live": live.get(name)} for name in names], indent=1))
    end_with(errors)


@click.command(short_help="Print the journal of devices.")
@selecting
@click.option("-f", "--follow", is_flag=True, help="Go on until Ctrl-C.")
@click.option("-n", "--lines", type=click.IntRange(1), default=50, show_default=True)
@click.option("--sudo-password-file", type=click.File(), help="Instead of asking; - is stdin.")
def logs(selection: Selection, follow: bool, lines: int, sudo_password_file: Any) -> None:
    """Print the journal of devices; with several, each line starts with the device's name."""
    sudo = sudo_from(sudo_password_file)
    many = len(selection.devices) > 1
    lock = threading.Lock()

    def read(device: Device) -> None:
        try:
            with _entered(selection, device) as (connection, facts):
                for line in log_lines(connection, device, facts, lines, sudo, follow=follow):
                    with lock:
                        click.echo(f"{device.name}: {line}" if many else line)
        except StarSDError as error:
            click.echo(str(error), err=True)
            errors.append(error)

    errors: list[StarSDError | None] = []
    threads = [threading.Thread(target=read, args=(device,), daemon=True) for device in selection.devices]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    end_with(tuple(errors))


@click.command(name="exec", context_settings={"ignore_unknown_options": True})
@selecting
@click.argument("words", nargs=-1, required=True, type=click.UNPROCESSED)
def exec_(selection: Selection, words: tuple[str, ...]) -> None:
    """Run WORDS as a command on every device, one after the other."""

    def run(device: Device) -> int:
        with selection.login.connect(device) as connection:
            done = connection.run_command(words)
        click.echo(f"{device.name}: exit status {done.status}")
        sys.stdout.write(done.stdout)
        sys.stderr.write(done.stderr)
        return done.status

    statuses, errors = _on_each(selection, run)
    end_with(errors)
    if any(statuses.values()):
        raise SystemExit(1)


@click.command(name="unlock", short_help="Take the lease from a deployer known to be gone.")
@selecting
def unlock_(selection: Selection) -> None:
    """Take the lease away from another deployer that is known to be gone."""

    def free(device: Device) -> None:
        with selection.login.connect(device) as connection:
            was_locked = unlock(connection, device)
        click.echo(f"{device.name}: {'unlocked' if was_locked else 'was not locked'}")

    end_with(_on_each(selection, free)[1])


@click.group()
def keys() -> None:
    """CURVE keys of the fleet: list, rotate, revoke. `apply` makes and exchanges them."""


@keys.command(name="list")
@selecting
@click.option("--json", "as_json", is_flag=True, help="For scripts.")
def list_(selection: Selection, as_json: bool) -> None:
    """Public keys, and which draft devices admit whom."""
    found = survey(selection.fleet, selection.fleet.devices, selection.login, selection.parallel, time.time)
    drafts = {n: s.facts for n, s in found.items() if s.facts and s.device.role is Role.DRAFT}
    records = []
    for device in selection.devices:
        facts = found[device.name].facts
        key = facts.state.public_key if facts else ""
        records.append({"device": device.name, "public_key": key, "admitted_by": admitting(device, drafts)})
    if as_json:
        click.echo(json.dumps(records, indent=1))
    else:
        for record in records:
            admitted = f", admitted by {', '.join(record['admitted_by'])}" if record["admitted_by"] else ""
            click.echo(f"{record['device']}: {record['public_key'] or 'no key'}{admitted}")
    end_with(tuple(seen.error for seen in found.values()), already_shown=False)


@keys.command(short_help="Give the device NAME a new key pair.")
@selecting
@click.argument("name")
@click.option("--sudo-password-file", type=click.File(), help="Instead of asking; - is stdin.")
def rotate(selection: Selection, name: str, sudo_password_file: Any) -> None:
    """Give the device NAME a new key pair; its services admit the new one only."""
    device = selection.fleet.device(name)
    sudo = sudo_from(sudo_password_file)
    with contextlib.ExitStack() as stack:
        services = _service_shells(selection, device.service, stack)
        connection, facts = stack.enter_context(_entered(selection, device))
        key = rotate_key(connection, device, services, _context(facts, sudo), this_holder("keys rotate"))
    click.echo(f"{name}: new public key {key}")
    if device.role is Role.DRAFT:
        click.echo("its targets still pin the old key: starsd deploy apply")


@keys.command(name="revoke", short_help="Let NAME in at no draft device any more.")
@selecting
@click.argument("name")
def revoke_(selection: Selection, name: str) -> None:
    """No draft device of the fleet admits NAME any longer; the device decodes plainly from then on."""
    drafts = tuple(d.name for d in selection.fleet.devices if d.role is Role.DRAFT)
    if not drafts:
        raise UsageError(f"{selection.fleet.path} has no draft device")
    with contextlib.ExitStack() as stack:
        revoke(name, _service_shells(selection, drafts, stack))
    click.echo(f"{name}: no longer admitted by {', '.join(drafts)}; `apply` would admit it again")


def _service_shells(
    selection: Selection, names: tuple[str, ...], stack: contextlib.ExitStack
) -> dict[str, DeviceShell]:
    """Shells of those services that are draft devices of the fleet."""
    shells = {}
    for name in names:
        if name not in selection.fleet.services:
            device = selection.fleet.device(name)
            shells[name] = DeviceShell(stack.enter_context(selection.login.connect(device)), device.root, "")
    return shells
