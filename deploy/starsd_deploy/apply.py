"""A plan, carried out over the fleet: drafts first, then targets in batches, stopping when too many fail."""

from __future__ import annotations

import contextlib
import enum
import math
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from starsd_deploy.device import DeviceShell
from starsd_deploy.engines import EngineShelf
from starsd_deploy.facts import Facts
from starsd_deploy.inventory import Fleet, Role
from starsd_deploy.lease import Holder
from starsd_deploy.plan import DevicePlan, Plan
from starsd_deploy.runner import Observer, RunContext, run_plan
from starsd_deploy.steps import Pin, Trust
from starsd_deploy.sudo import SudoPassword
from starsd_deploy.survey import Login
from starsd_deploy.throttle import NO_LIMIT, Throttle
from starsd_edge.config import cache_dir
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
    """How many at once, and how fast.

    batch         devices at once, 0 for all
    pause_s       between two batches of targets, for whoever watches the first ones
    fail_percent  of all devices that may fail before the next batch is left out
    bytes_per_s   of all uploads together, 0 for no limit
    """

    parallel: int = 10
    uploads: int = 5
    batch: int = 0
    pause_s: float = 0.0
    fail_percent: float = 0.0
    bytes_per_s: float = 0.0


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
    """Draft devices first, since targets need their keys, and one after the other: while one restarts, the
    others draft for its targets. Then targets, `size` at a time."""
    drafts = tuple((plan,) for plan in plans if plan.role is Role.DRAFT)
    targets = tuple(plan for plan in plans if plan.role is not Role.DRAFT)
    step = size or max(1, len(targets))
    return (*drafts, *(targets[start : start + step] for start in range(0, len(targets), step)))


def apply_plan(
    fleet: Fleet,
    plan: Plan,
    login: Login,
    pace: Pace,
    holder: Holder,
    sudo: SudoPassword,
    observer: Observer,
    *,
    cache: Path | None = None,
    pause: Callable[[float], None] = time.sleep,
) -> tuple[Outcome, ...]:
    """Do exactly what the plan says; outcomes in plan order. Engines that are passed on are kept in `cache`.

    Nothing is raised for a device: a failure is its outcome; the others go on until `fail_percent` is passed.
    """
    work = _Deployment(fleet, plan, login, pace, holder, sudo, observer, cache or cache_dir())
    outcomes: dict[str, Outcome] = {}
    failed = 0
    for before, group in pairwise(((), *batches(plan.devices, pace.batch))):
        if failed * 100 > pace.fail_percent * len(plan.devices):
            break
        if any(one.role is not Role.DRAFT and one.steps for one in before):
            pause(pace.pause_s)
        with ThreadPoolExecutor(max(1, pace.parallel), thread_name_prefix="deploy") as pool:
            for outcome in pool.map(work.device, group):
                outcomes[outcome.device] = outcome
        failed = sum(outcome.ending is Ending.FAILED for outcome in outcomes.values())
    return tuple(outcomes.get(one.device, Outcome(one.device, Ending.NOT_STARTED)) for one in plan.devices)


class _Deployment:
    """What the devices of one deployment share."""

    def __init__(
        self,
        fleet: Fleet,
        plan: Plan,
        login: Login,
        pace: Pace,
        holder: Holder,
        sudo: SudoPassword,
        observer: Observer,
        cache: Path,
    ) -> None:
        self._fleet, self._login, self._holder = fleet, login, holder
        self._sudo, self._observer = sudo, observer
        self._uploads = threading.Semaphore(max(1, pace.uploads))
        self._pacer = Throttle(pace.bytes_per_s) if pace.bytes_per_s else NO_LIMIT
        self._under_way = {one.device for one in plan.devices}
        self._engines = EngineShelf(
            cache / "engines", self._shell_of, lambda name: name not in self._under_way, self._pacer
        )

    def device(self, plan: DevicePlan) -> Outcome:
        """One device's plan from log-in to end."""
        try:
            return self._carry_out(plan)
        finally:
            self._under_way.discard(plan.device)

    def _carry_out(self, plan: DevicePlan) -> Outcome:
        if not plan.steps:
            return Outcome(plan.device, Ending.UNCHANGED)
        device = self._fleet.device(plan.device)
        try:
            connection = self._login.connect(device)
        except StarSDError as error:
            return Outcome(plan.device, Ending.FAILED, 0, error)
        with contextlib.ExitStack() as stack:
            stack.enter_context(connection)
            try:
                peers = {name: stack.enter_context(self._shell_of(name)) for name in _peers(plan)}

                def context(facts: Facts) -> RunContext:
                    return RunContext(
                        facts=facts,
                        sudo=self._sudo,
                        peers=peers,
                        uploads=self._uploads,
                        observer=self._observer,
                        engines=self._engines,
                        pacer=self._pacer,
                    )

                run_plan(connection, device, plan, self._holder, context)
            except StarSDError as error:
                return Outcome(plan.device, Ending.FAILED, connection.bytes_sent, error)
        return Outcome(plan.device, Ending.CHANGED, connection.bytes_sent)

    @contextlib.contextmanager
    def _shell_of(self, name: str) -> Iterator[DeviceShell]:
        """Another device of the fleet, without its lease: to ask, to exchange keys."""
        device = self._fleet.device(name)
        with self._login.connect(device) as connection:
            yield DeviceShell(connection, device.root, "")


def _peers(plan: DevicePlan) -> tuple[str, ...]:
    """Draft devices that a plan exchanges keys with."""
    names = {step.service for step in plan.steps if isinstance(step, Trust)}
    names |= {step.service for step in plan.steps if isinstance(step, Pin) and not step.public_key}
    return tuple(sorted(names))
