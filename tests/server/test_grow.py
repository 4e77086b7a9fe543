"""Trees from scores: the reference's recorded trees, and what must hold for any scores."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from torch import Tensor

from starsd_edge.decoding.tree import DraftTree
from starsd_server.heads.candidates import candidates, candidates_by_key
from starsd_server.heads.grow import GrownTree, GrowthLimits, TreeGrowth, VerifyCosts, add_level

GOLDEN = Path(__file__).parent / "golden" / "eagle" / "cases"
SETTINGS = [(60, 10), (16, 10), (60, 4), (16, 4)]
STEPS = 5


def grow(offers: list[tuple[np.ndarray, np.ndarray]], limits: GrowthLimits) -> TreeGrowth:
    """Feed level after level of `offers`, each for all beams, best beam first."""
    growth = TreeGrowth(limits)
    for log_probs, tokens in offers:
        rows = len(growth.beams)
        add_level([growth], log_probs[:rows], tokens[:rows])
        if not growth.beams:
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
    """Offers full of ties, within levels and between them, for small trees."""
    top_k = draw(st.integers(1, 4))
    limits = GrowthLimits(draw(st.integers(1, 20)), top_k, draw(st.integers(0, 4)))
    ids = np.arange(top_k, dtype=np.int32)
    levels = []
    for depth in range(limits.steps + 1):
        rows = [draw(offered_rows(top_k)) for _ in range(1 if depth == 0 else top_k)]
        levels.append((np.stack(rows), np.tile(ids, (len(rows), 1))))
    return levels, limits


@st.composite
def offered_rows(draw: st.DrawFn, top_k: int) -> np.ndarray:
    """Log-probabilities, falling: of powers of two, and sometimes of all that there is."""
    weights = np.array(sorted(draw(st.lists(st.sampled_from([1, 2, 8, 64]), min_size=top_k, max_size=top_k))))
    total = weights.sum() if draw(st.booleans()) else 2 ** math.ceil(math.log2(weights.sum()))
    return np.log(weights[::-1] / total).astype(np.float32)


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
    assert_first_nodes(limits.max_nodes - 1, grow(offers, roomy).finish(), grow(offers, limits).finish())


@st.composite
def cost_curves(draw: st.DrawFn) -> VerifyCosts:
    """Flat stretches and steps, as devices have them."""
    steps = draw(st.lists(st.sampled_from([0.0, 0.0001, 0.002, 0.03]), min_size=19, max_size=19))
    first, wait_s = draw(st.sampled_from([0.01, 0.05])), draw(st.sampled_from([0.0, 0.01]))
    return VerifyCosts((first + np.concatenate([[0.0], np.cumsum(steps)])).tolist(), wait_s)


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
    full = grow(offers, roomy).finish()
    gains = np.cumsum(np.exp(np.concatenate([[0], full.scores], dtype=np.float32)), dtype=np.float64)[:size]
    worth = int((gains / (np.array(costs.seconds) + costs.wait_s)[: len(gains)]).argmax())
    tree = grow(offers, GrowthLimits(size, limits.top_k, limits.steps, costs)).finish()
    assert_first_nodes(worth, full, tree)


@settings(max_examples=300)
@given(scripted_offers())
def test_a_tree_is_that_of_a_plain_search_through_all_candidates(
    case: tuple[list[tuple[np.ndarray, np.ndarray]], GrowthLimits],
) -> None:
    """Every level whole, candidates sorted by cost and place in the end."""
    offers, limits = case
    # (cost, place, token, place of the parent)
    found: list[tuple[np.float32, int, int, int]] = []
    beams, rows = [(np.float32(0), 0)], 0
    for log_probs, tokens in offers:
        level = []
        for row, (cost, place) in enumerate(beams):
            for column in range(limits.top_k):
                child = 1 + (rows + row) * limits.top_k + column
                level.append((cost - log_probs[row, column], child, int(tokens[row, column]), place))
        rows += len(beams)
        found += level
        beams = [(cost, place) for cost, place, *_ in sorted(level)[: limits.top_k]]
    best = sorted(found)[: limits.max_nodes - 1]
    node_of = {0: 0} | {place: node for node, (_, place, *_) in enumerate(best, 1)}
    tree = grow(offers, limits).finish()
    assert [-cost for cost, *_ in best] == tree.scores.tolist()
    assert [token for _, _, token, _ in best] == tree.tokens.tolist()
    assert [node_of[parent] for *_, parent in best] == tree.parents.tolist()


@given(st.lists(st.tuples(scripted_offers(), st.none() | cost_curves()), min_size=2, max_size=5))
def test_trees_that_grow_together_are_those_that_grow_alone(
    cases: list[tuple[tuple[list[tuple[np.ndarray, np.ndarray]], GrowthLimits], VerifyCosts | None]],
) -> None:
    """Of different sizes, widths and depths, in one step after the other; each ends when it is done."""
    plans = [(offers, with_costs(limits, costs)) for (offers, limits), costs in cases]
    together = [TreeGrowth(limits) for _, limits in plans]
    widest = max(limits.top_k for _, limits in plans)
    for depth in range(max(limits.steps for _, limits in plans) + 1):
        growing = [number for number, tree in enumerate(together) if tree.beams]
        if not growing:
            break
        rows = [
            [padded(level[: len(together[n].beams)], widest) for level in plans[n][0][depth]] for n in growing
        ]
        log_probs, tokens = (np.concatenate(parts) for parts in zip(*rows, strict=True))
        add_level([together[number] for number in growing], log_probs, tokens)
    for (offers, limits), tree in zip(plans, together, strict=True):
        alone = grow(offers, limits).finish()
        assert_first_nodes(len(alone.tokens), alone, tree.finish())


def with_costs(limits: GrowthLimits, costs: VerifyCosts | None) -> GrowthLimits:
    if costs is None:
        return limits
    return replace(limits, costs=VerifyCosts(costs.seconds[: limits.max_nodes], costs.wait_s))


def padded(level: np.ndarray, width: int) -> np.ndarray:
    """What a wider tree of the step is offered besides: better than anything of this one, and not for it."""
    return np.pad(level, ((0, 0), (0, width - level.shape[1])))


def assert_first_nodes(count: int, expected: GrownTree, tree: GrownTree) -> None:
    """`tree` is the first `count` nodes of the `expected` one."""
    np.testing.assert_array_equal(expected.scores[:count], tree.scores)
    np.testing.assert_array_equal(expected.tokens[:count], tree.tokens)
    np.testing.assert_array_equal(expected.parents[:count], tree.parents)


def test_costs_must_be_those_of_every_size() -> None:
    with pytest.raises(ValueError, match="19 costs"):
        GrowthLimits(20, 4, 5, VerifyCosts([1.0] * 19, 0.0))


@settings(max_examples=300)
@given(scripted_offers(), st.lists(st.sampled_from([0.01, 0.2, 0.4, 0.6, 1.0]), min_size=5, max_size=5))
def test_a_narrowed_tree_has_all_that_was_grown_in_the_order_it_would_have_had(
    case: tuple[list[tuple[np.ndarray, np.ndarray]], GrowthLimits], floors: list[float]
) -> None:
    """Of the whole tree it lacks what hangs below rows that were not run, and nothing else; what it has
    instead comes by falling probability, too. A node is offered the same children whichever row it is."""
    levels, limits = case
    offers = [(np.repeat(log_probs[:1], len(log_probs), axis=0), tokens) for log_probs, tokens in levels]
    limits = replace(limits, max_nodes=10_000)  # what comes instead crowds nothing out
    whole = grow(offers, limits).finish()
    growth, depth_of_floor = TreeGrowth(limits), []
    for (log_probs, tokens), floor in zip(offers, floors, strict=False):
        rows = len(growth.beams)
        add_level([growth], log_probs[:rows], tokens[:rows])
        if not growth.beams:
            break
        depth_of_floor.append(floor)
        growth.narrow(floor)
        if not growth.beams:
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
    costs = VerifyCosts([0.01 * nodes for nodes in range(1, 21)], 0.0)
    growth = TreeGrowth(GrowthLimits(20, 4, 5, costs))
    offered = np.log(np.full((1, 4), 0.1, np.float32))
    add_level([growth], offered, np.arange(4, dtype=np.int32)[None])
    assert 0 == len(growth.beams)
    assert 0 == len(growth.finish().tokens)


def test_a_tree_of_four_nodes_is_done_before_the_deepest_level() -> None:
    flat = np.log(np.full((1, 4), 0.25, np.float32))
    ids = np.arange(4, dtype=np.int32)[None]
    growth = TreeGrowth(GrowthLimits(max_nodes=4, top_k=4, steps=5))
    add_level([growth], flat, ids)
    assert 0 == len(growth.beams)
    assert [0, 0, 0] == growth.finish().parents.tolist()


def test_a_rounded_probability_above_one_lifts_no_child_above_its_parent() -> None:
    growth = TreeGrowth(GrowthLimits(3, 1, 2))
    for value in (-0.5, 1e-6):
        add_level([growth], np.array([[value]], np.float32), np.array([[7]], np.int32))
    assert [-0.5, -0.5] == growth.finish().scores.tolist()
    assert [0, 1] == growth.finish().parents.tolist()


Chooser: TypeAlias = Callable[[Tensor, int], tuple[Tensor, Tensor]]
CHOOSERS = [candidates, candidates_by_key]


@pytest.mark.parametrize("choose", CHOOSERS)
@pytest.mark.parametrize("columns", [10, 320, 4096])
@given(seed=st.integers(0, 2**32 - 1), levels=st.sampled_from([2, 7, 1000]))
def test_the_likeliest_tokens_are_those_of_a_stable_sort(
    choose: Chooser, columns: int, seed: int, levels: int
) -> None:
    """With few distinct logits almost every row has a tie at the edge: the smaller id goes first."""
    logits = torch.from_numpy(
        np.random.default_rng(seed).integers(0, levels, (3, columns)).astype(np.float32)
    )
    best, ids = choose(logits, 4)
    expected = torch.sort(torch.log_softmax(logits, -1), descending=True, stable=True)
    assert expected.indices[:, :4].tolist() == ids.tolist()
    assert torch.equal(expected.values[:, :4], best)


@pytest.mark.parametrize("choose", CHOOSERS)
@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_a_poisoned_row_shows_itself_and_leaves_the_others_alone(choose: Chooser, poison: float) -> None:
    logits = torch.randn(3, 2048, generator=torch.Generator().manual_seed(0))
    clean, _ = choose(logits, 5)
    logits[1, 700] = poison
    best, _ = choose(logits, 5)
    assert [True, False, True] == torch.isfinite(best).all(-1).tolist()
    assert torch.equal(clean[[0, 2]], best[[0, 2]])
