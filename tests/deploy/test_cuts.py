"""A bare fleet that is cut off around every step there is, and killed before marks that steps leave.

test_apply cuts an update of a target; here are first deployments of a draft device and of a target with an
engine, keys and a service, and an update of the draft device. Real sshd, venvs and processes.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import typing
from collections.abc import Callable, Iterator, Set
from pathlib import Path

import msgspec
import pytest

from starsd_deploy.commands import ServiceLink
from starsd_deploy.device import DeviceShell
from starsd_deploy.facts import Facts
from starsd_deploy.inventory import Device, Role, Runtime
from starsd_deploy.plan import DevicePlan, plan_device
from starsd_deploy.runner import RunContext, gather_facts, run_plan
from starsd_deploy.ssh import Connection
from starsd_deploy.steps import Engine, InstallUnit, MakeKey, Pin, Prepare, Prune, Restart, Step, Trust
from starsd_deploy.sudo import SudoPassword
from starsd_edge.errors import StarSDError
from tests.deploy.loopback import SSHD, LoopbackDevice
from tests.deploy.test_apply import HOLDER, Quiet, await_answer, free_port, never_ask
from tests.deploy.toys import make_bundle, wanted_factory

ALL_STEPS: Set[type] = frozenset(typing.get_args(Step))
LEASE_RENAMES = 3  # that every deployment begins with: holder, token, beat
MOST_ATTEMPTS = 100


class CutAround(Quiet):
    """Cuts the connection at the first kind of step that is not in `cut` yet: before it, or after it."""

    def __init__(self, connection: Connection, cut: set[type], *, after: bool) -> None:
        super().__init__()
        self._connection, self._cut, self._after = connection, cut, after

    def step_begins(self, device: str, step: Step) -> None:
        if not self._after:
            self._reach(type(step))

    def step_ends(self, device: str, step: Step) -> None:
        if self._after:
            self._reach(type(step))

    def _reach(self, kind: type) -> None:
        if kind not in self._cut:
            self._cut.add(kind)
            self._connection.close()


class Pair:
    """A draft device and a target that drafts with it, both bare."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.boards = {name: LoopbackDevice(folder / name) for name in ("desk", "nano1")}
        self.desk = self.boards["desk"].device(
            "desk",
            roles=(Role.DRAFT,),
            bundle="",
            draft_port=free_port(),
            start_timeout_s=60.0,
            drain_s=1.0,
            keep_releases=1,
        )
        self.nano = self.boards["nano1"].device(
            "nano1",
            service=("desk",),
            runtime=Runtime.TENSORRT,
            bundle=str(make_bundle(folder, "x")),
            endpoint_port=free_port(),
            start_timeout_s=60.0,
            drain_s=1.0,
        )

    def plan(self, device: Device, version: str) -> DevicePlan:
        with self.boards[device.name].connect() as connection, self.boards["desk"].connect() as desk:
            facts = gather_facts(connection, device)
            service = gather_facts(desk, self.desk).state
        address = f"tcp://127.0.0.1:{self.desk.draft_port}"
        link = ServiceLink("desk", address, service.public_key, is_fleet_device=True)
        want = wanted_factory(self.folder, version, services=(link,) if device.service else ())(device, facts)
        if device.service:
            admitted = {"desk": service.trusted.get(device.name, "")}
            want = msgspec.structs.replace(want, trusted_by=admitted)
        return plan_device(device, facts, want)

    def carry_out(self, device: Device, plan: DevicePlan, observe: Callable[[Connection], Quiet]) -> None:
        board = self.boards[device.name]
        (board.root / "lease" / "beat").unlink(missing_ok=True)  # a dead deployer's time is over
        with board.connect() as connection, self.boards["desk"].connect() as desk:

            def context(facts: Facts) -> RunContext:
                return RunContext(
                    facts=facts,
                    sudo=SudoPassword(never_ask),
                    peers={"desk": DeviceShell(desk, self.desk.root, "")},
                    uploads=threading.Semaphore(1),
                    observer=observe(connection),
                )

            run_plan(connection, device, plan, HOLDER, context)

    def deploy_with_cuts(
        self, device: Device, version: str, *, power: bool, serves: Callable[[], None] = lambda: None
    ) -> set[type]:
        """Cut at every kind of step until nothing is left to do; the kinds of steps there were.

        The cable before each one; with `power`, the power after every second one instead.
        """
        cut: set[type] = set()
        for attempt in range(MOST_ATTEMPTS):
            plan = self.plan(device, version)
            if not plan.steps:
                return cut
            after = power and attempt % 2 == 1

            def observe(connection: Connection, after: bool = after) -> Quiet:
                return CutAround(connection, cut, after=after)

            with contextlib.suppress(StarSDError):
                self.carry_out(device, plan, observe)
            if after:
                self.boards[device.name].lose_power()
                self.boards[device.name].boot()
            serves()
        raise AssertionError(f"{MOST_ATTEMPTS} attempts did not finish it")

    def close(self) -> None:
        for board in self.boards.values():
            board.close()


@pytest.fixture
def pair(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Pair]:
    if SSHD is None:
        request.getfixturevalue("board")  # says loudly that this did not run
    made = Pair(tmp_path)
    try:
        yield made
    finally:
        made.close()


def await_port(port: int) -> None:
    for _ in range(3000):
        try:
            socket.create_connection(("127.0.0.1", port), 5).close()
        except OSError:
            threading.Event().wait(0.01)
        else:
            return
    raise AssertionError("the draft service does not answer")


@pytest.mark.slow
def test_a_bare_fleet_that_is_cut_around_every_step_ends_up_serving(pair: Pair) -> None:
    drafting = pair.deploy_with_cuts(pair.desk, "1.0", power=True)
    assert {Prepare, MakeKey, InstallUnit} <= drafting
    await_port(pair.desk.draft_port)
    target = pair.deploy_with_cuts(pair.nano, "1.0", power=True)
    assert {Pin, Trust, Engine} <= target
    await_answer(pair.nano)
    updated = pair.deploy_with_cuts(
        pair.desk, "2.0", power=False, serves=lambda: await_port(pair.desk.draft_port)
    )
    assert {Restart, Prune} <= updated
    assert drafting | target | updated == ALL_STEPS
    running = (pair.boards["desk"].root / "current").readlink().name
    assert running.startswith("2.0-")


@pytest.mark.slow
def test_a_bare_target_that_is_killed_before_marks_ends_up_serving(pair: Pair) -> None:
    """Each attempt gets one mark further than the one before; the next mark is where it dies."""
    pair.carry_out(pair.desk, pair.plan(pair.desk, "1.0"), lambda connection: Quiet())
    board = pair.boards["nano1"]
    for attempt in range(MOST_ATTEMPTS):
        plan = pair.plan(pair.nano, "1.0")
        if not plan.steps:
            break
        board.cut_at_rename(LEASE_RENAMES + 2 + attempt)
        with contextlib.suppress(StarSDError):
            pair.carry_out(pair.nano, plan, lambda connection: Quiet())
    board.cut_at_rename(None)
    assert pair.plan(pair.nano, "1.0").steps == ()
    await_answer(pair.nano)
