"""Verification keeps the target's law exactly, for any tree, and the same text for a seed."""

from __future__ import annotations

import math
from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from starsd_edge.decoding import sampling
from starsd_edge.decoding.sampling import SamplingParams, pick
from starsd_edge.decoding.tree import DraftTree
from starsd_edge.decoding.verify import Acceptance, verify
from starsd_edge.testing import ToyTarget, plain_text
from starsd_edge.types import Float32Array

VOCAB = 4
GRID = 6  # laws are multiples of 1/6, so sums over the uniforms 0/6 .. 5/6 (and a bit) are exact


@st.composite
def trees(draw: st.DrawFn, vocab: int = VOCAB, max_nodes: int = 14, base_len: int = 3) -> DraftTree:
    """Any tree at all: deep, wide, useless; hostile ones are just these."""
    tokens, parents = [draw(st.integers(0, vocab - 1))], [-1]
    for _ in range(draw(st.integers(0, max_nodes))):
        parent = draw(st.integers(0, len(tokens) - 1))
        taken = {t for t, p in zip(tokens, parents, strict=True) if p == parent}
        free = [t for t in range(vocab) if t not in taken]
        if free:
            tokens.append(draw(st.sampled_from(free)))
            parents.append(parent)
    return DraftTree(np.array(tokens, np.int32), np.array(parents, np.int32), base_len)


class ExactLaw:
    """A target whose laws are multiples of 1/GRID, as a function of the context."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def after(self, tokens: tuple[int, ...]) -> list[Fraction]:
        rng = np.random.default_rng([self._seed, *tokens])
        cuts = np.sort(rng.integers(0, GRID + 1, VOCAB - 1)).tolist()
        edges = [0, *cuts, GRID]
        return [Fraction(b - a, GRID) for a, b in pairwise(edges)]

    def logits(self, tokens: tuple[int, ...]) -> Float32Array:
        law = self.after(tokens)
        return np.array([math.log(p) if p else -math.inf for p in law], np.float32)


def tree_logits(law: ExactLaw, tree: DraftTree, context: tuple[int, ...]) -> Float32Array:
    paths = [[int(tree.tokens[n]) for n in tree.path(node)[1:]] for node in range(len(tree))]
    return np.stack([law.logits((*context, *path)) for path in paths])


@given(tree=trees(max_nodes=8), seed=st.integers(0, 1000))
@settings(max_examples=60, deadline=None)
def test_the_law_of_the_next_three_tokens_is_exactly_the_targets(tree: DraftTree, seed: int) -> None:
    """All uniforms of three positions are enumerated, and what verification settles is completed plainly.

    Probabilities are fractions, so this is equality of laws, not a statistic.
    """
    law = ExactLaw(seed)
    context = (0, 1, int(tree.tokens[0]))
    logits = tree_logits(law, tree, context)
    params = SamplingParams(temperature=1.0)
    cell = Fraction(1, GRID**3)
    settled: dict[tuple[int, ...], Fraction] = {}
    for u in range(GRID**3):
        # Half a cell up: away from the edges, where float32 logits of a fraction may round.
        uniforms = {3 + i: (u // GRID**i % GRID + 0.5) / GRID for i in range(3)}
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sampling, "uniform", lambda _, p, known=uniforms: known.get(p, 0.5))
            tokens = tuple(verify(tree, logits, params, context).tokens)
            while len(tokens) < 3:
                seen = (*context, *tokens)
                tokens = (*tokens, pick(law.logits(seen), params, len(seen), seen).token)
        settled[tokens[:3]] = settled.get(tokens[:3], Fraction(0)) + cell
    for (a, b, c), probability in settled.items():
        first, second, third = (law.after(seen) for seen in (context, (*context, a), (*context, a, b)))
        assert first[a] * second[b] * third[c] == probability
    assert sum(settled.values()) == 1


@given(
    tree=trees(vocab=16, max_nodes=30),
    params=st.sampled_from(
        [SamplingParams(), SamplingParams(temperature=1.0, seed=5), SamplingParams(repetition_penalty=1.5)]
    ),
    target_seed=st.integers(0, 50),
)
@settings(deadline=None)
def test_a_verified_path_says_what_plain_decoding_says_and_goes_as_far_as_the_tree(
    tree: DraftTree, params: SamplingParams, target_seed: int
) -> None:
    target = ToyTarget(vocab_size=16, seed=target_seed)
    context = [7, 2, int(tree.tokens[0])]
    target.cache = context[:-1]
    acceptance = verify(tree, target.forward(tree).logits, params, context)
    expected = plain_text(target, params, context, len(acceptance.tokens))
    assert expected == acceptance.tokens
    assert acceptance.path == tree.path(acceptance.path[-1])
    assert expected[:-1] == tree.tokens[acceptance.path[1:]].tolist()
    assert tree.child(acceptance.path[-1], expected[-1]) is None
    assert acceptance.num_accepted == len(expected) - 1


def test_a_perfect_chain_is_accepted_whole_with_one_bonus() -> None:
    target = ToyTarget(vocab_size=16)
    target.cache = [1, 2]
    tokens = plain_text(target, SamplingParams(), [1, 2, 3], 5)
    chain = DraftTree.chain([3, *tokens[:4]], base_len=3)
    acceptance = verify(chain, target.forward(chain).logits, SamplingParams(), [1, 2, 3])
    assert [0, 1, 2, 3, 4] == acceptance.path
    assert tokens == acceptance.tokens


def ramp(*margins: float) -> Float32Array:
    """Row i prefers token i + 1 over token 0 by margins[i]."""
    logits = np.zeros((len(margins), 8), np.float32)
    for row, margin in enumerate(margins):
        logits[row, row + 1] = margin
    return logits


def test_the_walk_stops_before_a_decision_below_the_guard() -> None:
    """The doubtful node's own token was decided safely: it is committed and becomes the next root."""
    chain = DraftTree.chain([0, 1, 2, 3], base_len=1)
    acceptance = verify(chain, ramp(1.0, 0.9, 0.05, 1.0), SamplingParams(), [0], guard=0.2)
    assert Acceptance([0, 1], [1, 2], margin=pytest.approx(0.9), guarded=True) == acceptance


def test_a_doubtful_root_settles_nothing() -> None:
    chain = DraftTree.chain([0, 1, 2], base_len=1)
    acceptance = verify(chain, ramp(0.1, 1.0, 1.0), SamplingParams(), [0], guard=0.2)
    assert Acceptance([], [], margin=math.inf, guarded=True) == acceptance
    assert acceptance.num_accepted == 0


def test_nodes_that_are_not_visited_are_not_looked_at() -> None:
    """Their logits may be anything, NaN included: half precision overflows on absurd branches."""
    tree = DraftTree(np.array([0, 1, 5], np.int32), np.array([-1, 0, 0], np.int32), 1)
    logits = ramp(1.0, 1.0, 1.0)
    logits[2] = math.nan
    assert verify(tree, logits, SamplingParams(), [0]).tokens == [1, 2]


@pytest.mark.parametrize(
    ("count", "path", "tokens"), [(1, [0], [5]), (2, [0, 1], [5, 6]), (9, [0, 1, 2], [5, 6, 7])]
)
def test_an_acceptance_can_be_cut_to_its_first_tokens(count: int, path: list[int], tokens: list[int]) -> None:
    cut = Acceptance([0, 1, 2], [5, 6, 7], margin=1.0).first(count)
    assert (path, tokens) == (cut.path, cut.tokens)
