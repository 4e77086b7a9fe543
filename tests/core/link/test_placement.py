"""Which service an edge uses: spread, stability, and what happens when one fails."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from starsd_edge.errors import UsageError
from starsd_edge.link.placement import FIRST_REST_S, LAST_REST_S, Place, Placement, in_order

ADDRESSES = [f"tcp://draft-{number}:7731" for number in range(5)]
EDGES = [f"jet{number}" for number in range(2000)]


def placement(edge: str = "jet1", addresses: list[str] = ADDRESSES) -> Placement:
    return Placement(edge, [Place(address) for address in addresses])


def test_edges_spread_evenly_over_services() -> None:
    share = Counter(in_order(edge, ADDRESSES)[0] for edge in EDGES)
    assert all(0.8 * 400 < count < 1.2 * 400 for count in share.values())


def test_edges_of_a_lost_service_spread_over_all_others_and_nobody_else_moves() -> None:
    lost, *left = ADDRESSES
    moved = Counter()
    for edge in EDGES:
        before, after = in_order(edge, ADDRESSES), in_order(edge, left)
        if before[0] != lost:
            assert before[0] == after[0]
        else:
            assert before[1] == after[0]
            moved[after[0]] += 1
    assert len(moved) == 4
    assert max(moved.values()) < 1.5 * min(moved.values())


@given(st.permutations(ADDRESSES))
def test_the_order_does_not_depend_on_how_they_were_named(addresses: list[str]) -> None:
    assert in_order("jet1", ADDRESSES) == in_order("jet1", addresses)


def test_a_failed_service_rests_and_is_gone_back_to() -> None:
    places = placement()
    order = in_order("jet1", ADDRESSES)
    assert order[0] == places.current.address
    assert places.leave(0.0)
    assert order[1] == places.current.address
    assert not places.prefers_another(FIRST_REST_S - 1)
    assert places.prefers_another(FIRST_REST_S)
    places.go_back(FIRST_REST_S)
    assert order[0] == places.current.address
    assert not places.prefers_another(FIRST_REST_S)


def test_a_service_that_fails_again_and_again_rests_longer_until_it_serves() -> None:
    places, now_s = placement(addresses=ADDRESSES[:2]), 0.0
    first = places.current.address
    rests = []
    for _ in range(8):
        places.leave(now_s)
        left_s = now_s
        while not places.prefers_another(now_s):
            now_s += 1.0
        rests.append(now_s - left_s)
        places.go_back(now_s)
        assert first == places.current.address
    assert [FIRST_REST_S, 2 * FIRST_REST_S, LAST_REST_S] == [rests[0], rests[1], rests[-1]]
    places.served()
    places.leave(now_s)
    assert places.prefers_another(now_s + FIRST_REST_S)


def test_when_all_have_failed_the_one_that_rests_shortest_is_tried_but_not_at_once() -> None:
    places = placement(addresses=ADDRESSES[:3])
    assert [True, True, False] == [places.leave(float(now_s)) for now_s in range(3)]
    assert in_order("jet1", ADDRESSES[:3])[0] == places.current.address
    assert not places.has_spare(3.0)


@pytest.mark.parametrize("addresses", [[], [ADDRESSES[0], ADDRESSES[0]]])
def test_no_service_or_one_named_twice_is_refused(addresses: list[str]) -> None:
    with pytest.raises(UsageError, match="once each"):
        placement(addresses=addresses)
