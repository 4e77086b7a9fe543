"""Who is next."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from starsd_edge.endpoint.fair_queue import FairQueue, QueueFullError


def drain(queue: FairQueue[str]) -> list[str]:
    taken = []
    while (item := queue.take()) is not None:
        taken.append(item)
    return taken


def test_clients_take_turns_however_much_one_of_them_asks() -> None:
    queue: FairQueue[str] = FairQueue(8)
    for client, item in [("a", "a1"), ("a", "a2"), ("a", "a3"), ("b", "b1"), ("c", "c1"), ("b", "b2")]:
        queue.put(client, item)
    assert ["a1", "b1", "c1", "a2", "b2", "a3"] == drain(queue)


def test_one_client_cannot_take_all_places() -> None:
    queue: FairQueue[str] = FairQueue(4)
    queue.put("a", "1")
    queue.put("a", "2")
    with pytest.raises(QueueFullError, match="of this client"):
        queue.put("a", "3")
    queue.put("b", "1")
    queue.put("c", "1")
    with pytest.raises(QueueFullError, match="4 requests wait"):
        queue.put("d", "1")


def test_who_gives_up_leaves_no_gap() -> None:
    queue: FairQueue[str] = FairQueue(4)
    queue.put("a", "a1")
    queue.put("b", "b1")
    assert queue.remove("a1")
    assert not queue.remove("a1")
    assert ["b1"] == drain(queue)


@given(clients=st.lists(st.sampled_from("abcd"), max_size=30))
def test_every_request_is_served_once_and_in_its_client_s_order(clients: list[str]) -> None:
    queue: FairQueue[tuple[str, int]] = FairQueue(100)
    asked = list(enumerate(clients))
    for number, client in asked:
        queue.put(client, (client, number))
    served = drain(queue)  # type: ignore[arg-type]
    for client in "abcd":
        expected = [(client, number) for number, name in asked if name == client]
        assert expected == [item for item in served if item[0] == client]


@given(clients=st.lists(st.sampled_from("abcd"), min_size=1, max_size=30))
def test_nobody_waits_longer_than_a_round_of_all_clients(clients: list[str]) -> None:
    queue: FairQueue[str] = FairQueue(100)
    for client in clients:
        queue.put(client, client)
    served = drain(queue)
    for index in range(len(served) - 1):
        window = served[index : index + len(set(served[index:]))]
        assert len(set(window)) == len(window)
