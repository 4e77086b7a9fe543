"""The benchmark measures what it says, on a model small enough for a test."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from starsd_edge.bundle import Bundle
from starsd_edge.cli.main import cli
from starsd_edge.errors import MissingDependencyError, UsageError
from starsd_jetson import target_speed
from starsd_jetson.export import ExportSettings, export
from starsd_jetson.onnx_target import OnnxTarget
from starsd_jetson.trt_target import TrtTarget
from tests.jetson.fake_tensorrt import install


def test_a_step_copies_nothing_of_the_past(tiny: Callable[[str], Any], tmp_path: Path) -> None:
    tiny("llama grouped").export(tmp_path / "bundle")
    speed = target_speed.measure(
        Bundle.open(tmp_path / "bundle"), OnnxTarget, 1, open_peer=lambda: lambda: 2.0
    )
    assert speed.kv_bytes_copied_per_step == 0
    assert speed.kv_bytes_copied_by_growth > 0
    assert speed.bitwise
    assert (speed.noise, speed.guard_rate) == (0.0, 0.0)
    assert set(speed.costs_s) == {1, 2, 4, 8, 16, 32, 64}
    assert speed.device_memory_bytes == 0
    assert speed.peer_tokens_per_s == target_speed.STEPS / 2.0
    assert speed.ratio == pytest.approx(speed.plain_tokens_per_s / speed.peer_tokens_per_s)


def test_the_command_writes_what_it_prints(tiny: Callable[[str], Any], tmp_path: Path) -> None:
    tiny("llama grouped").export(tmp_path / "bundle")
    arguments = [
        "bench",
        "target",
        str(tmp_path / "bundle"),
        "--threads",
        "1",
        "--json",
        str(tmp_path / "out"),
    ]
    done = CliRunner().invoke(cli, arguments, catch_exceptions=False)
    assert done.exit_code == 0
    (row,) = json.loads((tmp_path / "out").read_text())["rows"]
    assert row["threads"] == 1
    assert row["plain_tokens_per_s"] > 0


def test_a_bundle_for_tensorrt_is_measured_in_tensorrt(
    tiny: Callable[[str], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = ExportSettings(quant="fp16", flavour="tensorrt")
    bundle = export(tiny("llama grouped").folder, tmp_path / "bundle", settings)
    install(monkeypatch, "10.3.0", tmp_path / "cache")
    speed = target_speed.measure(bundle, TrtTarget, 0)
    assert set(speed.costs_s) == {1, 2, 4, 8, 16, 32, 64}
    assert speed.kv_bytes_copied_per_step == speed.kv_bytes_copied_by_growth == 0
    assert speed.device_memory_bytes > 0
    assert speed.exact_tree


def test_the_peer_is_not_part_of_the_peak(tiny: Callable[[str], Any], tmp_path: Path) -> None:
    tiny("llama grouped").export(tmp_path / "bundle")
    grown: list[Any] = []

    def open_peer() -> Callable[[], float]:
        status = Path("/proc/self/status").read_text()
        resident = int(status.split("VmRSS:")[1].split()[0]) << 10
        # What a peer adds that is larger than anything this process has had.
        grown.append(np.ones(target_speed.peak_bytes() - resident + (256 << 20), np.uint8))
        return lambda: 1.0

    speed = target_speed.measure(Bundle.open(tmp_path / "bundle"), OnnxTarget, 1, open_peer)
    assert speed.peak_memory_bytes + (128 << 20) < target_speed.peak_bytes()


def test_a_system_that_tells_no_peak_has_none(tmp_path: Path) -> None:
    (tmp_path / "status").write_text("Name:\tstarsd\nVmHWM:\t    2048 kB\n")
    assert target_speed.peak_bytes(tmp_path / "status") == 2 << 20
    assert target_speed.peak_bytes(tmp_path / "none") == 0


@pytest.mark.parametrize(
    ("said", "arguments"),
    [
        ("--gguf FILE", ["--peer", "llama.cpp"]),
        ("--threads is for a CPU", ["--threads", "1"]),
    ],
)
def test_what_cannot_be_compared_is_refused(
    said: str, arguments: list[str], tiny: Callable[[str], Any], tmp_path: Path
) -> None:
    """llama.cpp with the embedded model's weights beside another model says nothing of either."""
    settings = ExportSettings(quant="fp16", flavour="tensorrt")
    export(tiny("llama grouped").folder, tmp_path / "bundle", settings)
    with pytest.raises(UsageError, match=said):
        CliRunner().invoke(
            cli, ["bench", "target", str(tmp_path / "bundle"), *arguments], catch_exceptions=False
        )


def test_a_peer_that_is_not_installed_is_told_before_anything_is_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A large model was loaded and measured first."""
    monkeypatch.setitem(sys.modules, "llama_cpp", None)
    monkeypatch.setattr("starsd_jetson.bench_target.open_bundle", None)
    with pytest.raises(MissingDependencyError, match="pip install llama-cpp-python"):
        CliRunner().invoke(cli, ["bench", "target", "--peer", "llama.cpp"], catch_exceptions=False)
