"""Several draft services: an edge leaves one that fails or is full, and gives the next its whole context."""

from __future__ import annotations

import threading
from collections.abc import Callable

import msgspec
import pytest

from starsd_edge.link.client import RemoteDrafter
from starsd_edge.link.edge_loop import EdgeLoop
from starsd_edge.link.placement import Place, Placement, in_order
from starsd_edge.protocol.session_table import SessionTable
from tests.core.link.loopback import LoopbackService
from tests.core.link.test_client import FAST, closing, next_tree, until
from tests.core.protocol.pair import committed, hello, offer, token_at, tokens

__all__ = ["closing"]


def two_services(closing: Callable) -> list[LoopbackService]:
    """In the order of the edge."""
    services = [closing(LoopbackService(boot_id=number)) for number in (1, 2)]
    order = in_order(hello().device, [service.address for service in services])
    return sorted(services, key=lambda service: order.index(service.address))


def drafter_over(services: list[LoopbackService]) -> RemoteDrafter:
    last, *others = reversed(services)  # however they are named
    return RemoteDrafter(last.address, hello(), timing=FAST, others=[Place(each.address) for each in others])


def test_a_service_that_goes_is_replaced_and_the_next_one_gets_the_whole_context(closing: Callable) -> None:
    first, second = two_services(closing)
    drafter = closing(drafter_over([first, second]))
    drafter.start(token_at(0))
    drafter.update(committed(0, 40))
    assert next_tree(drafter, 41).tokens.tolist() == tokens(40, 44).tolist()
    assert (40, 0) == (first.core.rows_received, second.core.rows_received)
    assert first.address == drafter.address
    first.stop()
    until(drafter, lambda: drafter.address == second.address)
    drafter.update(committed(40, 44))
    assert next_tree(drafter, 45).tokens.tolist() == tokens(44, 48).tolist()
    assert second.core.rows_received == 44


def test_a_service_that_hangs_is_replaced(closing: Callable) -> None:
    drafter = driven_off(closing)[0]
    assert drafter.stats().counters.outages == 1


def test_a_new_context_goes_back_to_the_service_that_is_meant_for_the_edge(
    closing: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its sockets are closed and made by the link's thread alone, whichever thread begins the context: one
    that is closed while another thread waits on it crashes the process."""
    touched: set[str] = set()
    for name in ("_connect", "_disconnect"):
        monkeypatch.setattr(EdgeLoop, name, noting_thread(getattr(EdgeLoop, name), touched))
    drafter, first = driven_off(closing)
    first.hang.clear()
    monkeypatch.setattr(Placement, "_rested", lambda *_: True)  # half a minute later
    drafter.start(token_at(0))
    until(drafter, lambda: drafter.address == first.address)
    drafter.update(committed(0, 8))
    assert next_tree(drafter, 9).base_len == 9
    assert touched == {"starsd-link"}


def driven_off(closing: Callable) -> tuple[RemoteDrafter, LoopbackService]:
    """A drafter that uses its second service since the first, which is returned too, hangs."""
    first, second = two_services(closing)
    drafter = closing(drafter_over([first, second]))
    drafter.start(token_at(0))
    drafter.update(committed(0, 8))
    next_tree(drafter, 9)
    first.hang.set()
    drafter.update(committed(8, 12))
    assert next_tree(drafter, 13).base_len == 13
    assert second.address == drafter.address
    return drafter, first


def noting_thread(act: Callable[[EdgeLoop], None], names: set[str]) -> Callable[[EdgeLoop], None]:
    def noted(loop: EdgeLoop) -> None:
        names.add(threading.current_thread().name)
        act(loop)

    return noted


def test_only_the_service_that_is_meant_for_the_edge_is_bothered(closing: Callable) -> None:
    first, second = two_services(closing)
    drafter = closing(drafter_over([first, second]))
    for start in range(3):
        drafter.start(token_at(start))
        drafter.update(committed(0, 8))
        next_tree(drafter, 9)
    assert first.address == drafter.address
    assert second.core.rows_received == 0


def test_an_edge_spills_over_from_a_service_that_is_full(closing: Callable) -> None:
    """It has room for one session, and somebody else has it."""
    full = closing(LoopbackService(table=SessionTable(offer(1), max_sessions=1)))
    spare = closing(LoopbackService(boot_id=2))
    occupant = closing(RemoteDrafter(full.address, hello(), timing=FAST))
    occupant.start(token_at(0))
    occupant.update(committed(0, 8))
    next_tree(occupant, 9)
    device = next(
        name
        for name in (f"jet{number}" for number in range(100))
        if in_order(name, [full.address, spare.address])[0] == full.address
    )
    greeting = msgspec.structs.replace(hello(), device=device)
    drafter = closing(RemoteDrafter(full.address, greeting, timing=FAST, others=[Place(spare.address)]))
    assert full.address == drafter.address
    drafter.start(token_at(0))
    drafter.update(committed(0, 8))
    assert next_tree(drafter, 9).base_len == 9
    assert spare.address == drafter.address
