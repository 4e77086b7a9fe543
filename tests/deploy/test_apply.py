"""A device from bare to serving, updated, cut at every step, rolled back: real sshd, venvs and processes."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import socket
import threading
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import pytest

from starsd_deploy.device import UnhealthyError
from starsd_deploy.facts import Facts
from starsd_deploy.inventory import Device
from starsd_deploy.lease import Holder
from starsd_deploy.plan import PLAN_VERSION, DevicePlan, Plan, Wanted, plan_device, read_plan, write_plan
from starsd_deploy.runner import RunContext, gather_facts, run_plan
from starsd_deploy.ssh import Connection
from starsd_deploy.steps import Step, Upload
from starsd_deploy.sudo import SudoPassword
from starsd_edge.errors import DeployError, StarSDError
from tests.deploy.loopback import LoopbackDevice
from tests.deploy.toys import make_bundle, wanted_factory
from tests.ports import free_port

Want = Callable[[Device, Facts], Wanted]
HOLDER = Holder("test@desk", "apply")


class Quiet:
    """An observer that notes what began."""

    def __init__(self) -> None:
        self.begun: list[Step] = []

    def step_begins(self, device: str, step: Step) -> None:
        self.begun.append(step)

    def step_ends(self, device: str, step: Step) -> None:
        return

    def bytes_settled(self, device: str, count: int) -> None:
        return


def never_ask(question: str) -> str:
    raise AssertionError(question)


def plan_of(board: LoopbackDevice, device: Device, want: Want) -> DevicePlan:
    with board.connect() as connection:
        facts = gather_facts(connection, device)
    return plan_device(device, facts, want(device, facts))


def carry_out(
    connection: Connection, device: Device, plan: DevicePlan, observer: Quiet | None = None
) -> None:
    def context(facts: Facts) -> RunContext:
        return RunContext(
            facts=facts,
            sudo=SudoPassword(never_ask),
            peers={},
            uploads=threading.Semaphore(1),
            observer=observer or Quiet(),
        )

    run_plan(connection, device, plan, HOLDER, context)


def apply(board: LoopbackDevice, device: Device, want: Want) -> tuple[DevicePlan, int]:
    plan = plan_of(board, device, want)
    if not plan.steps:
        return plan, 0
    with board.connect() as connection:
        carry_out(connection, device, plan)
        return plan, connection.bytes_sent


def answer(device: Device) -> str:
    url = f"http://127.0.0.1:{device.endpoint_port}/health"
    with urllib.request.urlopen(url, timeout=5) as reply:
        return str(reply.read().decode())


@pytest.fixture
def device(board: LoopbackDevice, tmp_path: Path) -> Device:
    return board.device(
        endpoint_port=free_port(), bundle=str(make_bundle(tmp_path, "x")), drain_s=2.0, start_timeout_s=20.0
    )


def test_bare_device_serves_and_second_apply_does_nothing(
    board: LoopbackDevice, device: Device, tmp_path: Path
) -> None:
    want = wanted_factory(tmp_path, "1.0")
    plan, sent = apply(board, device, want)
    assert answer(device) == "1.0"
    assert sent == plan.upload_bytes > 0
    again, sent = apply(board, device, want)
    assert (again.steps, sent) == ((), 0)
    settings = (board.root / "current" / "config" / "config.toml").read_text()
    assert f'bundle = "{board.root}/current/bundle/bundle-x"' in settings
    assert (board.root / "current" / "bundle" / "bundle-x" / "manifest.json").is_file()
    log = [json.loads(line) for line in (board.root / "releases.log").read_text().splitlines()]
    assert [(entry["event"], entry["release"]) for entry in log] == [
        ("switch", plan.release),
        ("confirm", plan.release),
    ]
    assert all(entry["by"] == {"who": "test@desk", "doing": "apply"} for entry in log)
    assert all(re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", entry["at"]) for entry in log)
    secret = board.root / "keys" / "device.key"
    assert secret.stat().st_mode & 0o777 == 0o600


def test_update_sends_only_what_is_new_and_rollback_needs_nothing(
    board: LoopbackDevice, device: Device, tmp_path: Path
) -> None:
    apply(board, device, wanted_factory(tmp_path, "1.0"))
    plan, sent = apply(board, device, wanted_factory(tmp_path, "2.0"))
    assert answer(device) == "2.0"
    sources = [blob.source for step in plan.steps if isinstance(step, Upload) for blob in step.blobs]
    assert not any("common-1.0" in source for source in sources)
    assert sent == plan.upload_bytes


def test_an_answer_under_way_ends_before_the_next_release_starts(
    board: LoopbackDevice, device: Device, tmp_path: Path
) -> None:
    apply(board, device, wanted_factory(tmp_path, "1.0", behaviour="answers for a moment"))
    apply(board, device, wanted_factory(tmp_path, "2.0"))
    assert (board.home / "answered").exists()
    assert answer(device) == "2.0"


def test_an_answer_without_an_end_is_cut_at_its_deadline(
    board: LoopbackDevice, device: Device, tmp_path: Path
) -> None:
    """The drain, and what a service has beyond it to leave; then nothing is waited for."""
    device = msgspec.structs.replace(device, drain_s=0.0)
    apply(board, device, wanted_factory(tmp_path, "1.0", behaviour="answers for ever"))
    apply(board, device, wanted_factory(tmp_path, "2.0"))
    assert answer(device) == "2.0"


def test_failing_gate_leaves_the_old_release_serving(
    board: LoopbackDevice, device: Device, tmp_path: Path
) -> None:
    apply(board, device, wanted_factory(tmp_path, "1.0"))
    with pytest.raises(UnhealthyError, match=r"self-test: expected token 7, got 9"):
        apply(board, device, wanted_factory(tmp_path, "2.0", behaviour="gate fails"))
    assert answer(device) == "1.0"


def test_release_that_does_not_start_is_rolled_back_and_its_journal_shown(
    board: LoopbackDevice, tmp_path: Path
) -> None:
    device = board.device(
        endpoint_port=free_port(), bundle=str(make_bundle(tmp_path, "x")), drain_s=1.0, start_timeout_s=8.0
    )
    apply(board, msgspec.structs.replace(device, start_timeout_s=20.0), wanted_factory(tmp_path, "1.0"))
    with pytest.raises(UnhealthyError, match=r"(?s)went back to 1\.0-.*the sky is falling"):
        apply(board, device, wanted_factory(tmp_path, "2.0", behaviour="start fails"))
    with board.connect() as connection:
        state = gather_facts(connection, device).state
    assert state.current.startswith("1.0-")
    assert state.history[-1] == state.current


def test_plan_file_is_refused_when_the_device_has_moved_on(
    board: LoopbackDevice, device: Device, tmp_path: Path
) -> None:
    old = plan_of(board, device, wanted_factory(tmp_path, "1.0"))
    whole = read_plan(write_plan(Plan(PLAN_VERSION, "fleet.toml", (old,))), "plan.json")
    assert whole.devices == (old,)
    apply(board, device, wanted_factory(tmp_path, "2.0"))
    with board.connect() as connection, pytest.raises(DeployError, match="has changed since the plan"):
        carry_out(connection, device, whole.devices[0])
    assert answer(device) == "2.0"


@dataclass
class Cut(Quiet):
    """Cuts the connection when step number `index` begins or ends."""

    connection: Connection
    index: int
    at_end: bool
    begun: list[Step] = field(default_factory=list)

    def step_begins(self, device: str, step: Step) -> None:
        if not self.at_end and len(self.begun) == self.index:
            self.connection.close()
        self.begun.append(step)

    def step_ends(self, device: str, step: Step) -> None:
        if self.at_end and len(self.begun) == self.index + 1:
            self.connection.close()


@dataclass
class Updated:
    """A device with release 1.0, to be put back to that state again and again, and the way to 2.0."""

    board: LoopbackDevice
    device: Device
    snapshot: Path
    want: Want

    def put_back(self) -> None:
        self.board.stop_service()
        shutil.rmtree(self.board.root)
        shutil.copytree(self.snapshot, self.board.root, symlinks=True)
        self.board.boot()
        await_answer(self.device)

    def assert_serving_and_finished_by_the_next_apply(self, where: object) -> None:
        await_answer(self.device)
        assert answer(self.device) in {"1.0", "2.0"}, where
        (self.board.root / "lease" / "beat").unlink(missing_ok=True)  # the dead deployer's time is over
        apply(self.board, self.device, self.want)
        assert answer(self.device) == "2.0", where
        assert plan_of(self.board, self.device, self.want).steps == (), where


@pytest.fixture
def updated(board: LoopbackDevice, device: Device, tmp_path: Path) -> Updated:
    device = msgspec.structs.replace(device, keep_releases=1)
    apply(board, device, wanted_factory(tmp_path, "1.0"))
    board.stop_service()
    snapshot = tmp_path / "snapshot"
    shutil.copytree(board.root, snapshot, symlinks=True)
    board.boot()
    return Updated(board, device, snapshot, wanted_factory(tmp_path, "2.0"))


@pytest.mark.slow
def test_cut_at_every_step_leaves_a_serving_device_that_the_next_apply_finishes(updated: Updated) -> None:
    """Fault points are the steps of a real update, enumerated: the cable cut before one, the power after the
    next."""
    board, device = updated.board, updated.device
    count = len(plan_of(board, device, updated.want).steps)
    assert count >= 7
    for index in range(count):
        updated.put_back()
        plan = plan_of(board, device, updated.want)
        at_end = index % 2 == 1
        with board.connect() as connection, pytest.raises(StarSDError):
            carry_out(connection, device, plan, Cut(connection, index, at_end))
        if at_end:
            board.lose_power()
            board.boot()
        updated.assert_serving_and_finished_by_the_next_apply(plan.steps[index])


@pytest.mark.slow
def test_cut_in_the_middle_of_steps_leaves_a_serving_device_that_the_next_apply_finishes(
    updated: Updated,
) -> None:
    """What a device has done is marked by a rename each time, so cuts before renames leave all the states
    there are; every second one is tried, for the time it takes."""
    board = updated.board
    board.cut_at_rename(None)
    apply(board, updated.device, updated.want)
    count = board.cut_at_rename(None)
    assert count >= 12
    for number in range(1, count + 1, 2):
        updated.put_back()
        board.cut_at_rename(number)
        with contextlib.suppress(StarSDError):  # a heartbeat more or less, and the last one is never reached
            apply(board, updated.device, updated.want)
        board.cut_at_rename(None)
        updated.assert_serving_and_finished_by_the_next_apply(f"rename {number} of {count}")


def await_answer(device: Device) -> None:
    """The service's port takes a moment after its process starts."""
    for _ in range(2000):
        try:
            socket.create_connection(("127.0.0.1", device.endpoint_port), 5).close()
        except ConnectionRefusedError:
            threading.Event().wait(0.01)
        else:
            return
    raise AssertionError("the service does not answer")
