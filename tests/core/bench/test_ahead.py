"""The bound on drafting ahead: hits counted by hand, gains computed by hand."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from starsd_edge.bench.ahead import OUTCOMES, gain, hit_rates
from starsd_edge.bench.ahead_cli import command
from starsd_edge.bench.trace import Trace
from starsd_edge.decoding.costs import CostCurve
from starsd_edge.decoding.tree import DraftTree


def trace_of(text: list[int], parents: list[int], tokens: list[list[int]]) -> Trace:
    """A prompt of one token, and the same shape of tree after every token of the answer."""
    trees = [
        DraftTree(np.array([text[place], *nodes], np.int32), np.array(parents, np.int32), place + 1)
        for place, nodes in enumerate(tokens, 1)
    ]
    return Trace("x", np.array(text, np.int32), 1, trees, 64)


def test_an_outcome_counts_where_it_comes_among_the_nodes_cut_off() -> None:
    """Trees of three nodes: the root, a child, its child. The fourth node is a second child of the root, the
    fifth one lies below the fourth: it is no outcome, since its parent was cut off, too."""
    parents = [-1, 0, 1, 0, 3]
    second_child = trace_of([0, 1, 7, 9], parents, [[5, 6, 7, 8]] * 3)
    assert hit_rates([second_child], 3).hits == (1.0,) * len(OUTCOMES)
    cut_off = trace_of([0, 1, 9, 9], parents, [[5, 6, 7, 8]] * 3)
    assert hit_rates([cut_off], 3).hits == (0.0,) * len(OUTCOMES)


def test_what_is_in_the_tree_is_accepted_and_no_outcome() -> None:
    inside = trace_of([0, 1, 5, 6, 9, 9], [-1, 0, 1, 0], [[5, 6, 7]] * 5)
    found = hit_rates([inside], 3)
    assert found.tokens == 3.0
    assert sum(found.hits) == 0.0


def test_a_hit_spares_the_wait() -> None:
    curve = CostCurve((1, 16), (0.03, 0.03))
    assert gain(curve, 8, 0.018, 0.0) == 1.0
    assert gain(curve, 8, 0.018, 1.0) == pytest.approx(0.048 / 0.030)
    assert gain(curve, 8, 0.018, 0.1) == pytest.approx(0.048 / 0.0462)


def test_the_command_tells_of_all_sizes(tmp_path: Path) -> None:
    file = tmp_path / "ahead.json"
    told = CliRunner().invoke(command, ["--json", str(file)], catch_exceptions=False)
    assert "x1." in told.output
    figures = json.loads(file.read_text())
    assert len(figures["rows"]) == 8
    for row in figures["rows"]:
        assert row["hits"] == sorted(row["hits"])
        assert min(row["gains"]) >= 1.0
