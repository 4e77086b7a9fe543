"""The bound on drafting ahead: hits counted by hand, gains computed by hand."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from starsd_edge.bench.ahead import OUTCOMES, Ahead, Rest, Timing, hit_rates
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


def test_what_is_left_below_a_node_that_was_cut_off_is_compared_with_a_fresh_tree() -> None:
    """The round brings the node cut off as its bonus; below it hangs one right token more. A fresh tree of
    three nodes has two right ones."""
    trees = [
        DraftTree(np.array([1, 5, 6, 7, 8], np.int32), np.array([-1, 0, 1, 0, 3], np.int32), 2),
        DraftTree(np.array([7, 8, 9], np.int32), np.array([-1, 0, 1], np.int32), 3),
    ]
    trace = Trace("x", np.array([0, 1, 7, 8, 9, 3], np.int32), 1, [trees[0], *[trees[1]] * 4], 64)
    found = hit_rates([trace], 3)
    assert found.hits[0] == found.rest.hit == 0.5
    assert (found.rest.tokens, found.rest.fresh_tokens) == (2.0, 3.0)
    assert found.steps == 2.0


def test_a_hit_spares_the_wait() -> None:
    timing = Timing(CostCurve((1, 16), (0.03, 0.03)), rtt_s=0.010, step_s=0.002)
    found = Ahead(8, 2.0, steps=4.0, hits=(0.1,) * len(OUTCOMES), rest=Rest(0.5, 1.5, 2.5))
    assert timing.tokens_per_s(found) == pytest.approx(2.0 / 0.048)
    assert timing.tokens_per_s(found, 1.0) == pytest.approx(2.0 / 0.030)
    assert timing.tokens_per_s(found, 0.1) == pytest.approx(2.0 / 0.0462)
    assert timing.tokens_per_s_with_rest(found) == pytest.approx(1.5 / 0.039)


def test_the_command_tells_of_all_sizes(tmp_path: Path) -> None:
    file = tmp_path / "ahead.json"
    told = CliRunner().invoke(command, ["--json", str(file)], catch_exceptions=False)
    assert "x1." in told.output
    figures = json.loads(file.read_text())
    assert len(figures["rows"]) == 10
    for row in figures["rows"]:
        assert row["hits"] == sorted(row["hits"])
        assert row["rest_gain"] <= row["rest_bound"]
        assert max(max(other["gains"]) for other in figures["rows"]) >= 1.0
