"""A plan, carried out over the fleet: drafts first, then targets in batches, stopping when too many fail."""

from __future__ import annotations

import contextlib
import enum
import math
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from starsd_deploy.device import DeviceShell
from starsd_deploy.facts import Facts
from starsd_deploy.inventory import Device, Fleet, Role
from starsd_deploy.lease import Holder
from starsd_deploy.plan import DevicePlan, Plan
from starsd_deploy.runner import Observer, RunContext, run_plan
from starsd_deploy.ssh import Connection
from starsd_deploy.steps import Pin, Trust
from starsd_deploy.sudo import SudoPassword
from starsd_deploy.survey import Login
from starsd_edge.errors import StarSDError, UsageError

__all__ = ["Ending", "Outcome", "Pace", "apply_plan", "batches", "parse_batch"]


class Ending(enum.Enum):
    """How it ended for a device."""

    CHANGED = "changed"
    UNCHANGED = "unchanged"
    FAILED = "failed"
    NOT_STARTED = "not started"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a device's plan."""

    device: str
    ending: Ending
    sent_bytes: int = 0
    error: StarSDError | None = None


@dataclass(frozen=True, slots=True)
class Pace:
    """How many at once. `batch` counts devices; `fail_percent` of all failed ends the deployment."""

    parallel: int = 10
    uploads: int = 5
    batch: int = 0
    fail_percent: float = 0.0


def parse_batch(text: str, total: int) -> int:
    """ "25%" of total, or a count; at least one.

    Raises:
        UsageError: neither.
    """
    number = text.removesuffix("%")
    try:
        value = float(number) if text.endswith("%") else int(number)
    except ValueError:
        raise UsageError(f"--batch {text!r} is neither a count nor a percentage") from None
    if value <= 0:
        raise UsageError(f"--batch {text!r} must be more than 0")
    return max(1, math.ceil(total * value / 100) if text.endswith("%") else int(value))


def batches(plans: tuple[DevicePlan, ...], size: int) -> tuple[tuple[DevicePlan, ...], ...]:
    """Draft devices first, in one batch: targets need their keys. Then targets, `size` at a time."""
    drafts = tuple(plan for plan in plans if plan.role is Role.DRAFT)
    targets = tuple(plan for plan in plans if plan.role is not Role.DRAFT)
    step = size or max(1, len(targets))
    groups = [drafts] if drafts else []
    return (*groups, *(targets[start : start + step] for start in range(0, len(targets), step)))


def apply_plan(
    fleet: Fleet, plan: Plan, login: Login, pace: Pace, holder: Holder, sudo: SudoPassword, observer: Observer
) -> tuple[Outcome, ...]:
    """Do exactly what the plan says; outcomes in plan order.

    Nothing is raised for a device: a failure is its outcome; the others go on until `fail_percent` is passed.
    """
    uploads = threading.Semaphore(max(1, pace.uploads))
    outcomes: dict[str, Outcome] = {}
    failed = 0
    for group in batches(plan.devices, pace.batch):
        if failed * 100 > pace.fail_percent * len(plan.devices):
            break
        with ThreadPoolExecutor(max(1, pace.parallel), thread_name_prefix="deploy") as pool:
            for outcome in pool.map(
                lambda one: _apply_device(fleet, one, login, holder, sudo, observer, uploads), group
            ):
                outcomes[outcome.device] = outcome
        failed = sum(outcome.ending is Ending.FAILED for outcome in outcomes.values())
    return tuple(outcomes.get(one.device, Outcome(one.device, Ending.NOT_STARTED)) for one in plan.devices)


def _apply_device(
    fleet: Fleet,
    plan: DevicePlan,
    login: Login,
    holder: Holder,
    sudo: SudoPassword,
    observer: Observer,
    uploads: threading.Semaphore,
) -> Outcome:
    if not plan.steps:
        return Outcome(plan.device, Ending.UNCHANGED)
    device = fleet.device(plan.device)
    try:
        connection = login.connect(device)
    except StarSDError as error:
        return Outcome(plan.device, Ending.FAILED, 0, error)
    with contextlib.ExitStack() as stack:
        stack.enter_context(connection)
        try:
            peers = _peer_shells(fleet, plan, login, stack)

            def context(facts: Facts) -> RunContext:
                return RunContext(facts=facts, sudo=sudo, peers=peers, uploads=uploads, observer=observer)

            run_plan(connection, device, plan, holder, context)
        except StarSDError as error:
            return Outcome(plan.device, Ending.FAILED, connection.bytes_sent, error)
    return Outcome(plan.device, Ending.CHANGED, connection.bytes_sent)


def _peer_shells(
    fleet: Fleet, plan: DevicePlan, login: Login, stack: contextlib.ExitStack
) -> dict[str, DeviceShell]:
    """Connections to the draft devices that this plan exchanges keys with."""
    names = {step.service for step in plan.steps if isinstance(step, Trust)}
    names |= {step.service for step in plan.steps if isinstance(step, Pin) and not step.public_key}
    return {name: _peer_shell(fleet.device(name), login, stack) for name in sorted(names)}


def _peer_shell(device: Device, login: Login, stack: contextlib.ExitStack) -> DeviceShell:
    connection: Connection = stack.enter_context(login.connect(device))
    return DeviceShell(connection, device.root, "")
