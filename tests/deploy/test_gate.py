"""The health gate's script in a real shell; the release's Python is a stand-in that answers as told."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from starsd_deploy.commands import ServiceLink, bundle_link, gate_script
from starsd_deploy.inventory import Device, Role

TARGET = Device(name="jet1", address="jet1", roles=(Role.TARGET,), bundle="x.bundle")
VERIFY = f"bundle verify {bundle_link(TARGET)} --on-device"
SERVICES = tuple(ServiceLink(name, f"tcp://{name}:7731", "", True) for name in ("one", "two"))
PYTHON = """\
#!/bin/sh
# called as: python -I -m starsd_edge WORDS...
shift 3
echo "$*" >>calls
case "$*" in {failing}) exit 1 ;; esac
"""


def run_gate(release: Path, failing: str, services: tuple[ServiceLink, ...]) -> tuple[int, str, list[str]]:
    python = release / "venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(PYTHON.format(failing=failing))
    gate = release / "gate"
    gate.write_text(gate_script(TARGET, str(release), services))
    for file in (python, gate):
        file.chmod(0o755)
    done = subprocess.run([str(gate)], capture_output=True, text=True)
    return done.returncode, done.stderr, (release / "calls").read_text().splitlines()


@pytest.mark.parametrize("down", ["one", "two"])
def test_one_draft_service_that_answers_is_enough(tmp_path: Path, down: str) -> None:
    code, _, calls = run_gate(tmp_path, f"*tcp://{down}:*", SERVICES)
    assert code == 0
    assert len([call for call in calls if call.startswith("ping ")]) == 2


def test_without_any_service_the_release_does_not_go_live(tmp_path: Path) -> None:
    code, told, _ = run_gate(tmp_path, "ping*", SERVICES)
    assert code != 0
    assert "no draft service can be reached" in told


def test_a_bundle_that_fails_its_self_test_ends_the_gate_at_once(tmp_path: Path) -> None:
    code, _, calls = run_gate(tmp_path, "bundle*", SERVICES)
    assert code != 0
    assert calls == [VERIFY]


def test_a_target_without_a_service_is_asked_for_none(tmp_path: Path) -> None:
    code, _, calls = run_gate(tmp_path, "ping*", ())
    assert (code, calls) == (0, [VERIFY])
