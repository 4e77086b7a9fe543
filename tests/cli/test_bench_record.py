"""`starsd bench record` without what it needs."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from starsd_edge.cli import bench_record
from starsd_edge.errors import UnreachableError
from tests.ports import free_port


@pytest.mark.model
def test_a_service_that_is_not_there_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trees were waited for without an end."""
    monkeypatch.setattr(bench_record, "READY_WAIT_S", 0.1)
    out = tmp_path / "traces.npz"
    words = ["--service", f"tcp://127.0.0.1:{free_port()}", "--quant", "int8", "--out", str(out)]
    done = CliRunner().invoke(bench_record.command, words)
    assert isinstance(done.exception, UnreachableError)
    assert "does not draft" in str(done.exception)
    assert not out.exists()
