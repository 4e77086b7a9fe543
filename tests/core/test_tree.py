"""The draft tree: what follows from tokens and parents, and what is not a tree."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from starsd_edge.decoding.tree import DraftTree


def tree_of(tokens: list[int], parents: list[int], base_len: int = 5) -> DraftTree:
    return DraftTree(np.array(tokens, np.int32), np.array(parents, np.int32), base_len)


@st.composite
def trees(draw: st.DrawFn) -> DraftTree:
    tokens, parents = [draw(st.integers(0, 5))], [-1]
    for _ in range(draw(st.integers(0, 25))):
        parent = draw(st.integers(0, len(tokens) - 1))
        token = draw(st.integers(0, 5))
        if (parent, token) not in list(zip(parents, tokens, strict=True)):
            tokens.append(token)
            parents.append(parent)
    return tree_of(tokens, parents)


#        0
#      1   2      of a small example
#     3 4   5
EXAMPLE = tree_of([10, 11, 12, 13, 14, 13], [-1, 0, 0, 1, 1, 2])


def test_depths_positions_and_mask_follow_from_parents() -> None:
    assert [0, 1, 1, 2, 2, 2] == EXAMPLE.depths.tolist()
    assert [4, 5, 5, 6, 6, 6] == EXAMPLE.positions.tolist()
    expected = [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [1, 0, 1, 0, 0, 0],
        [1, 1, 0, 1, 0, 0],
        [1, 1, 0, 0, 1, 0],
        [1, 0, 1, 0, 0, 1],
    ]
    assert expected == EXAMPLE.mask.astype(int).tolist()
    assert [0, 2, 5] == EXAMPLE.path(5)


@given(trees())
def test_a_row_of_the_mask_is_the_path_to_its_node(tree: DraftTree) -> None:
    for node in range(len(tree)):
        assert tree.path(node) == np.flatnonzero(tree.mask[node]).tolist()
        assert tree.depths[node] == len(tree.path(node)) - 1


@given(trees(), st.integers(1, 30))
def test_the_first_nodes_of_a_tree_are_a_tree(tree: DraftTree, size: int) -> None:
    first = tree.first(size)
    assert len(first) == min(size, len(tree))
    assert first.depths.tolist() == tree.depths[:size].tolist()


@given(trees(), st.data())
def test_descending_along_a_path_leaves_what_hangs_below_it(tree: DraftTree, data: st.DataObject) -> None:
    node = data.draw(st.integers(0, len(tree) - 1))
    path = tree.path(node)
    left = tree.descend(tree.tokens[path[1:]].tolist())
    assert left is not None
    assert left.base_len == tree.base_len + len(path) - 1
    below = {
        tuple(tree.tokens[tree.path(n)[len(path) - 1 :]]) for n in range(len(tree)) if node in tree.path(n)
    }
    assert below == {tuple(left.tokens[left.path(n)]) for n in range(len(left))}


@given(trees())
def test_descending_out_of_the_tree_leaves_nothing(tree: DraftTree) -> None:
    assert tree.descend([99]) is None
    leaf = len(tree) - 1
    path = tree.tokens[tree.path(leaf)[1:]].tolist()
    assert tree.descend([*path, 99]) is None


def test_committing_in_two_steps_is_committing_in_one() -> None:
    once = EXAMPLE.descend([11, 13])
    step = EXAMPLE.descend([11])
    assert step is not None
    twice = step.descend([13])
    assert once is not None
    assert twice is not None
    assert (once.tokens.tolist(), once.base_len) == (twice.tokens.tolist(), twice.base_len)


def test_a_chain_and_a_root_are_trees() -> None:
    chain = DraftTree.chain([7, 8, 9], base_len=3)
    assert [-1, 0, 1] == chain.parents.tolist()
    assert chain.child(1, 9) == 2
    assert chain.child(1, 8) is None
    assert [[True]] == DraftTree.root_only(7, 1).mask.tolist()


@pytest.mark.parametrize(
    ("tokens", "parents", "base_len", "message"),
    [
        ([], [], 1, "N >= 1"),
        ([1, 2], [-1], 1, "one equal"),
        ([1, 2], [-1, 1], 1, "earlier node"),
        ([1, 2], [-1, -1], 1, "earlier node"),
        ([1, 2], [0, 0], 1, "earlier node"),
        ([1, 2, 3], [-1, 2, 0], 1, "earlier node"),
        ([1, 2, 2], [-1, 0, 0], 1, "same token"),
        ([1], [-1], 0, "at least 1"),
    ],
)
def test_what_is_no_tree_is_refused(
    tokens: list[int], parents: list[int], base_len: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        tree_of(tokens, parents, base_len)


def test_other_integer_types_are_refused() -> None:
    with pytest.raises(ValueError, match="int32"):
        DraftTree(np.array([1]), np.array([-1]), 1)
