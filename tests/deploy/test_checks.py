"""Doctor says what hinders and how to mend it; each row is one device that was met in the field."""

from __future__ import annotations

import pytest

from starsd_deploy.checks import Level, blockers, check_device
from starsd_deploy.inventory import Device, Role, Runtime, UnitScope
from tests.deploy.samples import ORIN_NANO, facts_with

NOW_S = 1795982559.0
TARGET = Device(name="nano1", roles=(Role.TARGET,), bundle="/b", service=("desk",))
PLAIN = {"reach": "10.0.0.2:7731 open", "routes": "10.0.0.2:7731 10.0.0.2 dev eth0"}


def level_of(name: str, device: Device, sections: dict[str, str], now_s: float = NOW_S) -> tuple[Level, str]:
    found = {check.name: check for check in check_device(device, facts_with(**sections), now_s)}
    return found[name].level, found[name].fix


def change(**values: object) -> Device:
    fields = {name: getattr(TARGET, name) for name in TARGET.__struct_fields__}
    return Device(**(fields | values))


def test_healthy_device_has_nothing_to_mend() -> None:
    checks = check_device(TARGET, facts_with(**PLAIN), NOW_S)
    assert [check.name for check in checks if check.level is not Level.OK] == []
    assert all(not check.fix for check in checks)


@pytest.mark.parametrize(
    ("name", "device", "sections", "level", "fix"),
    [
        ("system", TARGET, {"uname": "Darwin\narm64\n23\nmac"}, Level.BLOCKER, "Linux"),
        ("system", TARGET, {"uname": "Linux\narmv7l\n5\npi"}, Level.BLOCKER, "aarch64"),
        ("glibc", TARGET, {"libc": "glibc 2.27"}, Level.BLOCKER, "JetPack 5"),
        ("glibc", TARGET, {"libc": ""}, Level.BLOCKER, "glibc 2.28"),
        (
            "jetpack",
            TARGET,
            {**ORIN_NANO, "dpkg": "nvidia-l4t-core 38.4.0-1"},
            Level.WARNING,
            "nvidia-jetpack",
        ),
        (
            "jetpack",
            change(runtime=Runtime.TENSORRT),
            {**ORIN_NANO, "dpkg": "nvidia-l4t-core 38.4.0-1"},
            Level.BLOCKER,
            "sudo apt install nvidia-jetpack",
        ),
        (
            "tensorrt",
            change(runtime=Runtime.TENSORRT),
            {**ORIN_NANO, "python": "/usr/bin/python3 3.10.12 linux-aarch64 venv - - -"},
            Level.BLOCKER,
            "python3-libnvinfer",
        ),
        (
            "tensorrt",
            change(runtime=Runtime.TENSORRT),
            {**ORIN_NANO, "container": "docker"},
            Level.BLOCKER,
            "host",
        ),
        ("power mode", TARGET, {**ORIN_NANO, "nvpmodel": "NV Power Mode: 15W\n0"}, Level.WARNING, "nvpmodel"),
        ("groups", TARGET, {**ORIN_NANO, "user": "edge\n1000\nedge sudo\n/h"}, Level.WARNING, "video,render"),
        (
            "python",
            TARGET,
            {"python": "/usr/bin/python3 3.8.10 linux-aarch64 venv - - -"},
            Level.BLOCKER,
            "3.10",
        ),
        ("python", TARGET, {"python": ""}, Level.BLOCKER, "apt install python3"),
        ("python", change(python="python3.12"), {}, Level.BLOCKER, "apt install"),
        ("tools", TARGET, {"tools": "dd\nstat"}, Level.BLOCKER, "util-linux"),
        (
            "memory",
            TARGET,
            {"memory": "MemTotal: 8000000 kB\nMemAvailable: 900000 kB"},
            Level.WARNING,
            "multi-user",
        ),
        ("disk", TARGET, {"disk": "/dev/x 9 9 100000 99% /\n/dev/x 9 9 9 9% /"}, Level.WARNING, "root"),
        ("systemd", TARGET, {"systemd": "init\n", "tools": "sha256sum"}, Level.BLOCKER, "systemd"),
        ("systemd", TARGET, {"systemd": "sleep\noffline"}, Level.BLOCKER, "boot the device with systemd"),
        ("systemd", TARGET, {"systemd": "unknown\noffline"}, Level.BLOCKER, "boot the device with systemd"),
        ("systemd", TARGET, {"systemd": "sleep\n"}, Level.BLOCKER, "boot the device with systemd"),
        (
            "systemd",
            TARGET,
            {"systemd": "unknown\nrunning"},
            Level.OK,
            "",
        ),  # process 1 is hidden from this user
        ("systemd", change(unit=UnitScope.USER), {"systemd": "systemd\noffline"}, Level.BLOCKER, "PAM"),
        ("sudo", TARGET, {"sudo": "none", "unit": "disabled\ninactive\n0"}, Level.BLOCKER, 'unit = "user"'),
        ("linger", change(unit=UnitScope.USER), {"linger": "no"}, Level.BLOCKER, "enable-linger edge"),
        ("port", TARGET, {"unit": "disabled\ninactive\n0"}, Level.BLOCKER, "set `endpoint_port` in"),
        (
            "port",
            change(roles=(Role.DRAFT,), service=()),
            {"unit": "disabled\ninactive\n0"},
            Level.BLOCKER,
            "set `draft_port` in",
        ),
        ("service", TARGET, {"reach": "10.0.0.2:7731 timed out"}, Level.WARNING, "firewall"),
        (
            "service",
            TARGET,
            {"routes": "10.0.0.2:7731 ", "reach": "10.0.0.2:7731 [Errno 101] Network is unreachable"},
            Level.WARNING,
            "ip route",
        ),
        ("mtu", TARGET, {"mtu": "10.0.0.2:7731 1500 wg0 lost"}, Level.WARNING, "dev wg0 mtu 1280"),
        ("mtu", TARGET, {"mtu": "10.0.0.2:7731 1500 eth0 unknown"}, Level.OK, ""),
        ("service", change(service=()), {}, Level.WARNING, "decoded plainly"),
        ("clock", TARGET, {"clock": "0\nboot\n5"}, Level.WARNING, "set-ntp"),
    ],
)
def test_what_is_wrong_is_named_with_its_fix(
    name: str, device: Device, sections: dict[str, str], level: Level, fix: str
) -> None:
    found, said = level_of(name, device, {**PLAIN, **sections})
    assert (found, fix in said) == (level, True), said


@pytest.mark.parametrize(
    ("name", "device", "sections"),
    [
        ("sudo", TARGET, {"sudo": "none"}),  # the unit is there: nothing needs root any more
        ("port", TARGET, {}),  # taken, by ourselves
        ("groups", TARGET, {**ORIN_NANO, "user": "root\n0\nroot\n/root"}),
        ("board", TARGET, {**ORIN_NANO, "tegra_release": "# R41 (release), REVISION: 1.0, BOARD: generic"}),
        ("disk", TARGET, {"disk": "/dev/x 9 9 99999999 9% /\n/dev/x 0 0 0 - /"}),  # btrfs counts no inodes
    ],
)
def test_what_only_looks_wrong_is_fine(name: str, device: Device, sections: dict[str, str]) -> None:
    facts = facts_with(**{**PLAIN, **sections})
    assert name not in {check.name for check in blockers(check_device(device, facts, NOW_S))}
