"""Every benchmark's JSON names machine and versions; a file that cannot be written is said at once."""

from __future__ import annotations

import importlib
import json
import platform
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from starsd_edge.bench.report import json_option, write_json
from starsd_edge.cli.bench import BENCHES
from starsd_edge.errors import UsageError

WITHOUT_JSON = {"record"}  # writes traces, no figures


@pytest.mark.parametrize("name", sorted(BENCHES.keys() - WITHOUT_JSON))
def test_every_benchmark_takes_the_one_option(name: str) -> None:
    command = importlib.import_module(BENCHES[name].module).command
    (option,) = (each for each in command.params if each.name == "json_file")
    expected = click.Command("expected", params=[])
    json_option(expected)
    assert option.opts == ["--json"]
    assert option.callback is expected.params[0].callback
    assert command.callback.__globals__["write_json"] is write_json


def test_figures_come_with_machine_and_versions(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    write_json(file, {"tokens_per_s": 3.5})
    written = json.loads(file.read_text())
    assert written["tokens_per_s"] == 3.5
    machine = written["machine"]
    assert machine["cpu"]
    assert machine["cores"] >= 1
    assert machine["memory_gib"] >= 1
    assert machine["python"] == platform.python_version()
    assert machine["versions"]["numpy"] == importlib.import_module("numpy").__version__


@pytest.mark.parametrize("path", ["missing/figures.json", "folder"])
def test_a_file_that_cannot_be_written_is_said_before_minutes_are_spent(tmp_path: Path, path: str) -> None:
    (tmp_path / "folder").mkdir()
    measured = []

    @click.command()
    @json_option
    def measure(json_file: Path | None) -> None:
        measured.append(json_file)

    result = CliRunner().invoke(measure, ["--json", str(tmp_path / path)])
    assert result.exit_code != 0
    assert measured == []


def test_a_disk_that_fills_up_is_one_line() -> None:
    with pytest.raises(UsageError, match="/dev/full: cannot be written: No space left"):
        write_json(Path("/dev/full"), {"n": 1})
