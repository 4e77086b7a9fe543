"""Every benchmark's JSON names machine and versions; a file that cannot be written is said at once."""

from __future__ import annotations

import importlib
import json
import platform
import resource
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from starsd_edge.bench.report import json_option, write_json
from starsd_edge.bench.result_files import picture_option
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


@pytest.mark.parametrize("path", ["missing/figures.json", "folder", "file/figures.json", "loop"])
def test_a_file_that_cannot_be_written_is_said_before_minutes_are_spent(tmp_path: Path, path: str) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    (tmp_path / "loop").symlink_to("loop")
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


@pytest.mark.parametrize("missing", ["f/figures.json", "picture.doc", "picture"])
def test_a_picture_that_cannot_be_drawn_is_said_before_minutes_are_spent(
    tmp_path: Path, missing: str
) -> None:
    measured = []

    @click.command()
    @picture_option("--png", "png_file", "There.")
    def measure(png_file: Path | None) -> None:
        measured.append(png_file)

    assert CliRunner().invoke(measure, ["--png", str(tmp_path / missing)]).exit_code != 0
    assert measured == []


def test_older_figures_stay_until_the_newer_are_whole(tmp_path: Path) -> None:
    """The file was emptied first."""
    file = tmp_path / "figures.json"
    write_json(file, {"n": 1})
    older = file.read_text()
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits := resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    try:
        with pytest.raises(UsageError, match="cannot be written: File too large"):
            write_json(file, {"n": "2" * 1000})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limits, limits))
    assert file.read_text() == older
    assert [file] == list(tmp_path.iterdir())


def test_streams_are_written_to_and_not_replaced(tmp_path: Path) -> None:
    """`--json /dev/stdout` behind the table, also where a shell leads that into a file."""
    program = (
        "from pathlib import Path; from starsd_edge.bench.report import write_json; "
        "print('table', flush=True); write_json(Path('/dev/stdout'), {'n': 1})"
    )
    with (tmp_path / "out").open("w") as out:
        subprocess.run([sys.executable, "-c", program], stdout=out, check=True)
    text = (tmp_path / "out").read_text()
    first, _, rest = text.partition("\n")
    assert first == "table"
    assert json.loads(rest)["n"] == 1
