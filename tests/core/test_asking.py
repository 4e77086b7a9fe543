"""How large a tree to ask for, against all sizes there are."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from starsd_edge.decoding.asking import FIRST_TREES, LARGEST_TREE, LOOK_BEYOND, Asking
from starsd_edge.decoding.draft import Draft
from starsd_edge.decoding.tree import DraftTree
from starsd_edge.types import Float64Array

COSTS_S = 0.030 + 0.0005 * np.arange(LARGEST_TREE, dtype=np.float64)
RATE = 40.0
ENOUGH = FIRST_TREES + 1


def chain(length: int, draft_s: float = 0.0) -> Draft:
    tree = DraftTree.chain(list(range(length)), 1)
    return Draft(tree, 0, 0.02, draft_s=draft_s)


def falling(length: int, ratio: float = 0.8) -> Float64Array:
    return ratio ** np.arange(length, dtype=np.float64)


def taught(draft_s: float, length: int = 16, trees: int = ENOUGH) -> Asking:
    asking = Asking()
    for _ in range(trees):
        asking.learn(chain(length, draft_s), falling(length), COSTS_S, RATE)
    return asking


def test_the_first_trees_are_large() -> None:
    asking = Asking()
    for _ in range(FIRST_TREES):
        assert asking.size(4, RATE, waiting=True) == LARGEST_TREE
        asking.learn(chain(8, 0.01), falling(8), COSTS_S, RATE)
    assert asking.size(4, RATE, waiting=True) < LARGEST_TREE


def test_where_drafting_takes_no_time_as_many_are_asked_for_as_pay_to_verify() -> None:
    """A node costs 0.02 tokens of verifying: worth it down to a probability of 0.8 ** 15 > 0.02."""
    assert taught(draft_s=0.0, length=32).size(4, RATE, waiting=True) == 18


def test_the_longer_a_step_takes_the_smaller_is_the_tree() -> None:
    sizes = [taught(draft_s).size(4, RATE, waiting=True) for draft_s in (0.0, 0.03, 0.06, 0.12, 1.0)]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] > sizes[2] > sizes[-1] == 2


def test_where_nobody_waits_there_is_room_for_twice_what_suits() -> None:
    assert taught(draft_s=1.0).size(9, RATE, waiting=False) == 18


def test_it_says_what_trees_of_each_size_take_to_draft() -> None:
    asking = taught(draft_s=0.030, length=16)
    assert [asking.takes_s(n) for n in (1, 8, 16, 64)] == pytest.approx([0.0, 0.014, 0.030, 0.030])


def test_now_and_then_it_looks_beyond_the_size_that_suits() -> None:
    asking = taught(draft_s=0.06)
    sizes = []
    for _ in range(2 * LOOK_BEYOND):
        sizes.append(asking.size(12, RATE, waiting=True))
        asking.learn(chain(8, 0.03), falling(8), COSTS_S, RATE)
    assert sizes.count(24) == 2
    assert len(set(sizes)) == 2


def test_what_a_small_tree_shows_is_no_reason_to_think_less_of_larger_ones() -> None:
    """Many trees of 8 nodes do badly, and then as before: so are 16 worth as much more as before."""
    asking = taught(draft_s=0.0)
    for ratio in (0.3, 0.8):
        for _ in range(200):
            asking.learn(chain(8), falling(8, ratio), COSTS_S, RATE)
    assert asking.size(4, RATE, waiting=True) == taught(draft_s=0.0).size(4, RATE, waiting=True)


@st.composite
def drafted(draw: st.DrawFn, nodes: int) -> tuple[Draft, Float64Array]:
    """A tree, and probabilities that fall."""
    parents = [-1, *(draw(st.integers(0, node)) for node in range(nodes - 1))]
    tree = DraftTree(np.arange(len(parents), dtype=np.int32), np.array(parents, np.int32), 1)
    p = np.sort(draw(st.lists(st.floats(0.01, 0.9), min_size=len(parents), max_size=len(parents))))[
        ::-1
    ].copy()
    p[0] = 1.0
    return Draft(tree, 0, 0.02, draft_s=0.004 * int(tree.depths.max())), p


def forests() -> st.SearchStrategy[list[tuple[Draft, Float64Array]]]:
    """Trees of up to 12 nodes, as many in all of them."""
    return st.integers(4, 12).flatmap(lambda n: st.lists(drafted(n), min_size=ENOUGH, max_size=12))


@settings(max_examples=60, deadline=None)
@given(forests(), st.sampled_from([5.0, 20.0, 40.0]))
def test_no_other_size_would_have_been_worth_more(
    trees: list[tuple[Draft, Float64Array]], rate: float
) -> None:
    """Brute force: every size cut from every tree, its best part verified, its steps waited for."""
    asking = Asking()
    for draft, p in trees:
        asking.learn(draft, p, COSTS_S, rate)

    def worth(size: int) -> float:
        total = 0.0
        for draft, p in trees:
            tree = draft.tree.first(size)
            best = max(float(p[:n].sum()) - rate * COSTS_S[n - 1] for n in range(1, len(tree) + 1))
            total += best - rate * 0.004 * int(tree.depths.max())
        return total / len(trees)

    chosen = asking.size(4, rate, waiting=True)
    assert worth(chosen) == pytest.approx(max(worth(n) for n in range(2, LARGEST_TREE + 1)))
