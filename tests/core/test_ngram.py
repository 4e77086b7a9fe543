"""Prompt lookup: what it finds, how continuations become a tree, and how two trees become one."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from starsd_edge.decoding.decoder import Decoder
from starsd_edge.decoding.ngram import NgramDrafter, lookup, merge, tree_of
from starsd_edge.decoding.policy import FixedPolicy
from starsd_edge.decoding.roles import Update
from starsd_edge.decoding.sampling import SamplingParams
from starsd_edge.decoding.tree import DraftTree
from starsd_edge.testing import FakeClock, ToyTarget, plain_text


def tokens_of(text: str) -> np.ndarray:
    return np.array([ord(letter) for letter in text], np.int32)


def found(text: str, **limits: int) -> list[str]:
    return ["".join(map(chr, continuation)) for continuation in lookup(tokens_of(text), **limits)]


@pytest.mark.parametrize(
    ("continuations", "text"),
    [
        (["cab"], "abcab"),
        (["Xab"], "abXab"),
        ([], "abcde"),
        ([], "a"),
        ([], "aXa"),  # one token is no match
        (["3-ab", "2-ab3-ab", "1-ab2-ab"], "ab1-ab2-ab3-ab"),  # the most recent first
        (["Yxbc-", "Xabc-Yxb"], "abc-Xabc-Yxbc-"),
    ],
)
def test_continuations_of_the_last_tokens_are_found(continuations: list[str], text: str) -> None:
    assert continuations == found(text)


def test_longer_matches_come_before_recent_ones() -> None:
    assert found("wxyz1-yz2-wxyz", num_continuations=2, num_tokens=1) == ["1", "2"]


def test_shared_beginnings_become_one_branch() -> None:
    tree = tree_of([[5, 6, 7], [5, 8], [9]], root=1, base_len=4)
    assert [1, 5, 9, 6, 8, 7] == tree.tokens.tolist()
    assert [-1, 0, 0, 1, 1, 3] == tree.parents.tolist()


def paths(tree: DraftTree) -> set[tuple[int, ...]]:
    return {tuple(tree.tokens[tree.path(node)].tolist()) for node in range(len(tree))}


small_trees = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=4), max_size=5).map(
    lambda continuations: tree_of(continuations, root=9, base_len=3)
)


@given(small_trees, small_trees)
def test_a_merged_tree_has_the_paths_of_both_and_begins_with_the_first(
    first: DraftTree, second: DraftTree
) -> None:
    both = merge(first, second)
    assert paths(first) | paths(second) == paths(both)
    assert first.tokens.tolist() == both.first(len(first)).tokens.tolist()
    assert first.parents.tolist() == both.first(len(first)).parents.tolist()


def test_trees_on_different_prefixes_are_not_merged() -> None:
    with pytest.raises(ValueError, match="4 and 5"):
        merge(DraftTree.root_only(1, 4), DraftTree.root_only(1, 5))


def test_a_rolled_back_drafter_forgets_what_was_cut() -> None:
    drafter = NgramDrafter()
    drafter.start(1)
    drafter.update(Update(0, np.array([2, 3, 1, 2], np.int32), np.zeros((4, 2), np.float32)))
    assert drafter.state().ready
    drafter.rollback(3)
    assert drafter.poll(0.0) is None
    drafter.update(Update(2, np.array([1, 2], np.int32), np.zeros((2, 2), np.float32)))
    tree = drafter.poll(0.0)
    assert tree is not None
    assert [2, 3, 1, 2] == tree.tokens.tolist()
    assert drafter.poll(0.0) is None


def test_a_text_that_repeats_itself_is_decoded_faster_and_unchanged() -> None:
    """Two logit levels over four tokens: the greedy text of this toy target soon runs in a cycle."""

    class Cycling(ToyTarget):
        def logits_after(self, tokens):  # type: ignore[no-untyped-def]  # as ToyTarget.logits_after
            return super().logits_after(tokens[-2:])

    target, clock = Cycling(vocab_size=12, seed=3), FakeClock()
    decoder = Decoder(target, NgramDrafter(), FixedPolicy(8), clock)
    prompt, greedy = [1, 2, 3], SamplingParams()
    text = [token for round_ in decoder.generate(prompt, greedy, 80) for token in round_.tokens]
    assert plain_text(Cycling(vocab_size=12, seed=3), greedy, prompt, 80) == text
    assert decoder.stats.mean_acceptance_length > 2
