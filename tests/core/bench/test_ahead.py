"""The benchmark of drafting ahead: both ways decode the same texts, and its sums are sums."""

from __future__ import annotations

import pytest

from starsd_edge.bench.ahead import compare, mean_gain
from starsd_edge.bench.policy import Decoded
from starsd_edge.bench.trace import EASY, PROMPT_TOKENS, TREE_NODES, Trace, simulate
from starsd_edge.decoding.costs import load_profile


@pytest.fixture(scope="module")
def trace() -> Trace:
    return simulate(EASY, 120 + PROMPT_TOKENS, 3, ahead=True)


def test_what_a_simulated_head_drafts_ahead_begins_with_its_tree(trace: Trace) -> None:
    """And its trees are the same whether it drafts ahead or not."""
    alone = simulate(EASY, 120 + PROMPT_TOKENS, 3)
    assert [tree.tokens.tolist() for tree in alone.trees] == [tree.tokens.tolist() for tree in trace.trees]
    assert alone.ahead_after(40) is None
    for tree, ahead in zip(trace.trees, trace.ahead, strict=True):
        assert ahead.base_len == tree.base_len
        assert ahead.first(len(tree)).tokens.tolist() == tree.tokens.tolist()
        assert ahead.first(len(tree)).parents.tolist() == tree.parents.tolist()
    assert max(map(len, trace.ahead)) > 4 * TREE_NODES


def test_it_compares_the_same_device_with_and_without(trace: Trace) -> None:
    profile = load_profile("agx-orin-int4")
    rows = list(compare([profile], [10.0, 50.0], {"easy": [trace]}))
    assert [("agx-orin-int4", "easy", 10.0), ("agx-orin-int4", "easy", 50.0)] == [
        (row.profile, row.prompts, row.rtt_ms) for row in rows
    ]
    near = rows[0]
    assert near.without.ahead_share == 0.0
    assert near.ahead.ahead_share > 0.2
    assert near.tokens_gain > 1.05
    assert near.rounds_gain > near.tokens_gain
    told = near.as_dict()
    assert told["tokens_gain"] == near.tokens_gain
    assert told["hit_rate"] == near.ahead.ahead_share
    assert isinstance(near.ahead, Decoded)


def test_the_mean_gain_is_geometric() -> None:
    assert mean_gain([0.5, 2.0]) == pytest.approx(1.0)
