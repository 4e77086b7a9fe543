"""`starsd doctor` on this machine, and what it says of others."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from starsd_edge.cli.doctor import EXTRAS, Finding, Grade, packages, runtimes

ROOT = Path(__file__).parents[2]


def run(keys: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    paths = os.pathsep.join(str(ROOT / part) for part in ("", "server", "jetson", "deploy"))
    return subprocess.run(
        [sys.executable, "-m", "starsd_edge", *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": paths, "STARSD_KEYS": str(keys)},
        timeout=300,
        check=False,
    )


def test_this_machine_is_described_for_scripts(tmp_path: Path) -> None:
    done = run(tmp_path, "doctor", "--json")
    assert done.returncode == 0, done.stderr
    findings = json.loads(done.stdout)
    by_role = {finding["role"]: finding for finding in findings}
    assert by_role["python"]["grade"] == by_role["link"]["grade"] == "ok"
    assert by_role["keys"]["grade"] == "missing"
    assert "starsd keys generate" in by_role["keys"]["fix"]


def test_keys_that_are_there_show_their_fingerprint(tmp_path: Path) -> None:
    made = run(tmp_path, "keys", "generate")
    assert made.returncode == 0, made.stderr
    done = run(tmp_path, "doctor")
    assert ", fingerprint " in done.stdout
    assert "starsd keys pin" in done.stdout


@pytest.mark.parametrize(
    ("installed", "grade", "said"),
    [
        ({"onnxruntime": "1.20", "onnxruntime-gpu": "1.20"}, Grade.WARNING, "exclude each other"),
        ({}, Grade.MISSING, "no ONNX Runtime"),
        ({"onnxruntime": "1.20"}, Grade.OK, "onnxruntime 1.20"),
    ],
)
def test_target_runtimes_that_exclude_each_other_are_named(
    installed: dict[str, str], grade: Grade, said: str
) -> None:
    first = next(runtimes(lambda package: installed.get(package, "")))
    assert first.grade is grade
    assert said in first.found
    assert bool(first.fix) == (grade is not Grade.OK)


@pytest.mark.parametrize("extra", EXTRAS, ids=lambda extra: extra.role)
def test_a_role_without_its_packages_says_what_to_install(extra: object) -> None:
    finding: Finding = packages(extra, lambda _: "")  # type: ignore[arg-type]
    assert finding.grade is Grade.MISSING
    assert "pip install '.[" in finding.fix


@pytest.mark.model
def test_measuring_tells_the_speed_and_whether_trees_are_exact(tmp_path: Path) -> None:
    """On the real model: int8 on a CPU decides in a tree as it does alone."""
    done = run(tmp_path, "doctor", "--measure", "--json")
    assert done.returncode == 0, done.stderr
    measured = [finding for finding in json.loads(done.stdout) if finding["role"] == "measured"]
    assert ["ok", "ok"] == [finding["grade"] for finding in measured]
    speed, exactness = (finding["found"] for finding in measured)
    assert re.search(r"int8: \d+\.\d tokens/s plain; 4 rows \d+\.\dx, 16 rows \d+\.\dx", speed)
    assert "row-invariant to the bit" in exactness
