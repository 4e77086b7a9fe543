"""What is done to devices that run already: roll back, rotate and revoke keys, unlock, read logs."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from starsd_deploy.commands import (
    key_name,
    probe_script,
    rotate_key_script,
    trust_script,
    unit_name,
    untrust_script,
)
from starsd_deploy.device import DeviceShell, UnhealthyError
from starsd_deploy.facts import Facts
from starsd_deploy.inventory import Device, Role, UnitScope
from starsd_deploy.lease import Holder, Lease
from starsd_deploy.releases import rollback_target
from starsd_deploy.runner import (
    GATE_SLACK_S,
    JOURNAL_LINES,
    RunContext,
    gather_facts,
    read_journal,
    restart,
)
from starsd_deploy.ssh import Connection
from starsd_deploy.sudo import SudoPassword, sudo_argv
from starsd_edge.errors import DeployError

__all__ = ["admitting", "log_lines", "revoke", "roll_back", "rotate_key", "unlock"]


def roll_back(connection: Connection, device: Device, to: str, context: RunContext, holder: Holder) -> str:
    """Make an earlier release current again and restart; sends and removes nothing. Its id.

    Raises:
        UsageError: there is no such release. UnhealthyError: it does not answer; with the journal.
        DeployError, UnreachableError: as for any step.
    """
    with Lease(connection, context.facts.state.root, holder) as shell:
        state = gather_facts(connection, device).state
        release = rollback_target(state, to)
        shell.do("switch", release)
        restart_and_confirm(shell, device, release, context)
    return release


def rotate_key(
    connection: Connection,
    device: Device,
    services: dict[str, DeviceShell],
    context: RunContext,
    holder: Holder,
) -> str:
    """A new key pair, made on the device; its services admit that one only. The new public key.

    The old key stays good until the device runs with the new one. A draft device's new key must be pinned by
    its targets: the next `apply` does that.

    Raises:
        DeployError: the device has no release or no key yet.
    """
    with Lease(connection, context.facts.state.root, holder) as shell:
        state = gather_facts(connection, device).state
        if not state.public_key or not state.current:
            raise DeployError(f"{device.name}: has no key yet: deploy it first")
        shell.do("rotate_key", key_name(device.role), rotate_key_script(device.role))
        key = shell.do("public_key").strip()
        for service in services.values():
            service.do("trust", trust_script(keep_previous=True), device.name, key)
        restart_and_confirm(shell, device, state.current, context)
        for service in services.values():
            service.do("trust", trust_script(), device.name, key)
    return key


def revoke(name: str, services: dict[str, DeviceShell]) -> None:
    """No draft device admits `name` any longer; connections it has are dropped by the service."""
    for service in services.values():
        service.do("untrust", untrust_script(), name)


def admitting(device: Device, drafts: dict[str, Facts]) -> tuple[str, ...]:
    """Draft devices that admit a device now."""
    return tuple(name for name, facts in drafts.items() if device.name in facts.state.trusted)


def unlock(connection: Connection, device: Device) -> bool:
    """Take a lease away from whoever holds it; False if nobody did, and nothing was changed then."""
    return bool(DeviceShell(connection, device.root, "").do("lease_break").strip())


def restart_and_confirm(shell: DeviceShell, device: Device, release: str, context: RunContext) -> None:
    """Restart the unit and wait until this release answers.

    Raises:
        UnhealthyError: it does not; the journal is in the message, and nothing was switched back.
    """
    unit, scope = unit_name(device.role), device.unit.value
    restart(shell, unit, scope, device.drain_s, context)
    words = (release, unit, scope, f"{device.start_timeout_s:.0f}", probe_script(device))
    try:
        shell.do("confirm", *words, timeout_s=device.start_timeout_s + GATE_SLACK_S)
    except UnhealthyError as error:
        journal = read_journal(shell, unit, scope, JOURNAL_LINES, context)
        raise UnhealthyError(f"{error}\n    The last lines of its journal:\n{journal}") from error


def log_lines(
    connection: Connection, device: Device, facts: Facts, lines: int, sudo: SudoPassword, *, follow: bool
) -> Iterator[str]:
    """The journal of a device's unit, line by line; with `follow` until the caller stops.

    A user's own units, and a system unit's for members of adm, need no root; otherwise sudo reads it.
    """
    unit = unit_name(device.role if device.role is Role.DRAFT else Role.TARGET)
    words = ["journalctl", "-n", str(lines), "--no-pager", "-o", "short-iso"] + (["-f"] if follow else [])
    if device.unit is UnitScope.USER:
        yield from connection.stream(("sh", "-c", shlex.join([*words, "--user-unit", unit])))
        return
    words += ["-u", unit]
    may_read = bool({"adm", "systemd-journal", "root"} & set(facts.groups))
    if may_read or facts.sudo == "none":
        yield from connection.stream(tuple(words))
        return
    argv, stdin = sudo_argv(facts, tuple(words), sudo)
    yield from connection.stream(argv, stdin)
