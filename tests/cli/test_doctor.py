"""`starsd doctor` on this machine, and what it says of others."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from starsd_edge.cli.doctor import EXTRAS, Finding, Grade, command, measured, packages, runtimes
from starsd_edge.errors import UsageError
from starsd_jetson.export import ExportSettings
from tests.cli.tiny_bundle import make_bundle
from tests.jetson.fake_tensorrt import Context, has_driver, install

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
    assert re.search(
        r"int8 on onnxruntime: \d+\.\d tokens/s plain, \d+\.\d ms; 2 rows \d+\.\dx, 4 rows .*64 rows",
        speed,
    )
    assert "row-invariant to the bit" in exactness


@pytest.mark.model
def test_the_embedded_model_is_measured_in_the_precision_asked_for() -> None:
    speed, exactness = measured(None, quant="int4")
    assert "int4 on onnxruntime: " in speed.found
    assert re.search("row-invariant|rows differ by", exactness.found)


@pytest.fixture(scope="module")
def for_tensorrt(tmp_path_factory: pytest.TempPathFactory) -> str:
    settings = ExportSettings(quant="fp16", flavour="tensorrt", chat_template="chatml")
    return str(make_bundle(tmp_path_factory.mktemp("bundle"), settings))


@pytest.mark.parametrize(
    ("noise", "grade", "said"),
    [
        (
            0.0,
            Grade.OK,
            r"differ by up to 0\.\d+: decisions closer than 0\.\d+, \d+% here, are settled",
        ),
        (1.0, Grade.WARNING, "exact only when decoding plainly"),
    ],
)
def test_a_bundle_is_measured_in_the_runtime_that_serves_it(
    noise: float,
    grade: Grade,
    said: str,
    for_tensorrt: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a board with TensorRT and without ONNX Runtime."""
    install(monkeypatch, "10.3.0", tmp_path / "cache")
    monkeypatch.setattr(Context, "noise", noise)
    speed, exactness = measured(for_tensorrt)
    assert speed.grade is Grade.OK
    assert re.search(r"fp16 on tensorrt: \d+\.\d tokens/s plain, .*64 rows \d+\.\dx", speed.found)
    assert exactness.grade is grade
    assert re.search(said, exactness.found)


def test_the_model_of_the_settings_file_is_measured(
    for_tensorrt: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a deployed board that is the one it serves."""
    install(monkeypatch, "10.3.0", tmp_path / "cache")
    monkeypatch.setenv("STARSD_CONFIG", str(tmp_path))
    (tmp_path / "config.toml").write_text(f'[chat]\nbundle = "{for_tensorrt}"\n')
    speed, _ = measured(None)
    assert "fp16 on tensorrt" in speed.found


def test_a_provider_of_onnx_runtime_is_measured_when_it_is_named(for_tensorrt: str) -> None:
    speed, _ = measured(for_tensorrt, "cpu")
    assert "fp16 on tensorrt (ONNX Runtime, cpu): " in speed.found
    if not has_driver():
        (finding,) = measured(for_tensorrt, "cuda")
        assert finding.grade is Grade.MISSING


def test_a_bundle_that_does_not_run_here_says_why(tmp_path: Path) -> None:
    (finding,) = measured(str(tmp_path))
    assert finding.grade is Grade.MISSING
    assert "not a bundle" in finding.found
    done = run(tmp_path, "doctor", "--measure", "--bundle", str(tmp_path))
    assert done.returncode == 1
    assert "not a bundle" in done.stdout


def test_a_bundle_without_measuring_is_a_slip() -> None:
    with pytest.raises(UsageError, match="--measure"):
        CliRunner().invoke(command, ["--bundle", "somewhere"], catch_exceptions=False)
