"""The monitor's benchmark runs end to end and measures what it says."""

from __future__ import annotations

import json
from pathlib import Path

from click.testing import CliRunner

from starsd_edge.bench.monitor_cli import command


def test_the_benchmark_watches_a_real_monitor(tmp_path: Path) -> None:
    file = tmp_path / "cost.json"
    options = ["--devices", "3", "--seconds", "1", "--columns", "100", "--lines", "24"]
    CliRunner().invoke(command, [*options, "--json", str(file)], catch_exceptions=False)
    cost = json.loads(file.read_text())
    assert (3, 100, 24) == (cost["devices"], cost["columns"], cost["lines"])
    for figure in ("cpu_share", "link_bytes_per_s", "terminal_bytes_per_s", "publish_ms"):
        assert cost[figure] > 0
