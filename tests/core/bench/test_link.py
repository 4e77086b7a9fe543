"""The link's benchmark runs end to end and measures what it says."""

from __future__ import annotations

import json
from pathlib import Path

from click.testing import CliRunner

from starsd_edge.bench.link_cli import command


def test_the_benchmark_compares_a_round_trip_with_a_bare_echo(tmp_path: Path) -> None:
    file = tmp_path / "link.json"
    CliRunner().invoke(command, ["--rounds", "25", "--json", str(file)], catch_exceptions=False)
    figures = json.loads(file.read_text())
    assert figures["draft_bytes"] <= 240
    assert 0 < figures["echo_us"]
    assert 0 < figures["draft_codec_us"] < 1000
    assert {"messages_us", "protocol_us", "drafter_us"} <= figures.keys()
