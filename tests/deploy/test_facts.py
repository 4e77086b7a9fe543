"""One script on the device, pure reading here: a real capture, and every print that once fooled a tool."""

from __future__ import annotations

import pytest

from starsd_deploy.facts import State, facts_digest, facts_script, parse_facts
from starsd_deploy.inventory import UnitScope
from starsd_edge.errors import DeployError
from tests.deploy.loopback import LoopbackDevice
from tests.deploy.samples import ORIN_NANO, facts_with, output_with


def test_captured_laptop_with_a_running_draft_service() -> None:
    facts = facts_with()
    assert (facts.hostname, facts.machine, facts.glibc, facts.sudo) == (
        "laptop",
        "x86_64",
        (2, 36),
        "password",
    )
    assert facts.disk_free_bytes == 68052028 * 1024
    assert facts.reach == {"10.0.0.1:22": "[Errno 111] Connection refused"}
    assert facts.mtu == {"10.0.0.1:22": "1500 lab0 passes"}
    assert facts.routes["10.0.0.1:22"].startswith("10.0.0.1 dev lab0")
    state = facts.state
    assert state.current == state.running == "0.1.0-ed3f26a0223d"
    assert (state.unit_active, state.unit_enabled, len(state.unit_sha256)) == (True, True, 64)
    assert state.release(state.current).confirmed
    assert state.manifests[0].role == "draft"
    assert set(state.manifests[0].blobs) == set(state.blobs)
    assert state.public_key == "d$]8>lH>dH+MFfOlL5w)i1Al$EU/CrEW)cu-]JZA"


def test_jetson_with_device_tree_and_packages() -> None:
    facts = facts_with(**ORIN_NANO)
    assert (facts.board.module, facts.board.l4t, facts.board.tensorrt) == (
        "p3767-0005",
        "36.4.4",
        "10.3.0.30",
    )
    assert facts.pythons[0].minor == (3, 10)
    assert (facts.pythons[0].has_ensurepip, facts.pythons[0].has_tensorrt) == (False, True)


def test_device_where_nothing_was_deployed() -> None:
    names = (
        "blobs",
        "bundles",
        "releases",
        "manifests",
        "history",
        "current",
        "public_key",
        "pinned",
        "trusted",
    )
    facts = facts_with(**dict.fromkeys(names, ""), unit="disabled\ninactive\n0", root="/home/edge/x")
    assert facts.state == State(root="/home/edge/x")


def test_inactive_is_not_active_and_disabled_is_not_enabled() -> None:
    state = facts_with(unit="a" * 64 + "\ndisabled\ninactive\n0\n").state
    assert (state.unit_enabled, state.unit_active, state.running) == (False, False, "")


def test_release_that_was_cut_has_reached_nothing() -> None:
    state = facts_with(releases="1.0-aaa complete gated\n1.1-bbb", manifests='{"half').state
    assert [(r.id, r.complete, r.gated, r.confirmed) for r in state.releases] == [
        ("1.0-aaa", True, True, False),
        ("1.1-bbb", False, False, False),
    ]
    assert state.manifests == ()


def test_pins_and_trusted_devices_keep_odd_key_characters() -> None:
    key = "rq:rM>}U?@Lns47E1%kR.o@n%FcmmsL/@{H8]yf7"
    state = facts_with(pinned=f"desk {key} tcp://10.0.0.2:7731 ", trusted=f"nano1 {key}").state
    assert state.pinned == {"desk": f"{key} tcp://10.0.0.2:7731"}
    assert state.trusted == {"nano1": key}


@pytest.mark.parametrize("output", ["", "Welcome to Fish", "@@starsd clock\n1\n", "sh: not found"])
def test_something_else_than_facts_is_refused(output: str) -> None:
    with pytest.raises(DeployError, match="POSIX sh"):
        parse_facts(output)


def test_noise_before_the_facts_is_ignored() -> None:
    assert parse_facts("Last login: today\nmotd\n" + output_with()).hostname == "laptop"


def test_digest_stays_the_same_as_time_goes_by() -> None:
    busier = {"clock": "1\nboot\n99", "memory": "MemAvailable: 1 kB", "lease": "held by somebody"}
    assert facts_digest(facts_with()) == facts_digest(facts_with(**busier))


@pytest.mark.parametrize(
    "change",
    [
        {"current": "releases/x"},
        {"python": "/usr/bin/python3 3.12.3 linux-aarch64 venv - - tensorrt"},
        {"tegra_release": "# R36 (release), REVISION: 4.5, GCID: 41062509, BOARD: generic"},
        {"dpkg": "nvidia-l4t-core 36.4.4-2025\nlibnvinfer10 10.7.0.23-1+cuda12.6"},
        {"libc": "glibc 2.39"},
    ],
)
def test_digest_changes_with_the_state_and_with_the_system_beneath(change: dict[str, str]) -> None:
    """A plan from before an upgrade went through after it."""
    assert facts_digest(facts_with(**ORIN_NANO)) != facts_digest(facts_with(**(ORIN_NANO | change)))


def test_script_runs_on_this_machine_and_quotes_its_arguments(board: LoopbackDevice) -> None:
    root = f"{board.home}/a root with 'quotes'"
    script = facts_script(root, "starsd-target.service", UnitScope.USER, 1, ("127.0.0.1:1",))
    with board.connect() as connection:
        facts = parse_facts(connection.run(script).stdout)
    assert facts.state == State(root=root)
    assert facts.pythons
    assert "127.0.0.1:1" in facts.routes
    assert facts.disk_free_bytes > 0
