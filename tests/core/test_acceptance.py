"""Learning how likely a node is to be accepted."""

from __future__ import annotations

import numpy as np
import pytest

from starsd_edge.decoding.acceptance import AcceptanceModel
from starsd_edge.decoding.tree import DraftTree

TREE = DraftTree(np.array([9, 1, 2, 3, 4], np.int32), np.array([-1, 0, 0, 1, 3], np.int32), base_len=1)


def test_probabilities_multiply_along_a_path_and_fall_with_rank() -> None:
    p = AcceptanceModel().node_probabilities(TREE)
    assert p[0] == 1.0
    assert p[1] == pytest.approx(0.5)
    assert p[2] == pytest.approx(0.15)
    assert p[3] == pytest.approx(0.25)
    assert p[4] == pytest.approx(0.125)


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
def test_what_is_seen_often_is_believed(rate: float) -> None:
    """First choices at depth 1 are right at `rate`, second choices half of the rest, depth 2 always."""
    model, rng = AcceptanceModel(), np.random.default_rng(1)
    for _ in range(2000):
        first = rng.random() < rate
        token = 1 if first else 2 if rng.random() < 0.5 else 7
        model.learn(TREE, [token, 3])
    p = model.node_probabilities(TREE)
    assert p[1] == pytest.approx(rate, abs=0.08)
    assert p[2] == pytest.approx((1 - rate) / 2, abs=0.08)
    assert p[3] / p[1] == pytest.approx(1.0, abs=0.05)


def test_a_tree_that_lost_levels_is_read_at_its_own_depths() -> None:
    model = AcceptanceModel()
    for _ in range(500):
        model.learn(TREE, [1, 8])  # depth 1 right, depth 2 wrong
    left = TREE.descend([1])
    assert left is not None
    assert model.node_probabilities(left, depth_offset=1)[1] < 0.1
    assert model.node_probabilities(left)[1] > 0.9


def test_an_old_habit_is_forgotten() -> None:
    model = AcceptanceModel()
    for _ in range(2000):
        model.learn(TREE, [1])
    for _ in range(600):
        model.learn(TREE, [7])
    assert model.node_probabilities(TREE)[1] < 0.2


def test_nothing_is_learnt_below_the_point_where_the_text_left_the_tree() -> None:
    model = AcceptanceModel()
    before = model.node_probabilities(TREE)
    model.learn(TREE, [7, 3, 4])
    after = model.node_probabilities(TREE)
    assert after[3] / after[1] == pytest.approx(before[3] / before[1])
    assert after[1] < before[1]
