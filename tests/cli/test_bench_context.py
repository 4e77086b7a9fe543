"""`starsd bench context` on a tiny model: what is counted, not how fast it was."""

from __future__ import annotations

import json
from pathlib import Path

from click.testing import CliRunner

from starsd_edge.cli.bench_context import command
from tests.cli.tiny_bundle import make_bundle


def test_turns_after_the_first_run_only_what_is_new(tmp_path: Path) -> None:
    options = ["--bundle", str(make_bundle(tmp_path)), "--turns", "3", "--answer-tokens", "4"]
    file = tmp_path / "context.json"
    result = CliRunner().invoke(command, [*options, "--json", str(file)], catch_exceptions=False)
    assert 0 == result.exit_code, result.output
    report = json.loads(file.read_text())
    turns = report["turns"]
    assert ("tiny", 3) == (report["model"], len(turns))
    assert turns[0]["new_tokens"] == turns[0]["prompt_tokens"]
    for number in (1, 2):
        cached = turns[number]["prompt_tokens"] - turns[number]["new_tokens"]
        assert cached >= turns[number - 1]["prompt_tokens"]
    assert 1 == report["regenerated"]
    # The change lies behind the template's own first tokens; all after it is run again.
    assert report["edited"] > turns[2]["prompt_tokens"] - 20
    shared, crowded = report["sharing"]
    assert (3, 3, 3) == (shared["conversations"], shared["kept"], shared["opened"])
    assert (2, 2) == (crowded["kept"], crowded["opened"])
    assert shared["cached_share"] > 0.5 > crowded["cached_share"]
    assert all(turn[name] > 0 for turn in turns for name in ("first_token_cpu_ms", "again_cpu_ms"))
