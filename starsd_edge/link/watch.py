"""The descriptors of an edge's link, and the two threads that wait on them.

The link's thread waits on all. The decode loop's, while it waits for a tree, borrows the dealer's and
receives by itself: to be told by the other one would cost every round a second wake-up. It is called where it
would not notice: there is another dealer, or the link's thread has taken something in.
"""

from __future__ import annotations

import os
import select

__all__ = ["Watch"]

NONE = -1  # no descriptor


class Watch:
    """No socket is touched here. `wait` and `wait_as_borrower` are for one thread each, without the link's
    lock; all the rest is called with it held."""

    def __init__(self) -> None:
        self.dealer = self.monitor = NONE
        self.lent = False  # the dealer's
        self.closed = False
        self._bell, self._borrowers_bell = (os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC) for _ in range(2))
        self._poller = select.epoll()  # heeds at once what changes while a thread waits on it
        self._poller.register(self._bell, select.EPOLLIN)
        self._borrowers_poller, self._borrowed = poller_of(self._borrowers_bell, NONE), NONE

    def add(self, dealer: int, monitor: int) -> None:
        self.dealer, self.monitor = dealer, monitor
        self._poller.register(dealer, 0 if self.lent else select.EPOLLIN)
        self._poller.register(monitor, select.EPOLLIN)
        self.call()

    def remove(self) -> None:
        """Before the two are closed."""
        self._poller.unregister(self.dealer)
        self._poller.unregister(self.monitor)
        self.dealer = self.monitor = NONE
        self.call()

    def close(self) -> None:
        """Its descriptors are others' from here on."""
        self.closed = True
        self._poller.close()
        os.close(self._bell)
        os.close(self._borrowers_bell)

    # ------------------------------------------------------------------------------- the link's thread

    def wake(self) -> None:
        """Have `wait` return."""
        os.eventfd_write(self._bell, 1)

    def wait(self, timeout_s: float) -> set[int]:
        """The descriptors that are readable, after at most so long."""
        ready = {descriptor for descriptor, _ in self._poller.poll(max(0.0, timeout_s))}
        if self._bell in ready:
            os.eventfd_read(self._bell)
        return ready

    # ------------------------------------------------------------------------- who waits in its place

    def lend(self) -> None:
        """From now on `wait_as_borrower` alone waits on the dealer's descriptor, or on the next dealer's."""
        self._set_lent(True)

    def give_back(self) -> None:
        self._set_lent(False)

    def _set_lent(self, lent: bool) -> None:
        self.lent = lent
        if self.dealer != NONE:
            self._poller.modify(self.dealer, 0 if lent else select.EPOLLIN)

    def call(self) -> None:
        """Have `wait_as_borrower` return, if anybody is there."""
        if self.lent:
            os.eventfd_write(self._borrowers_bell, 1)

    def wait_as_borrower(self, timeout_ms: int) -> None:
        """Until the dealer's descriptor is readable, this is called, or the time is up. When the dealer is
        replaced it is called: to have waited on the old one does no harm then."""
        dealer = self.dealer
        if self._borrowed != dealer:
            self._borrowed, self._borrowers_poller = dealer, poller_of(self._borrowers_bell, dealer)
        for descriptor, _ in self._borrowers_poller.poll(timeout_ms):
            if descriptor == self._borrowers_bell:
                os.eventfd_read(descriptor)


def poller_of(*descriptors: int) -> select.poll:
    poller = select.poll()
    for descriptor in descriptors:
        if descriptor != NONE:
            poller.register(descriptor, select.POLLIN)
    return poller
