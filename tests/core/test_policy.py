"""Choosing a size, switching drafting off and on, telling the drafter."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from starsd_edge.decoding.acceptance import along_paths
from starsd_edge.decoding.costs import CostCurve
from starsd_edge.decoding.draft import Draft
from starsd_edge.decoding.policy import AdaptivePolicy, Outlook, best_size
from starsd_edge.decoding.record import worthwhile
from starsd_edge.decoding.tree import DraftTree
from starsd_edge.metrics import RoundKind, RoundStats

CURVE = CostCurve((1, 8, 64), (0.030, 0.030, 0.090))
CHAIN = DraftTree.chain([1, 2, 3, 4, 5], base_len=4)
LATER = Outlook(None, 0.0, 0, 64, 64)

curves = st.lists(st.floats(0.0, 0.05), min_size=3, max_size=3).map(
    lambda steps: CostCurve((1, 4, 12), tuple(0.01 + s for s in np.cumsum(steps)))
)


@given(tail=st.lists(st.floats(0.0, 1.0), max_size=11), curve=curves, wait_s=st.floats(0.0, 0.1))
def test_the_best_size_is_that_of_brute_force(tail: list[float], curve: CostCurve, wait_s: float) -> None:
    p = np.array([1.0, *tail])
    rates = [sum(p[:n]) / (wait_s + curve(n)) for n in range(1, len(p) + 1)]
    assert max(rates) == pytest.approx(rates[best_size(p, curve, wait_s) - 1])


@given(
    parents=st.lists(st.integers(0, 100), max_size=7),
    steps=st.lists(st.floats(0.05, 1.0), min_size=7, max_size=7),
    curve=curves,
    rate=st.floats(1.0, 200.0),
)
def test_the_chosen_nodes_are_the_best_of_all_trees_there_are(
    parents: list[int], steps: list[float], curve: CostCurve, rate: float
) -> None:
    """Brute force over every set of nodes that is a tree."""
    parents = [-1, *(parent % (node + 1) for node, parent in enumerate(parents))]
    p = along_paths(np.array([1.0, *steps[: len(parents) - 1]]), parents)
    costs_s = curve.table(6)

    def worth(nodes: tuple[int, ...]) -> float:
        return float(sum(p[list(nodes)])) - rate * curve(len(nodes))

    trees = [
        (0, *rest)
        for size in range(min(len(parents), 6))
        for rest in itertools.combinations(range(1, len(parents)), size)
        if all(parents[node] in (0, *rest) for node in rest)
    ]
    nodes = worthwhile(p, costs_s, rate).tolist()
    assert tuple(sorted(nodes)) in trees
    assert [parents[node] in nodes[:place] for place, node in enumerate(nodes)] == [
        False,
        *[True] * (len(nodes) - 1),
    ]
    assert worth(tuple(nodes)) == pytest.approx(max(map(worth, trees)))


def test_what_is_left_of_an_old_tree_is_not_verified_where_a_fresh_one_is_near() -> None:
    """Two nodes are left, a whole tree comes in five milliseconds: it is waited for; not if it is far."""
    policy = trained(age_s=0.005, accepted=4)
    left = Draft(CHAIN, 0, 0.005).after([2, 3, 4])
    assert left is not None
    assert policy.patience_s(Outlook(left, 0.0, 0, 64, 64)) >= 0.005
    assert policy.patience_s(Outlook(draft_of(0.005), 0.0, 0, 64, 64)) == 0.0
    far = trained(age_s=0.06, accepted=4)
    assert far.patience_s(Outlook(left, 0.0, 0, 64, 64)) == 0.0


def test_a_long_wait_makes_larger_trees_worth_it() -> None:
    p = 0.8 ** np.arange(20)
    curve = CostCurve((1, 20), (0.01, 0.05))
    assert best_size(p, curve, 0.0) < best_size(p, curve, 0.05) < best_size(p, curve, 1.0)


def test_sizes_that_cost_nothing_more_are_all_taken() -> None:
    assert best_size(np.full(8, 0.01), CURVE) == 8


def draft_of(age_s: float, tree: DraftTree = CHAIN) -> Draft:
    return Draft(tree, 0, age_s)


def size_of(tree: DraftTree | None) -> int:
    return 1 if tree is None else len(tree)


def trained(age_s: float, accepted: int, rounds: int = 60) -> AdaptivePolicy:
    """A policy that saw chains of four of which the first `accepted` tokens were right, answered in age_s."""
    policy = AdaptivePolicy(CURVE)
    text = [*[2, 3, 4, 5][:accepted], 99]
    for _ in range(rounds):
        draft = draft_of(age_s)
        policy.arrived(draft)
        policy.learn(draft, text)
        size = size_of(policy.choose(Outlook(draft, None, 0, 64, 64)))
        tokens = min(accepted, size - 1) + 1
        forward_s = CURVE(size)
        policy.observe(
            RoundStats(
                RoundKind.VERIFY, size, tokens - 1, tokens, size - 1, age_s, forward_s, age_s + forward_s
            )
        )
    return policy


def test_good_trees_from_a_near_service_are_waited_for_and_verified_whole() -> None:
    policy = trained(age_s=0.005, accepted=4)
    assert policy.drafting
    assert policy.patience_s(LATER) >= 0.005
    assert size_of(policy.choose(Outlook(draft_of(0.005), None, 0, 64, 64))) == 5
    assert policy.expected_gain > 3


@pytest.mark.parametrize(("age_s", "accepted"), [(0.5, 1), (0.2, 0), (0.06, 0)])
def test_drafting_that_does_not_pay_is_switched_off(age_s: float, accepted: int) -> None:
    policy = trained(age_s, accepted)
    assert not policy.drafting
    assert policy.patience_s(LATER) == 0.0
    assert policy.choose(Outlook(draft_of(age_s), None, 0, 64, 64)) is None


def test_while_off_it_looks_again_now_and_then_and_starts_when_it_pays() -> None:
    policy = trained(age_s=0.5, accepted=1)
    assert not policy.wants_draft(1)
    assert policy.wants_draft(512)
    for _ in range(60):
        policy.arrived(draft_of(0.004))
        policy.learn(draft_of(0.004), [2, 3, 4, 5, 99])
    assert policy.drafting


def test_until_there_is_another_the_answer_that_came_with_the_prompt_is_gone_by() -> None:
    policy = AdaptivePolicy(CURVE)
    assert policy.patience_s(LATER) == 0.0
    policy.arrived(Draft(CHAIN, 0, 0.005, with_prompt=True))
    assert policy.patience_s(LATER) > 0.005
    policy.arrived(Draft(CHAIN, 0, 0.002))
    assert 0.002 < policy.patience_s(LATER) < 0.005


def test_an_answer_that_came_with_the_prompt_says_nothing_of_the_next() -> None:
    """It took two seconds, because thousands of rows went up with it: the others are still waited for."""
    policy = trained(age_s=0.005, accepted=4)
    before = policy.patience_s(LATER)
    for _ in range(48):
        policy.arrived(Draft(CHAIN, 0, 2.0, with_prompt=True))
    assert policy.drafting
    assert policy.patience_s(LATER) == pytest.approx(before, rel=0.2)
    for _ in range(48):
        policy.arrived(draft_of(2.0))
        policy.observe(RoundStats(RoundKind.PLAIN, 1, 0, 1, 0, 0.0, 0.03, 0.03))
    assert policy.patience_s(LATER) == 0.0


def test_a_promise_that_was_not_kept_must_be_larger_the_next_time() -> None:
    """The model promises 3x, but rounds turn out slower than plain steps: no flapping between the two."""
    policy = trained(age_s=0.005, accepted=4)
    slow = RoundStats(RoundKind.VERIFY, 5, 0, 1, 4, 0.0, CURVE(5), 0.2)
    switches = 0
    for _ in range(2000):
        before = policy.drafting
        policy.arrived(draft_of(0.005))
        policy.learn(draft_of(0.005), [2, 3, 4, 5, 99])
        policy.observe(slow)
        switches += before and not policy.drafting
    assert 1 <= switches <= 12


def test_each_look_in_vain_puts_the_next_one_off() -> None:
    policy = trained(age_s=0.5, accepted=1)
    assert policy.wants_draft(64) or policy.wants_draft(512)
    for _ in range(8):
        policy.arrived(draft_of(0.5))
    assert not policy.wants_draft(511)
    assert policy.wants_draft(512)


def test_nodes_deeper_than_the_text_may_go_are_not_verified() -> None:
    policy = trained(age_s=0.005, accepted=4)
    curve_bends = Outlook(draft_of(0.005), None, 0, max_size=64, max_depth=1)
    assert size_of(policy.choose(curve_bends)) == 2


def test_no_more_nodes_than_fit_are_verified() -> None:
    policy = trained(age_s=0.005, accepted=4)
    assert size_of(policy.choose(Outlook(draft_of(0.005), None, 0, max_size=3, max_depth=64))) == 3


def test_slower_forwards_than_the_curve_says_are_taken_into_account() -> None:
    policy = AdaptivePolicy(CURVE)
    for _ in range(200):
        policy.observe(RoundStats(RoundKind.PLAIN, 1, 0, 1, 0, 0.0, 0.06, 0.06))
    assert policy.hints().plain_s == pytest.approx(0.06, rel=0.01)


def test_the_drafter_is_asked_for_as_many_nodes_as_have_been_of_use() -> None:
    policy = trained(age_s=0.005, accepted=4)
    hints = policy.hints()
    assert hints.max_nodes == 5
    assert hints.verify_nodes == 5
    assert hints.plain_s == pytest.approx(0.030)
