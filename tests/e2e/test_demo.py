"""`starsd demo` as a newcomer runs it, shortened."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.model, pytest.mark.slow]

STARSD = [sys.executable, "-m", "starsd_edge"]


def demo(*options: str) -> subprocess.CompletedProcess[str]:
    command = [*STARSD, "demo", "--prompts", "2", "--max-tokens", "8", *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)


def test_both_timings_with_real_processes(tmp_path: Path) -> None:
    """Texts are identical on this machine and under an accelerator's timing; figures go to the file."""
    result = demo("--json", str(tmp_path / "demo.json"))
    assert result.returncode == 0, result.stderr
    figures = json.loads((tmp_path / "demo.json").read_text())
    assert figures["profile"] == "this machine"
    assert figures["emulated"]["profile"] == "agx-orin-fp16"
    for part in (figures, figures["emulated"]):
        assert part["prompts"] == part["identical"] == 2
        assert part["plain_tokens_per_s"] > 0
        assert part["starsd_tokens_per_s"] > 0
    assert figures["emulated"]["acceptance_length"] > 1.0
    assert "loading two targets" in result.stdout


def test_a_file_that_cannot_be_written_is_said_before_anything_starts(tmp_path: Path) -> None:
    result = demo("--json", str(tmp_path / "missing" / "demo.json"))
    assert result.returncode == 2
    assert result.stderr.count("\n") == 1
    assert "demo.json" in result.stderr
