"""Learning how likely a node is to be accepted."""

from __future__ import annotations

import numpy as np
import pytest

from starsd_edge.decoding.acceptance import PRIOR, AcceptanceModel
from starsd_edge.decoding.draft import Draft, order_confidences
from starsd_edge.decoding.tree import DraftTree

TREE = DraftTree(np.array([9, 1, 2, 3, 4], np.int32), np.array([-1, 0, 0, 1, 3], np.int32), base_len=1)
# As a drafter that says how sure it is: of the root's children, of node 3 after 1, of node 4 after 3.
DRAFT = Draft(TREE, 0, 0.0, confidences=np.array([1.0, 0.6, 0.3, 0.9, 0.9]))


def test_before_anything_is_seen_a_drafter_is_as_good_as_it_thinks() -> None:
    p = AcceptanceModel().node_probabilities(DRAFT)
    sure, likely, unlikely = PRIOR[8], PRIOR[6], PRIOR[4]
    assert [1.0, likely, unlikely, likely * sure, likely * sure**2] == pytest.approx(p.tolist())


def test_the_order_of_a_tree_tells_how_sure_its_drafter_was() -> None:
    """A chain that comes before the root's second child is sure; a node that comes long after its parent
    is not."""
    chain_first = DraftTree(np.arange(8, dtype=np.int32), np.array([-1, 0, 1, 2, 3, 4, 0, 0], np.int32), 1)
    broad = DraftTree(np.arange(8, dtype=np.int32), np.array([-1, 0, 0, 0, 0, 0, 1, 2], np.int32), 1)
    sure, unsure = order_confidences(chain_first), order_confidences(broad)
    assert sure[1] > 0.7
    assert unsure[1] < 0.5
    assert sure[2] > 0.6
    assert unsure[6] < sure[5]
    assert ((sure > 0) & (sure <= 1)).all()


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
def test_what_is_seen_often_is_believed(rate: float) -> None:
    """First choices at depth 1 are right at `rate`, second choices half of the rest, depth 2 always."""
    model, rng = AcceptanceModel(), np.random.default_rng(1)
    for _ in range(2000):
        first = rng.random() < rate
        token = 1 if first else 2 if rng.random() < 0.5 else 7
        model.learn(DRAFT, [token, 3])
    p = model.node_probabilities(DRAFT)
    assert p[1] == pytest.approx(rate, abs=0.08)
    assert p[2] == pytest.approx((1 - rate) / 2, abs=0.08)
    assert p[3] / p[1] == pytest.approx(1.0, abs=0.05)


def test_a_tree_that_lost_levels_is_read_at_its_own_depths() -> None:
    model = AcceptanceModel()
    for _ in range(500):
        model.learn(DRAFT, [1, 8])  # depth 1 right, depth 2 wrong
    left = DRAFT.after([1])
    assert left is not None
    assert (1, 0.9) == (left.depth_offset, left.confidences[1])
    assert model.node_probabilities(left)[1] < 0.1
    assert model.node_probabilities(Draft(left.tree, 0, 0.0, confidences=np.array([1.0, 0.6, 0.6])))[1] > 0.9


def test_an_old_habit_is_forgotten() -> None:
    model = AcceptanceModel()
    for _ in range(2000):
        model.learn(DRAFT, [1])
    for _ in range(600):
        model.learn(DRAFT, [7])
    assert model.node_probabilities(DRAFT)[1] < 0.2


def test_nothing_is_learnt_below_the_point_where_the_text_left_the_tree() -> None:
    model = AcceptanceModel()
    before = model.node_probabilities(DRAFT)
    model.learn(DRAFT, [7, 3, 4])
    after = model.node_probabilities(DRAFT)
    assert after[3] / after[1] == pytest.approx(before[3] / before[1])
    assert after[1] < before[1]


@pytest.mark.parametrize(("boast", "truth"), [(0.9, 0.3), (0.55, 0.55), (0.1, 0.6)])
def test_the_calibration_error_is_small_once_a_boaster_is_known(boast: float, truth: float) -> None:
    """What a drafter says of itself is only a name: the error counts what was made of it."""
    model, rng = AcceptanceModel(), np.random.default_rng(2)
    draft = Draft(DraftTree.chain([9, 1], 1), 0, 0.0, confidences=np.array([1.0, boast]))
    for _ in range(3000):
        model.learn(draft, [1 if rng.random() < truth else 7])
    assert model.node_probabilities(draft)[1] == pytest.approx(truth, abs=0.1)
    assert model.calibration_error()[0] < 0.05
    assert model.calibration_error()[1:] == [0.0] * 4
