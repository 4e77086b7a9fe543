"""`starsd bundle`: what a device's health gate asks of it."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from starsd_edge.cli.bundle import command
from starsd_edge.errors import BundleError, UsageError
from tests.cli.tiny_bundle import make_bundle


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_bundle(tmp_path_factory.mktemp("bundle"))


@pytest.mark.parametrize("flags", [[], ["--on-device"], ["--no-run"]])
def test_whole_bundle_is_verified(bundle: Path, flags: list[str]) -> None:
    done = CliRunner().invoke(command, ["verify", str(bundle), *flags], catch_exceptions=False)
    assert f"{bundle}: complete" in done.output
    assert ("self-test passed" in done.output) == (flags != ["--no-run"])


def test_damaged_file_is_named(bundle: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    copy.mkdir()
    for path in bundle.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    data = bytearray((copy / "model.data").read_bytes())
    data[-1] ^= 1
    (copy / "model.data").write_bytes(data)
    done = CliRunner().invoke(command, ["verify", str(copy), "--on-device"])
    assert isinstance(done.exception, BundleError)
    assert "model.data" in str(done.exception)


def test_only_tensorrt_needs_an_engine(bundle: Path) -> None:
    done = CliRunner().invoke(command, ["engine", str(bundle)])
    assert isinstance(done.exception, UsageError)
    assert "onnxruntime, which needs no engine" in str(done.exception)
