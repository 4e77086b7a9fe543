"""Engines are built on the device, once for devices that are identical, and never passed to others."""

from __future__ import annotations

import contextlib
import hashlib
import io
import random
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console

from starsd_deploy.apply import Ending, Outcome, Pace, apply_plan
from starsd_deploy.commands import engine_script
from starsd_deploy.device import DeviceShell
from starsd_deploy.engine_key import engine_key
from starsd_deploy.engines import EngineShelf
from starsd_deploy.facts import Facts, facts_digest
from starsd_deploy.inventory import Device, Fleet, Role, Runtime
from starsd_deploy.lease import Holder
from starsd_deploy.plan import DevicePlan, Wanted
from starsd_deploy.progress import FleetProgress
from starsd_deploy.ssh import Connection
from starsd_deploy.ssh_config import load_ssh_files
from starsd_deploy.steps import Engine, Gate, Release, Restart, Step, Switch, describe
from starsd_deploy.sudo import SudoPassword
from starsd_deploy.survey import Login, Surveyed, plan_fleet, survey, whole_plan
from starsd_deploy.throttle import NO_LIMIT, Pacer
from starsd_edge.board import Board
from starsd_edge.errors import DeployError, UnreachableError
from tests.deploy.loopback import SSHD, LoopbackDevice
from tests.deploy.samples import ORIN_NANO, facts_with
from tests.deploy.test_apply import answer, await_answer, free_port, never_ask
from tests.deploy.toys import wanted_factory

HOLDER = Holder("test@desk", "apply")
ORIN = Board(module="p3767-0005", chip="tegra234", l4t="36.4.4", tensorrt="10.3.0.30")
AGX = Board(module="p3701-0005", chip="tegra234", l4t="36.4.4", tensorrt="10.3.0.30")
NANO1, NANO2 = (Device(name=name, roles=(Role.TARGET,), bundle="/b") for name in ("nano1", "nano2"))


@pytest.mark.parametrize(
    ("same", "change"),
    [
        (True, {}),
        (True, {"power_mode": "15W", "model": "another carrier", "jetpack": "6.2"}),
        (False, {"module": "p3767-0003"}),
        (False, {"l4t": "36.4.3"}),
        (False, {"tensorrt": "10.7.0.23"}),
        (False, {"module": ""}),
    ],
)
def test_only_module_l4t_and_tensorrt_decide_who_shares(same: bool, change: dict[str, str]) -> None:
    facts = facts_with(**ORIN_NANO)
    first = msgspec.structs.replace(facts, board=ORIN)
    second = msgspec.structs.replace(facts, board=replace(ORIN, **change))
    assert same == (engine_key(NANO1, first, "b1") == engine_key(NANO2, second, "b1"))
    assert engine_key(NANO1, first, "b1") != engine_key(NANO1, first, "b2")


def test_devices_that_do_not_say_what_they_are_share_with_nobody() -> None:
    facts = msgspec.structs.replace(facts_with(), board=Board(tensorrt="10.3.0.30"))
    assert engine_key(NANO1, facts, "b") == engine_key(NANO1, facts, "b")
    assert engine_key(NANO1, facts, "b") != engine_key(NANO2, facts, "b")


class ToyWorkshop:
    """Makes the stand-in program's releases."""

    def __init__(self, folder: Path, version: str, behaviour: str) -> None:
        self._folder, self._version, self._behaviour = folder, version, behaviour

    def wanted(self, fleet: Fleet, device: Device, facts: Facts, found: object, login: Login) -> Wanted:
        return wanted_factory(self._folder, self._version, behaviour=self._behaviour)(device, facts)


class Boards:
    """Devices on loopback that pass for Jetsons with TensorRT: what they say of themselves is replaced."""

    def __init__(self, folder: Path, kinds: dict[str, Board]) -> None:
        self.folder, self.kinds = folder, kinds
        self.boards = {name: LoopbackDevice(folder / name) for name in kinds}
        config = folder / "ssh_config"
        config.write_text(f"Host *\n  UserKnownHostsFile {folder}/known_hosts\n  IdentitiesOnly yes\n")
        self.login = Login(replace(load_ssh_files(config), agent_socket=""))
        self.fleet = Fleet("fleet.toml", tuple(self._device(name) for name in kinds))

    def _device(self, name: str) -> Device:
        return self.boards[name].device(
            name,
            runtime=Runtime.TENSORRT,
            endpoint_port=free_port(),
            bundle="/nowhere",
            start_timeout_s=60.0,
            drain_s=1.0,
        )

    def plans(self, version: str, behaviour: str = "") -> tuple[DevicePlan, ...]:
        seen = survey(self.fleet, self.fleet.devices, self.login, 2, lambda: 0.0)
        facts = {name: one.facts for name, one in seen.items() if one.facts is not None}
        found = {
            name: Surveyed(seen[name].device, msgspec.structs.replace(there, board=self.kinds[name]), None)
            for name, there in facts.items()
        }
        workshop: Any = ToyWorkshop(self.folder, version, behaviour)
        planned = plan_fleet(self.fleet, self.fleet.devices, found, workshop, self.login)
        assert [one.error for one in planned] == [None] * len(planned)
        plans = whole_plan(self.fleet, planned).devices
        # the device itself goes on saying what it is
        return tuple(
            msgspec.structs.replace(one, facts_digest=facts_digest(facts[one.device])) for one in plans
        )

    def apply(self, plans: tuple[DevicePlan, ...], observer: Any = None) -> dict[str, Outcome]:
        plan = whole_plan(self.fleet, ())
        plan = msgspec.structs.replace(plan, devices=plans)
        with FleetProgress(Console(file=io.StringIO()), plans) as progress:
            outcomes = apply_plan(
                self.fleet,
                plan,
                self.login,
                Pace(),
                HOLDER,
                SudoPassword(never_ask),
                observer or progress,
                cache=self.folder / "cache",
            )
        return {outcome.device: outcome for outcome in outcomes}

    def file(self, name: str, path: str) -> Path:
        return self.boards[name].root / "cache" / path

    def close(self) -> None:
        for board in self.boards.values():
            board.close()


def engine_steps(plans: tuple[DevicePlan, ...]) -> dict[str, str]:
    """Devices that need an engine -> where it comes from."""
    return {one.device: step.source for one in plans for step in one.steps if isinstance(step, Engine)}


@pytest.fixture
def boards(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Boards]:
    if SSHD is None:
        request.getfixturevalue("board")  # says loudly that this did not run
    made = Boards(tmp_path, request.param)
    try:
        yield made
    finally:
        made.close()


@pytest.mark.slow
@pytest.mark.parametrize("boards", [{"nano1": ORIN, "agx": AGX, "nano2": ORIN}], indirect=True)
def test_identical_devices_share_what_the_first_one_built(boards: Boards) -> None:
    plans = boards.plans("1.0")
    assert engine_steps(plans) == {"nano1": "", "agx": "", "nano2": "nano1"}
    outcomes = boards.apply(plans)
    assert {name: outcome.error for name, outcome in outcomes.items()} == dict.fromkeys(boards.kinds)
    assert {o.ending for o in outcomes.values()} == {Ending.CHANGED}
    one, other, agx = (
        boards.file(name, "engines/toy.engine").read_bytes() for name in ("nano1", "nano2", "agx")
    )
    assert one == other != agx
    assert not boards.file("nano2", "builds").exists()
    assert engine_steps(boards.plans("1.0")) == {}
    assert [one.steps for one in boards.plans("1.0")] == [()] * 3


@pytest.mark.slow
@pytest.mark.parametrize("boards", [{"nano1": ORIN}], indirect=True)
def test_an_upgrade_of_the_board_is_another_release_with_an_engine_of_its_own(boards: Boards) -> None:
    """The engine was built, but went live without a gate: the release had the name that it had before."""
    boards.apply(boards.plans("1.0"))
    boards.kinds["nano1"] = replace(ORIN, l4t="36.4.5", tensorrt="10.7.0.23")
    plans = boards.plans("1.0")
    kinds = [type(step) for step in plans[0].steps]
    assert {Release, Engine, Gate, Switch, Restart} <= set(kinds)
    (told,) = (describe(step) for step in plans[0].steps if isinstance(step, Engine))
    assert told.endswith("(L4T 36.4.5, TensorRT 10.7.0.23 now, L4T 36.4.4, TensorRT 10.3.0.30 before)")
    assert boards.apply(plans)["nano1"].error is None
    assert boards.plans("1.0")[0].steps == ()


@pytest.mark.slow
@pytest.mark.parametrize("boards", [{"nano1": ORIN}], indirect=True)
def test_a_build_outlives_the_deployer_and_the_old_release_serves_meanwhile(boards: Boards) -> None:
    (device,) = boards.fleet.devices
    boards.apply(boards.plans("1.0"))
    await_answer(device)
    plans = boards.plans("2.0", "engine takes its time")
    boards.apply(plans, _CutAtEngine(boards.boards["nano1"]))
    assert answer(device) == "1.0"
    (boards.boards["nano1"].root / "lease" / "beat").unlink()  # the dead deployer's time is over
    again = boards.plans("2.0", "engine takes its time")
    assert engine_steps(again) == {"nano1": ""}
    boards.file("nano1", "go").write_text("")
    outcome = boards.apply(again)["nano1"]
    assert (outcome.ending, outcome.error) == (Ending.CHANGED, None)
    assert answer(device) == "2.0"
    assert boards.file("nano1", "builds").read_text() == "built\n"


@pytest.mark.slow
@pytest.mark.parametrize("boards", [{"nano1": ORIN, "nano2": ORIN}], indirect=True)
def test_a_build_that_fails_says_why_and_changes_nothing(boards: Boards) -> None:
    outcomes = boards.apply(boards.plans("1.0", "engine fails"))
    assert "the engine cannot be built" in str(outcomes["nano1"].error)
    assert "not enough GPU memory" in str(outcomes["nano1"].error)
    assert "nano1" in str(outcomes["nano2"].error)
    assert not (boards.boards["nano1"].root / "current").exists()


class _CutAtEngine:
    """Loses the connection once the build has begun."""

    def __init__(self, board: LoopbackDevice) -> None:
        self._board = board

    def step_begins(self, device: str, step: Step) -> None:
        if isinstance(step, Gate):
            raise AssertionError("the build was to be cut")
        if isinstance(step, Engine):
            threading.Thread(target=self._cut, daemon=True).start()

    def _cut(self) -> None:
        lock = self._board.root / "engines"
        for _ in range(6000):
            if list(lock.glob("*.log")):
                self._board.cut_connections()
                return
            threading.Event().wait(0.01)

    def step_ends(self, device: str, step: Step) -> None:
        return

    def bytes_settled(self, device: str, count: int) -> None:
        return


class _Shelf:
    """A device that has built an engine, and a shelf here that pulls it."""

    KEY, NAME = "key", "x.engine"

    def __init__(self, board: LoopbackDevice, folder: Path, size: int) -> None:
        self.board, self.folder = board, folder
        self.content = random.Random(0).randbytes(size)
        self.sha256 = hashlib.sha256(self.content).hexdigest()
        (board.root / "engines").mkdir(parents=True)
        (board.root / "cache" / "engines").mkdir(parents=True)
        (board.root / "engines" / self.KEY).write_text(f"{self.NAME} {self.sha256} {size}\n")
        self.there = board.root / "cache" / "engines" / self.NAME
        self.there.write_bytes(self.content)
        self.part = folder / f"{self.KEY}-{self.sha256[:16]}.part"
        self.connection: Connection | None = None

    @contextlib.contextmanager
    def _shell(self, name: str) -> Iterator[DeviceShell]:
        with self.board.connect() as self.connection:
            yield DeviceShell(self.connection, str(self.board.root), "")

    def take(self, pacer: Pacer = NO_LIMIT) -> bytes:
        shelf = EngineShelf(self.folder, self._shell, lambda name: True, pacer)
        return Path(shelf.take(self.KEY, "nano1").blob.source).read_bytes()


class _CutAfter:
    """Loses the connection after so many bytes."""

    def __init__(self, shelf: _Shelf, count: int) -> None:
        self._shelf, self._left = shelf, count

    def take(self, count: int) -> None:
        self._left -= count
        if self._left <= 0:
            self._shelf.board.cut_connections()


def test_a_pull_that_was_cut_goes_on_where_it_ended(board: LoopbackDevice, tmp_path: Path) -> None:
    """What has come is overwritten on the device meanwhile, so only a pull that goes on gets it right."""
    shelf = _Shelf(board, tmp_path / "shelf", 24 << 20)
    with pytest.raises(UnreachableError):
        shelf.take(_CutAfter(shelf, 4 << 20))
    got = shelf.part.stat().st_size
    assert 0 < got < 24 << 20
    assert shelf.part.read_bytes() == shelf.content[:got]
    shelf.there.write_bytes(bytes(got) + shelf.content[got:])
    assert shelf.take() == shelf.content
    assert not shelf.part.exists()


def test_a_damaged_part_of_a_pull_is_pulled_anew(board: LoopbackDevice, tmp_path: Path) -> None:
    shelf = _Shelf(board, tmp_path / "shelf", 1 << 20)
    shelf.folder.mkdir()
    shelf.part.write_bytes(bytes(300_000))
    assert shelf.take() == shelf.content


def test_an_engine_that_is_not_what_the_device_says_is_not_passed_on(
    board: LoopbackDevice, tmp_path: Path
) -> None:
    shelf = _Shelf(board, tmp_path / "shelf", 1 << 20)
    shelf.there.write_bytes(bytes(1 << 20))
    with pytest.raises(DeployError, match="changed while it was pulled"):
        shelf.take()
    assert not list(shelf.folder.iterdir())


def test_the_script_runs_in_the_releases_own_environment() -> None:
    script = engine_script(NANO1, "/home/edge/starsd")
    assert "export STARSD_CACHE=/home/edge/starsd/cache\n" in script
    assert script.endswith("-m starsd_edge bundle engine bundle/b\n")
