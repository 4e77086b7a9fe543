"""The benchmark measures what it says, on a model small enough for a test."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from starsd_edge.bundle import Bundle
from starsd_edge.cli.main import cli
from starsd_jetson import bench_target


def test_a_step_copies_nothing_of_the_past(tiny: Callable[[str], Any], tmp_path: Path) -> None:
    tiny("llama grouped").export(tmp_path / "bundle")
    speed = bench_target.measure(Bundle.open(tmp_path / "bundle"), 1, peer=lambda: 2.0)
    assert speed.kv_bytes_copied_per_step == 0
    assert speed.kv_bytes_copied_by_growth > 0
    assert speed.bitwise
    assert (speed.noise, speed.guard_rate) == (0.0, 0.0)
    assert set(speed.costs_s) == {1, 2, 4, 8, 16, 32, 64}
    assert speed.peer_tokens_per_s == bench_target.STEPS / 2.0
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
