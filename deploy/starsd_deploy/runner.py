"""One device: its steps, done one after the other under the lease. The thin side of plan.py."""

from __future__ import annotations

import shlex
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Protocol

from starsd_deploy.blobs import Blob
from starsd_deploy.commands import KILL_AFTER_S, unit_name
from starsd_deploy.device import NOT_RUNNING, DeviceShell, UnhealthyError
from starsd_deploy.engines import EngineShelf, build_engine, put_engine
from starsd_deploy.facts import Facts, facts_digest, facts_script, parse_facts
from starsd_deploy.inventory import Device, UnitScope
from starsd_deploy.lease import Holder, Lease
from starsd_deploy.plan import DevicePlan
from starsd_deploy.ssh import Connection
from starsd_deploy.steps import (
    Bundle,
    Confirm,
    Engine,
    Gate,
    InstallUnit,
    MakeKey,
    Pin,
    Prepare,
    Prune,
    Release,
    Restart,
    Step,
    Switch,
    Trust,
    Upload,
)
from starsd_deploy.sudo import SudoPassword, run_as_root
from starsd_deploy.throttle import NO_LIMIT, Pacer
from starsd_deploy.transfer import send_blobs
from starsd_edge.errors import DeployError

__all__ = ["Observer", "RunContext", "gather_facts", "run_plan"]

BUILD_TIMEOUT_S = 3600.0  # pip on an emulated or very slow board
GATE_SLACK_S = 60.0  # beyond the device's own time limit of the gate
RESTART_SLACK_S = 120.0
JOURNAL_LINES = 30


class Observer(Protocol):
    """Who is told how a device gets on. Called from the device's thread."""

    def step_begins(self, device: str, step: Step) -> None: ...
    def step_ends(self, device: str, step: Step) -> None: ...
    def bytes_settled(self, device: str, count: int) -> None: ...


@dataclass(frozen=True, slots=True)
class RunContext:
    """What the steps of a device need beside its connection.

    peers     shells of draft devices by name, to pin and trust keys
    uploads   how many devices may upload at once
    pacer     how fast all of them together may
    engines   where engines of identical devices come from
    """

    facts: Facts
    sudo: SudoPassword
    peers: Mapping[str, DeviceShell]
    uploads: threading.Semaphore
    observer: Observer
    engines: EngineShelf | None = None
    pacer: Pacer = NO_LIMIT


def gather_facts(connection: Connection, device: Device, peers: tuple[str, ...] = ()) -> Facts:
    """Run the facts script.

    Raises:
        DeployError: the device did not understand it. UnreachableError: the connection was lost.
    """
    port = device.endpoint_port if device.role.value == "target" else device.draft_port
    script = facts_script(device.root, unit_name(device.role), device.unit, port, peers)
    done = connection.run(script)
    if done.status != 0 and "@@starsd root" not in done.stdout:
        raise DeployError(
            f"{device.name}: the facts script ended with status {done.status}: {done.stderr.strip()}"
        )
    return parse_facts(done.stdout)


def run_plan(
    connection: Connection,
    device: Device,
    plan: DevicePlan,
    holder: Holder,
    make_context: Callable[[Facts], RunContext],
) -> None:
    """Take the lease, check that the device still is as the plan found it, do the steps.

    Raises:
        DeployError: the device has changed since the plan, another deployer is at work, or a step failed.
        UnreachableError: the connection was lost; what is done is done, the next apply does the rest.
    """
    with Lease(connection, plan.root, holder) as shell:
        facts = gather_facts(connection, device)
        if facts_digest(facts) != plan.facts_digest:
            raise DeployError(f"{device.name}: the device has changed since the plan was made: plan again")
        context = make_context(facts)
        for step in plan.steps:
            context.observer.step_begins(device.name, step)
            run_step(shell, step, context)
            context.observer.step_ends(device.name, step)


def run_step(shell: DeviceShell, step: Step, context: RunContext) -> None:
    """Do one step; doing it twice is doing it once."""
    match step:
        case Prepare():
            shell.do("prepare")
        case Upload():
            _upload(shell, step.blobs, context)
        case Bundle(content=content):
            pairs = [word for file in content.files for word in (file.blob.sha256, file.path)]
            shell.do("bundle", content.id, *pairs, timeout_s=BUILD_TIMEOUT_S)
        case Release():
            _release(shell, step)
        case MakeKey():
            shell.do("make_key", step.name, step.release, step.script, timeout_s=BUILD_TIMEOUT_S)
        case Pin():
            key = step.public_key or _peer(context, step.service).do("public_key").strip()
            shell.do("pin", step.service, key, step.address)
        case Trust():
            key = shell.do("public_key").strip()
            _peer(context, step.service).do("trust", step.script, step.device, key)
        case Engine():
            _engine(shell, step, context)
        case Gate():
            shell.do("gate", step.release, f"{step.timeout_s:g}", timeout_s=step.timeout_s + GATE_SLACK_S)
        case Switch():
            shell.do("switch", step.release)
            shell.do("shim")
        case InstallUnit():
            _install_unit(shell, step, context)
        case Restart():
            restart(shell, step.unit, step.scope, step.drain_s, context)
        case Confirm():
            _confirm(shell, step, context)
        case Prune():
            shell.do("prune", *step.keep, timeout_s=BUILD_TIMEOUT_S)


def _peer(context: RunContext, service: str) -> DeviceShell:
    if service not in context.peers:
        raise DeployError(f"draft device {service} cannot be reached, so no keys can be exchanged with it")
    return context.peers[service]


def _upload(shell: DeviceShell, blobs: tuple[Blob, ...], context: RunContext) -> None:
    name = shell.connection.name
    with context.uploads:
        send_blobs(
            shell,
            blobs,
            pacer=context.pacer,
            progress=lambda count: context.observer.bytes_settled(name, count),
        )


def _engine(shell: DeviceShell, step: Engine, context: RunContext) -> None:
    if not step.source or context.engines is None:
        build_engine(shell, step)
        return
    engine = context.engines.take(step.key, step.source)
    put_engine(shell, step.key, engine, lambda blob: _upload(shell, (blob,), context))


def _release(shell: DeviceShell, step: Release) -> None:
    links = [word for link, content in sorted(step.links.items()) for word in (link, content)]
    wheels = [word for wheel in step.wheels for word in (wheel.blob.sha256, wheel.name)]
    site = "site" if step.site_packages else "-"
    unpack = resources.files("starsd_deploy").joinpath("unpack.py").read_text("utf-8")
    head = (
        step.id,
        step.python,
        site,
        step.run,
        step.gate,
        step.config,
        step.manifest,
        unpack,
        str(len(step.links)),
    )
    shell.do("release", *head, *links, *wheels, timeout_s=BUILD_TIMEOUT_S)


def _install_unit(shell: DeviceShell, step: InstallUnit, context: RunContext) -> None:
    if step.scope == UnitScope.USER.value:
        shell.do("user_unit", step.unit, step.text)
        return
    unit, text = shlex.quote(step.unit), shlex.quote(step.text)
    script = (
        "set -e; umask 022; cd /etc/systemd/system\n"
        f"printf '%s' {text} >{unit}.new; sync {unit}.new; mv -f {unit}.new {unit}\n"
        f"systemctl daemon-reload; systemctl enable --quiet {unit}; systemctl start {unit}\n"
    )
    run_as_root(shell.connection, context.facts, script, context.sudo)


def restart(shell: DeviceShell, unit: str, scope: str, drain_s: float, context: RunContext) -> None:
    """End the running process after its answers; systemd starts the current release. Root if none runs."""
    kill_s = round(drain_s) + KILL_AFTER_S
    done = shell.call("restart", unit, scope, str(kill_s), timeout_s=drain_s + RESTART_SLACK_S)
    if done.status == 0:
        return
    if done.status != NOT_RUNNING:
        raise DeployError(f"{shell.connection.name}: restart failed: {done.stderr.strip()}")
    if scope == UnitScope.USER.value:
        shell.do("start_user_unit", unit)
        return
    script = (
        f"systemctl reset-failed {shlex.quote(unit)} 2>/dev/null; systemctl restart {shlex.quote(unit)}\n"
    )
    run_as_root(shell.connection, context.facts, script, context.sudo)
    shell.do("restarted")


def _confirm(shell: DeviceShell, step: Confirm, context: RunContext) -> None:
    """On failure the journal is read before anything else happens: it is what tells why."""
    words = (step.release, step.unit, step.scope, f"{step.timeout_s:.0f}", step.probe)
    try:
        shell.do("confirm", *words, timeout_s=step.timeout_s + GATE_SLACK_S)
        return
    except UnhealthyError as error:
        problem = error
    journal = read_journal(shell, step.unit, step.scope, JOURNAL_LINES, context)
    outcome = "no earlier release to go back to"
    if step.previous:
        shell.do("switch", step.previous)
        restart(shell, step.unit, step.scope, step.drain_s, context)
        outcome = f"went back to {step.previous}"
    raise UnhealthyError(f"{problem}\n    {outcome}. The last lines of its journal:\n{journal}") from problem


def read_journal(shell: DeviceShell, unit: str, scope: str, lines: int, context: RunContext) -> str:
    """The unit's last lines; as root only where the user may not read them and sudo asks nothing."""
    done = shell.call("journal", unit, scope, str(lines))
    text = done.stdout.strip()
    if (
        (not text or "-- No entries --" in text)
        and scope == UnitScope.SYSTEM.value
        and context.facts.sudo != "none"
    ):
        script = f"journalctl -u {shlex.quote(unit)} -n {lines} --no-pager -o short-iso\n"
        try:
            text = run_as_root(shell.connection, context.facts, script, context.sudo).stdout.strip()
        except DeployError:
            text = ""
    return "\n".join(f"    {line}" for line in text.splitlines()) or "    (the journal cannot be read)"
