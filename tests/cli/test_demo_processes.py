"""The demo's child processes: one that cannot start ends the demo as it would have ended itself."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from starsd_edge.demo.processes import DraftService
from starsd_edge.errors import MissingDependencyError

ROOT = Path(__file__).parents[2]


def test_a_service_without_torch_is_a_missing_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "torch.py").write_text("raise ModuleNotFoundError('No module named torch', name='torch')\n")
    paths = [tmp_path, ROOT, ROOT / "server", ROOT / "jetson", *sys.path]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, paths)))
    with pytest.raises(MissingDependencyError, match=r"the draft service ended .*torch package: pip install"):
        DraftService([]).__enter__()
