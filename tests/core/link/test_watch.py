"""Two threads and the descriptors they wait on: which is told of what."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator

import pytest

from starsd_edge.link.watch import Watch

WAIT_S = 10.0
WAIT_MS = 600_000  # who is not told waits for longer than the test


class Descriptor:
    """As a ZeroMQ socket's: readable once something has come."""

    def __init__(self) -> None:
        self.number = os.eventfd(0, os.EFD_NONBLOCK)

    def come(self) -> None:
        os.eventfd_write(self.number, 1)

    def close(self) -> None:
        os.close(self.number)


@pytest.fixture
def ends() -> Iterator[tuple[Watch, Descriptor, Descriptor]]:
    """A watch, with a dealer and a monitor."""
    watch, dealer, monitor = Watch(), Descriptor(), Descriptor()
    watch.add(dealer.number, monitor.number)
    yield watch, dealer, monitor
    watch.close()
    dealer.close()
    monitor.close()


def in_thread(act: Callable[[], object]) -> Callable[[], object]:
    """Begins `act` on a thread; the function returned waits for what it returns."""
    results: list[object] = []
    thread = threading.Thread(target=lambda: results.append(act()), daemon=True)
    thread.start()

    def result() -> object:
        thread.join(WAIT_S)
        assert results, "it still waits"
        return results[0]

    return result


def test_the_links_thread_is_told_of_both_and_can_be_woken(ends: tuple) -> None:
    watch, dealer, monitor = ends
    assert watch.wait(0.0) == set()
    dealer.come()
    assert watch.wait(WAIT_S) == {dealer.number}
    monitor.come()
    assert watch.wait(WAIT_S) == {dealer.number, monitor.number}
    os.eventfd_read(dealer.number)
    os.eventfd_read(monitor.number)
    watch.wake()
    watch.wake()
    assert watch.wait(WAIT_S) & {dealer.number, monitor.number} == set()
    assert watch.wait(0.0) == set()


def test_a_dealer_that_is_lent_is_the_borrowers_alone(ends: tuple) -> None:
    """Also while the link's thread waits already."""
    watch, dealer, monitor = ends
    linked = in_thread(lambda: watch.wait(WAIT_S))
    watch.lend()
    borrowed = in_thread(lambda: watch.wait_as_borrower(WAIT_MS))
    dealer.come()
    assert borrowed() is None
    monitor.come()
    assert linked() == {monitor.number}


def test_a_dealer_that_is_given_back_with_something_in_it_is_told_of_at_once(ends: tuple) -> None:
    watch, dealer, _ = ends
    watch.lend()
    linked = in_thread(lambda: watch.wait(WAIT_S))
    dealer.come()
    watch.wait_as_borrower(WAIT_MS)
    watch.give_back()
    assert linked() == {dealer.number}


@pytest.mark.parametrize("same_number", [True, False], ids=["the same number", "another number"])
def test_a_borrower_is_called_to_the_dealer_that_takes_the_place_of_its_own(
    ends: tuple, *, same_number: bool
) -> None:
    """Even where the old one is closed under it."""
    watch, dealer, monitor = ends
    watch.lend()
    waiting = in_thread(lambda: watch.wait_as_borrower(WAIT_MS))
    watch.remove()
    assert waiting() is None
    old, dealer = dealer, Descriptor()
    if same_number:
        os.dup2(dealer.number, old.number)  # closes what had it
        dealer.close()
        dealer = old
    watch.add(dealer.number, monitor.number)
    assert in_thread(lambda: watch.wait_as_borrower(WAIT_MS))() is None  # there is another dealer
    waiting = in_thread(lambda: watch.wait_as_borrower(WAIT_MS))
    dealer.come()
    assert waiting() is None
    assert watch.wait(0.0) == set()
    watch.give_back()
    assert watch.wait(0.0) == {dealer.number}
    if not same_number:
        dealer.close()


def test_nobody_is_called_who_is_not_there(ends: tuple) -> None:
    """Else the next one who borrows would turn once for nothing."""
    watch, *_ = ends
    watch.call()
    watch.lend()
    with pytest.raises(BlockingIOError):
        os.eventfd_read(watch._borrowers_bell)
    watch.call()
    assert in_thread(lambda: watch.wait_as_borrower(WAIT_MS))() is None
