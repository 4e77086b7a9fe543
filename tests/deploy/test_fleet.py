"""A draft device and a target together: keys exchanged, rotated, revoked; roll back; pace. Real sshd."""

from __future__ import annotations

import io
import json
import re
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner
from rich.console import Console

from starsd_deploy.apply import Ending, Pace, apply_plan, batches, parse_batch
from starsd_deploy.cli import command
from starsd_deploy.commands import ServiceLink
from starsd_deploy.device import DeviceShell
from starsd_deploy.facts import State
from starsd_deploy.inventory import Device, Fleet, Role
from starsd_deploy.lease import Holder
from starsd_deploy.operate import log_lines, revoke, roll_back, rotate_key
from starsd_deploy.plan import PLAN_VERSION, DevicePlan, Plan, plan_device, write_plan
from starsd_deploy.progress import FleetProgress
from starsd_deploy.runner import RunContext, gather_facts
from starsd_deploy.ssh import Connection
from starsd_deploy.ssh_config import SshFiles, load_ssh_files
from starsd_deploy.steps import Prepare
from starsd_deploy.sudo import SudoPassword
from starsd_deploy.survey import Login, survey
from starsd_edge.errors import UsageError
from tests.deploy.loopback import SSHD, LoopbackDevice
from tests.deploy.test_apply import Quiet, free_port, never_ask
from tests.deploy.toys import make_bundle, wanted_factory

HOLDER = Holder("test@desk", "apply")


class Site:
    """Two devices, their inventory, and how to reach them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.boards = {name: LoopbackDevice(folder / name) for name in ("desk", "nano1")}
        config = folder / "ssh_config"
        config.write_text(f"Host *\n  UserKnownHostsFile {folder}/known_hosts\n  IdentitiesOnly yes\n")
        files: SshFiles = replace(load_ssh_files(config), agent_socket="")
        self.login = Login(files)
        self.config = config
        desk = self.boards["desk"].device(
            "desk", roles=(Role.DRAFT,), bundle="", draft_port=free_port(), start_timeout_s=30.0, drain_s=1.0
        )
        nano = self.boards["nano1"].device(
            "nano1",
            service=("desk",),
            bundle=str(make_bundle(folder, "x")),
            endpoint_port=free_port(),
            start_timeout_s=30.0,
            drain_s=1.0,
        )
        self.fleet = Fleet(path="fleet.toml", devices=(desk, nano))

    def plan(self, version: str) -> Plan:
        """Plans for both, made as the command line makes them, with the stand-in program."""
        plans: list[DevicePlan] = []
        found = survey(self.fleet, self.fleet.devices, self.login, 2, lambda: 0.0)
        desk_facts = found["desk"].facts
        assert desk_facts is not None
        for device in self.fleet.devices:
            facts = found[device.name].facts
            assert facts is not None
            address = f"tcp://127.0.0.1:{self.fleet.device('desk').draft_port}"
            link = ServiceLink("desk", address, desk_facts.state.public_key, is_fleet_device=True)
            services = (link,) if device.service else ()
            want = wanted_factory(self.folder, version, services=services)(device, facts)
            if device.service:
                admitted = desk_facts.state.trusted.get(device.name, "")
                want = msgspec.structs.replace(want, trusted_by={"desk": admitted})
            plans.append(plan_device(device, facts, want))
        return Plan(PLAN_VERSION, "fleet.toml", tuple(plans))

    def apply(self, plan: Plan) -> dict[str, Ending]:
        console = Console(file=io.StringIO())
        with FleetProgress(console, plan.devices) as progress:
            outcomes = apply_plan(
                self.fleet, plan, self.login, Pace(), HOLDER, SudoPassword(never_ask), progress
            )
        assert [outcome.error for outcome in outcomes] == [None] * len(outcomes)
        return {outcome.device: outcome.ending for outcome in outcomes}

    def state(self, name: str) -> State:
        with self.login.connect(self.fleet.device(name)) as connection:
            return gather_facts(connection, self.fleet.device(name)).state


@pytest.fixture
def site(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Site]:
    if SSHD is None:
        request.getfixturevalue("board")  # says loudly that this did not run
    made = Site(tmp_path)
    try:
        yield made
    finally:
        for board in made.boards.values():
            board.close()


def context_of(connection: Connection, device: Device) -> RunContext:
    facts = gather_facts(connection, device)
    return RunContext(facts, SudoPassword(never_ask), {}, threading.Semaphore(1), Quiet())


@pytest.mark.slow
def test_life_of_a_fleet(site: Site) -> None:
    """One story, as each chapter needs the one before: deploy, again, update, roll back, rotate, revoke."""
    nano, desk = site.fleet.device("nano1"), site.fleet.device("desk")
    assert site.apply(site.plan("1.0")) == {"desk": Ending.CHANGED, "nano1": Ending.CHANGED}
    service_key = site.state("desk").public_key
    pinned = f"{service_key} tcp://127.0.0.1:{desk.draft_port}"
    assert site.state("nano1").pinned == {"desk": pinned}
    assert site.state("desk").trusted == {"nano1": site.state("nano1").public_key}
    assert site.apply(site.plan("1.0")) == {"desk": Ending.UNCHANGED, "nano1": Ending.UNCHANGED}

    site.apply(site.plan("2.0"))
    before = site.state("nano1")
    with site.login.connect(nano) as connection:
        release = roll_back(connection, nano, "", context_of(connection, nano), HOLDER)
        assert connection.bytes_sent == 0
    after = site.state("nano1")
    assert release == after.current == after.running
    assert release.startswith("1.0-")
    assert after.releases == before.releases

    with site.login.connect(nano) as connection, site.login.connect(desk) as service:
        shells = {"desk": DeviceShell(service, desk.root, "")}
        key = rotate_key(connection, nano, shells, context_of(connection, nano), HOLDER)
        assert key != before.public_key
        assert site.state("nano1").public_key == key
        assert site.state("desk").trusted == {"nano1": key}
        assert not site.state("nano1").restart_pending
        revoke("nano1", shells)
    assert site.state("desk").trusted == {}
    assert site.apply(site.plan("1.0")) == {"desk": Ending.CHANGED, "nano1": Ending.CHANGED}
    assert site.state("desk").trusted == {"nano1": key}

    with site.login.connect(nano) as connection:
        facts = gather_facts(connection, nano)
        lines = list(log_lines(connection, nano, facts, 5, SudoPassword(never_ask), follow=False))
    assert any("stand-in 1.0 serves" in line for line in lines)


def fleet_toml(site: Site) -> Path:
    lines = []
    for device in site.fleet.devices:
        lines += [f"[devices.{device.name}]", 'address = "127.0.0.1"', f"port = {device.port}"]
        lines += [
            f'user = "{device.user}"',
            f'identity_file = "{device.identity_file}"',
            f'root = "{device.root}"',
        ]
        lines += [f'roles = ["{device.role.value}"]', 'unit = "user"']
        lines += [f"draft_port = {device.draft_port}", f"endpoint_port = {device.endpoint_port}"]
        lines += ['bundle = "b"', 'service = ["desk"]'] if device.role is Role.TARGET else []
    path = site.folder / "fleet.toml"
    path.write_text("\n".join(lines))
    return path


def test_doctor_status_and_exec_from_the_command_line(site: Site) -> None:
    options = ["--fleet", str(fleet_toml(site)), "--ssh-config", str(site.config)]
    doctor = CliRunner().invoke(command, ["doctor", *options])
    assert "ok      python: " in doctor.output
    report = CliRunner().invoke(command, ["doctor", "--report", *options])
    assert "device 1\n  role: draft" in report.output
    assert not re.search(r"127\.0\.0\.1|nano1|desk", report.output)
    status = CliRunner().invoke(command, ["status", *options, "--limit", "nano*", "--json"])
    assert '"device": "nano1"' in status.output
    assert status.exit_code == 0
    done = CliRunner().invoke(command, ["exec", *options, "--limit", "desk", "--", "echo", "a b"])
    assert done.output == "desk: exit status 0\na b\n"


def test_one_lost_device_does_not_end_the_others(site: Site) -> None:
    far = msgspec.structs.replace(site.fleet.device("nano1"), port=1)
    fleet = Fleet("fleet.toml", (site.fleet.device("desk"), far))
    found = survey(fleet, fleet.devices, site.login, 2, lambda: 0.0)
    assert found["desk"].facts is not None
    assert "nano1: cannot reach 127.0.0.1 port 1" in str(found["nano1"].error)


def plan_for(name: str, role: Role = Role.TARGET) -> DevicePlan:
    return DevicePlan(name, role, "r", "/r", "", (Prepare("/r"),))


def test_drafts_go_first_and_targets_in_batches() -> None:
    drafts = (plan_for("d", Role.DRAFT), plan_for("e", Role.DRAFT))
    plans = (plan_for("a"), *drafts, plan_for("b"), plan_for("c"))
    assert [[p.device for p in group] for group in batches(plans, 2)] == [["d"], ["e"], ["a", "b"], ["c"]]
    assert [[p.device for p in group] for group in batches(plans, 0)] == [["d"], ["e"], ["a", "b", "c"]]


def test_failures_beyond_the_limit_stop_the_rest(tmp_path: Path) -> None:
    devices = tuple(
        Device(name=name, roles=(Role.TARGET,), bundle="/b", address="127.0.0.1", port=1) for name in "abcd"
    )
    fleet = Fleet("fleet.toml", devices)
    plan = Plan(PLAN_VERSION, "fleet.toml", tuple(plan_for(name) for name in "abcd"))
    config = tmp_path / "config"
    config.write_text(f"Host *\n  UserKnownHostsFile {tmp_path}/known\n")
    login = Login(load_ssh_files(config))

    def endings(fail_percent: float) -> list[Ending]:
        pace = Pace(batch=1, fail_percent=fail_percent)
        outcomes = apply_plan(fleet, plan, login, pace, HOLDER, SudoPassword(never_ask), Quiet())
        return [outcome.ending for outcome in outcomes]

    assert endings(0) == [Ending.FAILED] + [Ending.NOT_STARTED] * 3
    assert endings(25) == [Ending.FAILED] * 2 + [Ending.NOT_STARTED] * 2
    assert endings(100) == [Ending.FAILED] * 4


def test_wait_is_between_batches_of_targets_that_were_changed(tmp_path: Path) -> None:
    devices = tuple(
        Device(name=name, roles=(Role.TARGET,), bundle="/b", address="127.0.0.1", port=1) for name in "abc"
    )
    draft = Device(name="d", roles=(Role.DRAFT,), head="/h", address="127.0.0.1", port=1)
    fleet = Fleet("fleet.toml", (draft, *devices))
    unchanged = msgspec.structs.replace(plan_for("b"), steps=())
    plans = (plan_for("d", Role.DRAFT), plan_for("a"), unchanged, plan_for("c"))
    config = tmp_path / "config"
    config.write_text(f"Host *\n  UserKnownHostsFile {tmp_path}/known\n")
    login = Login(load_ssh_files(config))
    waited: list[float] = []
    outcomes = apply_plan(
        fleet,
        Plan(PLAN_VERSION, "fleet.toml", plans),
        login,
        Pace(batch=1, pause_s=60.0, fail_percent=100.0),
        HOLDER,
        SudoPassword(never_ask),
        Quiet(),
        pause=waited.append,
    )
    assert [outcome.ending for outcome in outcomes] == [Ending.FAILED] * 2 + [Ending.UNCHANGED, Ending.FAILED]
    assert waited == [60.0]  # after a; b is as it should be, d is no target, and nothing follows c


@pytest.mark.parametrize(
    ("text", "total", "size"), [("25%", 10, 3), ("100%", 7, 7), ("1%", 3, 1), ("4", 10, 4)]
)
def test_batch_sizes(text: str, total: int, size: int) -> None:
    assert parse_batch(text, total) == size


@pytest.mark.parametrize("text", ["", "x%", "0", "-1", "1.5"])
def test_batch_that_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--batch"):
        parse_batch(text, 10)


def test_a_lost_device_stops_no_command_for_the_others(site: Site) -> None:
    """In the order of the inventory the lost one comes first."""
    path = fleet_toml(site)
    path.write_text(
        path.read_text().replace(
            "[devices.desk]",
            '[devices.away]\naddress = "127.0.0.1"\nport = 1\nroles = ["draft"]\n\n[devices.desk]',
        )
    )
    options = ["--fleet", str(path), "--ssh-config", str(site.config)]
    done = CliRunner().invoke(command, ["exec", *options, "--limit", "away,desk", "--", "echo", "here"])
    assert "desk: exit status 0\nhere\n" in done.output
    assert "away: cannot reach 127.0.0.1 port 1" in done.output
    assert done.exit_code != 0
    unlocked = CliRunner().invoke(command, ["unlock", *options, "--limit", "away,desk"])
    assert "desk: was not locked" in unlocked.output
    assert unlocked.exit_code != 0


def test_unlock_tells_whether_there_was_a_lease_and_leaves_a_bare_device_bare(site: Site) -> None:
    options = ["--fleet", str(fleet_toml(site)), "--ssh-config", str(site.config), "--limit", "nano1"]
    device = site.fleet.device("nano1")
    assert CliRunner().invoke(command, ["unlock", *options]).output == "nano1: was not locked\n"
    assert not Path(device.root).exists()
    with site.login.connect(device) as connection:
        DeviceShell(connection, device.root, "gone").do("lease_take", "{}")
    assert CliRunner().invoke(command, ["unlock", *options]).output == "nano1: unlocked\n"
    assert CliRunner().invoke(command, ["unlock", *options]).output == "nano1: was not locked\n"


def test_what_would_ask_is_refused_without_a_terminal_and_changes_nothing(site: Site) -> None:
    """`CliRunner` has no terminal, as cron has none."""
    options = ["--fleet", str(fleet_toml(site)), "--ssh-config", str(site.config)]
    file = site.folder / "plan.json"
    file.write_bytes(write_plan(site.plan("1.0")))
    refused = CliRunner().invoke(command, ["apply", *options, str(file)])
    assert isinstance(refused.exception, UsageError)
    assert str(refused.exception) == "Change 2 of 2 devices? There is no terminal to ask on: add -y"
    assert not site.state("desk").current
    done = CliRunner().invoke(command, ["apply", *options, "-y", str(file)])
    assert done.exit_code == 0, done.output
    again = CliRunner().invoke(command, ["rollback", *options])
    assert isinstance(again.exception, UsageError)
    assert str(again.exception).endswith("desk, nano1? There is no terminal to ask on: add -y")


def test_rollback_tells_each_device_and_json_has_them_all(site: Site) -> None:
    site.apply(site.plan("1.0"))
    site.apply(site.plan("2.0"))
    options = ["--fleet", str(fleet_toml(site)), "--ssh-config", str(site.config)]
    done = CliRunner().invoke(command, ["rollback", *options, "--yes", "--json"])
    assert done.exit_code == 0, done.output
    live = {each["device"]: each["live"].partition("-")[0] for each in json.loads(done.stdout)}
    assert live == {"desk": "1.0", "nano1": "1.0"}
    again = CliRunner().invoke(command, ["rollback", *options, "--yes", "--json"])
    assert again.exit_code != 0
    assert [each["live"] for each in json.loads(again.stdout)] == [None, None]
