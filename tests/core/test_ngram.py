"""Prompt lookup: what it finds, how continuations become a tree, and how two trees become one."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from starsd_edge.decoding.costs import load_profile
from starsd_edge.decoding.decoder import Decoder
from starsd_edge.decoding.ngram import CONFIDENCE, draft_from_context, lookup, merge, tree_of
from starsd_edge.decoding.policy import AdaptivePolicy
from starsd_edge.decoding.sampling import SamplingParams
from starsd_edge.decoding.tree import DraftTree
from starsd_edge.testing import EmulatedTarget, FakeClock, ScriptedDrafter, ToyTarget, plain_text


def tokens_of(text: str) -> np.ndarray:
    return np.array([ord(letter) for letter in text], np.int32)


def found(text: str, **limits: int) -> list[str]:
    return ["".join(map(chr, each.tokens)) for each in lookup(tokens_of(text), **limits)]


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
    merged = merge(first, second)
    both = merged.tree
    assert paths(first) | paths(second) == paths(both)
    assert first.tokens.tolist() == both.first(len(first)).tokens.tolist()
    assert first.parents.tolist() == both.first(len(first)).parents.tolist()
    for node, place in enumerate(merged.places.tolist()):
        assert second.tokens[second.path(node)].tolist() == both.tokens[both.path(place)].tolist()


def test_a_node_that_both_trees_hold_is_as_likely_as_the_surer_one_says() -> None:
    first, second = tree_of([[5, 6]], 9, 3), tree_of([[5, 7]], 9, 3)
    merged = merge(first, second)
    assert [9, 5, 6, 7] == merged.tree.tokens.tolist()
    combined = merged.combine(np.array([1.0, 0.5, 0.4]), np.array([1.0, 0.8, 0.3]))
    assert [1.0, 0.8, 0.4, 0.3] == combined.tolist()


def test_trees_on_different_prefixes_are_not_merged() -> None:
    with pytest.raises(ValueError, match="4 and 5"):
        merge(DraftTree.root_only(1, 4), DraftTree.root_only(1, 5))


def test_a_draft_from_the_context_is_as_sure_as_its_matches_are_long() -> None:
    draft = draft_from_context(tokens_of("wxyz1-yz2-wxyz"))
    assert draft is not None
    tree = draft.tree
    by_path = {
        "".join(map(chr, tree.tokens[tree.path(node)[1:]])): draft.confidences[node]
        for node in range(1, len(tree))
    }
    assert (CONFIDENCE[4], CONFIDENCE[2]) == (by_path["1"], by_path["2"])
    assert (14, "ngram") == (tree.base_len, draft.origin)
    assert draft_from_context(tokens_of("abcdef")) is None


class Cycling(ToyTarget):
    """Its next token depends on the last two only: greedy text soon runs in a cycle."""

    def logits_after(self, tokens):  # type: ignore[no-untyped-def]  # as ToyTarget.logits_after
        return super().logits_after(tokens[-2:])


PROMPT, GREEDY = [1, 2, 3], SamplingParams()
PROFILE = load_profile("agx-orin-int4")


def decoded(service: ScriptedDrafter | None, lookup: bool, clock: FakeClock) -> Decoder:
    """A decoder that has written 200 tokens of a cycling text, right ones."""
    target = EmulatedTarget(Cycling(vocab_size=12, seed=3), PROFILE, clock, clock.sleep)
    drafter = service or ScriptedDrafter(lambda context, count: [], clock, ready_from=10**9)
    decoder = Decoder(target, drafter, AdaptivePolicy(PROFILE.curve, lookup=lookup), clock)
    text = [token for round_ in decoder.generate(PROMPT, GREEDY, 200) for token in round_.tokens]
    assert plain_text(Cycling(vocab_size=12, seed=3), GREEDY, PROMPT, 200) == text
    return decoder


def test_a_text_that_repeats_itself_is_drafted_from_while_the_service_is_away() -> None:
    with_it, without = decoded(None, True, FakeClock()).stats, decoded(None, False, FakeClock()).stats
    assert without.plain_rounds == without.rounds
    assert with_it.mean_acceptance_length > 2
    assert with_it.tokens_per_s > 1.5 * without.tokens_per_s
    assert with_it.waited_s == 0.0


def test_the_service_and_the_context_draft_one_tree_together() -> None:
    """The service knows the next token only, the context all that follow once the text runs in a cycle:
    together they settle more than each of them."""
    toy = Cycling(vocab_size=12, seed=3)

    def one_token(clock: FakeClock) -> ScriptedDrafter:
        drafter = ScriptedDrafter(
            lambda context, count: plain_text(toy, GREEDY, context, count), clock, vocab_size=12
        )
        drafter.depth = 1
        return drafter

    clocks = [FakeClock() for _ in range(3)]
    service = decoded(one_token(clocks[0]), False, clocks[0]).stats
    both = decoded(one_token(clocks[1]), True, clocks[1]).stats
    context = decoded(None, True, clocks[2]).stats
    assert service.mean_acceptance_length <= 2.0
    assert both.tokens_per_s > 1.2 * service.tokens_per_s
    assert both.tokens_per_s > 1.02 * context.tokens_per_s


def test_matches_by_chance_are_seen_through() -> None:
    """A text without any order, of few different tokens: short matches everywhere, and worth nothing."""
    clock = FakeClock()
    target = EmulatedTarget(ToyTarget(vocab_size=12, seed=5, levels=10**6), PROFILE, clock, clock.sleep)
    drafter = ScriptedDrafter(lambda context, count: [], clock, ready_from=10**9)
    decoder = Decoder(target, drafter, AdaptivePolicy(PROFILE.curve), clock)
    list(decoder.generate(PROMPT, SamplingParams(temperature=1.0), 240))
    assert decoder.stats.tokens_per_s > 0.98 / PROFILE.curve.plain_s
