"""Trees from scores: the reference's recorded trees, and what must hold for any scores."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from starsd_edge.decoding.tree import DraftTree
from starsd_server.heads.candidates import candidates
from starsd_server.heads.grow import GrownTree, GrowthLimits, TreeGrowth, VerifyCosts

GOLDEN = Path(__file__).parent / "golden" / "eagle" / "cases"
SETTINGS = [(60, 10), (16, 10), (60, 4), (16, 4)]
STEPS = 5


def grow(offers: list[tuple[np.ndarray, np.ndarray]], limits: GrowthLimits) -> TreeGrowth:
    """Feed level after level of `offers`, each for all beams, best beam first."""
    growth = TreeGrowth(limits)
    for log_probs, tokens in offers:
        rows = 1 if growth.depth == 0 else len(growth.beams)
        if growth.add(log_probs[:rows], tokens[:rows]) is None:
            break
    return growth


@pytest.mark.parametrize("case", ["eagle1-bias", "eagle3-small-vocab"])
@pytest.mark.parametrize(("nodes", "top_k"), SETTINGS)
def test_the_reference_trees_come_out_of_its_scores(case: str, nodes: int, top_k: int) -> None:
    """All recorded pools, with the beams pruned that cannot reach the tree: the very same nodes are kept."""
    data = np.load(GOLDEN / f"{case}.npz")
    for prompt in range(3):
        for round_ in range(4):
            at = f"p{prompt}/t{nodes}k{top_k}/r{round_}/"
            pool = data[at + "pool_scores"].astype(np.float64)
            ids = data[at + "pool_tokens"]
            offers = [(pool[:top_k][None].astype(np.float32), ids[:top_k][None])]
            for step in range(STEPS):
                start = top_k + step * top_k * top_k
                own = slice(start, start + top_k * top_k)
                parents = pool[data[at + "beam_pool_index"][step]]
                log_probs = pool[own].reshape(top_k, top_k) - parents[:, None]
                offers.append((log_probs.astype(np.float32), ids[own].reshape(top_k, top_k)))
            tree = grow(offers, GrowthLimits(nodes, top_k, STEPS)).finish()

            tokens, parents, scores = (data[at + name] for name in ("tokens", "parents", "scores"))
            order = np.argsort(-scores[1:], kind="stable") + 1  # golden nodes, falling
            place = np.zeros(nodes, int)
            place[order] = np.arange(1, nodes)
            np.testing.assert_array_equal(tokens[order], tree.tokens)
            np.testing.assert_array_equal(place[parents[order]], tree.parents)
            np.testing.assert_allclose(scores[order], tree.scores, atol=2e-4)


@st.composite
def scripted_offers(draw: st.DrawFn) -> tuple[list[tuple[np.ndarray, np.ndarray]], GrowthLimits]:
    """Offers full of ties, for small trees."""
    top_k = draw(st.integers(1, 4))
    limits = GrowthLimits(draw(st.integers(1, 20)), top_k, draw(st.integers(0, 4)))
    levels = []
    for depth in range(limits.steps + 1):
        rows = 1 if depth == 0 else top_k
        drawn = draw(
            st.lists(st.sampled_from([0.0, -0.5, -1.0, -4.0]), min_size=rows * top_k, max_size=rows * top_k)
        )
        levels.append(
            (
                -np.sort(-np.array(drawn, np.float32).reshape(rows, top_k)),
                np.tile(np.arange(top_k, dtype=np.int32), (rows, 1)),
            )
        )
    return levels, limits


@given(scripted_offers())
def test_every_prefix_of_a_tree_is_a_tree_even_with_ties(
    case: tuple[list[tuple[np.ndarray, np.ndarray]], GrowthLimits],
) -> None:
    """Parents precede children and scores fall, so that an edge may cut anywhere."""
    offers, limits = case
    tree = grow(offers, limits).finish()
    assert len(tree.tokens) <= limits.max_nodes - 1
    assert (np.diff(tree.scores) <= 0).all()
    tokens = np.concatenate([[9], tree.tokens]).astype(np.int32)
    parents = np.concatenate([[-1], tree.parents]).astype(np.int32)
    for size in range(1, len(tokens) + 1):
        DraftTree(tokens[:size], parents[:size], base_len=1)  # raises when it is none


@given(scripted_offers())
def test_pruned_beams_change_no_tree(case: tuple[list[tuple[np.ndarray, np.ndarray]], GrowthLimits]) -> None:
    """Against growing every beam to the full depth, as the reference does."""
    offers, limits = case
    roomy = GrowthLimits(10_000, limits.top_k, limits.steps)  # nothing is ever full, so nothing is pruned
    full = grow(offers, roomy).finish().first(limits.max_nodes - 1)
    tree = grow(offers, limits).finish()
    np.testing.assert_array_equal(full.scores, tree.scores)
    np.testing.assert_array_equal(full.tokens, tree.tokens)
    np.testing.assert_array_equal(full.parents, tree.parents)


@st.composite
def cost_curves(draw: st.DrawFn) -> VerifyCosts:
    """Flat stretches and steps, as devices have them."""
    steps = draw(st.lists(st.sampled_from([0.0, 0.0001, 0.002, 0.03]), min_size=19, max_size=19))
    first, wait_s = draw(st.sampled_from([0.01, 0.05])), draw(st.sampled_from([0.0, 0.01]))
    return VerifyCosts(first + np.concatenate([[0.0], np.cumsum(steps)]), wait_s)


@settings(max_examples=300)
@given(scripted_offers(), cost_curves())
def test_beams_that_cannot_pay_change_no_tree(
    case: tuple[list[tuple[np.ndarray, np.ndarray]], GrowthLimits], costs: VerifyCosts
) -> None:
    """Growing every beam and cutting in the end gives the same tree."""
    offers, limits = case
    size = min(limits.max_nodes, len(costs.seconds))
    costs = VerifyCosts(costs.seconds[:size], costs.wait_s)
    roomy = GrowthLimits(10_000, limits.top_k, limits.steps)
    full = grow(offers, roomy).finish().first(size - 1)
    full = full.first(costs.worth(np.exp(full.scores)))
    tree = grow(offers, GrowthLimits(size, limits.top_k, limits.steps, costs)).finish()
    np.testing.assert_array_equal(full.scores, tree.scores)
    np.testing.assert_array_equal(full.tokens, tree.tokens)
    np.testing.assert_array_equal(full.parents, tree.parents)


@settings(max_examples=300)
@given(scripted_offers(), st.lists(st.sampled_from([0.01, 0.2, 0.4, 0.6, 1.0]), min_size=5, max_size=5))
def test_a_narrowed_tree_has_all_that_was_grown_in_the_order_it_would_have_had(
    case: tuple[list[tuple[np.ndarray, np.ndarray]], GrowthLimits], floors: list[float]
) -> None:
    """Of the whole tree it lacks what hangs below rows that were not run, and nothing else; what it has
    instead comes by falling probability, too."""
    offers, limits = case
    whole = grow(offers, limits).finish()
    growth, depth_of_floor = TreeGrowth(limits), []
    for (log_probs, tokens), floor in zip(offers, floors, strict=False):
        rows = 1 if growth.depth == 0 else len(growth.beams)
        if growth.add(log_probs[:rows], tokens[:rows]) is None:
            break
        depth_of_floor.append(floor)
        if growth.narrow(floor) is None:
            break
    tree = growth.finish()
    assert (np.diff(tree.scores) <= 0).all()
    kept = [p for p in paths(whole) if ran(p, depth_of_floor)]
    assert [p for p, _ in kept] == [p for p, _ in paths(tree) if p in {p for p, _ in kept}]


Path_ = tuple[int, ...]
Node = tuple[Path_, tuple[float, ...]]


def paths(tree: GrownTree) -> list[Node]:
    """Each node by its tokens from the root on, and the scores of its ancestors."""
    nodes: list[Node] = [((), ())]
    for token, parent, score in zip(tree.tokens, tree.parents, tree.scores, strict=True):
        tokens, scores = nodes[parent]
        nodes.append(((*tokens, int(token)), (*scores, float(score))))
    return nodes[1:]


def ran(node: Node, floors: list[float]) -> bool:
    """Whether the rows of all its ancestors were run."""
    *above, _ = node[1]
    return len(above) <= len(floors) and all(
        np.exp(np.float32(score)) >= floor for score, floor in zip(above, floors, strict=False)
    )


def test_where_more_nodes_do_not_pay_hardly_any_beam_is_run() -> None:
    """Each node costs a pass and has one chance in ten: none is worth it, and no child of one can be."""
    costs = VerifyCosts(0.01 * np.arange(1, 21, dtype=np.float64), 0.0)
    growth = TreeGrowth(GrowthLimits(20, 4, 5, costs))
    offered = np.log(np.full((1, 4), 0.1, np.float32))
    assert growth.add(offered, np.arange(4, dtype=np.int32)[None]) is None
    assert 0 == len(growth.finish().tokens)


def test_a_tree_of_four_nodes_is_done_before_the_deepest_level() -> None:
    flat = np.log(np.full((1, 4), 0.25, np.float32))
    ids = np.arange(4, dtype=np.int32)[None]
    growth = TreeGrowth(GrowthLimits(max_nodes=4, top_k=4, steps=5))
    assert growth.add(flat, ids) is None
    assert [0, 0, 0] == growth.finish().parents.tolist()


def test_a_rounded_probability_above_one_lifts_no_child_above_its_parent() -> None:
    growth = TreeGrowth(GrowthLimits(3, 1, 2))
    for value in (-0.5, 1e-6):
        growth.add(np.array([[value]], np.float32), np.array([[7]], np.int32))
    assert [-0.5, -0.5] == growth.finish().scores.tolist()
    assert [0, 1] == growth.finish().parents.tolist()


@pytest.mark.parametrize("columns", [10, 320, 4096])
@given(seed=st.integers(0, 2**32 - 1), levels=st.sampled_from([2, 7, 1000]))
def test_the_likeliest_tokens_are_those_of_a_stable_sort(columns: int, seed: int, levels: int) -> None:
    """With few distinct logits almost every row has a tie at the edge: the smaller id goes first."""
    logits = torch.from_numpy(
        np.random.default_rng(seed).integers(0, levels, (3, columns)).astype(np.float32)
    )
    log_probs = torch.log_softmax(logits, -1)
    best, ids = candidates(log_probs, 4)
    expected = torch.sort(log_probs, descending=True, stable=True)
    assert expected.indices[:, :4].tolist() == ids.tolist()
    assert torch.equal(expected.values[:, :4], best)


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_a_poisoned_row_shows_itself_and_leaves_the_others_alone(poison: float) -> None:
    logits = torch.randn(3, 2048, generator=torch.Generator().manual_seed(0))
    clean, _ = candidates(logits.log_softmax(-1), 5)
    logits[1, 700] = poison
    best, _ = candidates(logits.log_softmax(-1), 5)
    assert [True, False, True] == torch.isfinite(best).all(-1).tolist()
    assert torch.equal(clean[[0, 2]], best[[0, 2]])
