"""RemoteDrafter: a draft service as the decode loop sees it.

The decode loop's thread only ever takes a lock for microseconds, and waits nowhere but in `poll`. What it
brings it sends itself, where the line takes it at once, and what it waits for it receives itself; a thread of
the link's own does all the rest. Everything that can go wrong ends in `state().reason`, and decoding goes on.
"""

from __future__ import annotations

import random
import secrets
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

from starsd_edge.decoding.roles import DrafterState, Update
from starsd_edge.decoding.tree import DraftTree
from starsd_edge.link.edge_loop import EdgeLoop
from starsd_edge.link.placement import Place, Placement
from starsd_edge.link.sockets import EdgeKeys
from starsd_edge.protocol.edge_connection import EdgeConnection
from starsd_edge.protocol.edge_events import Counters, TreeArrived
from starsd_edge.protocol.greeting import HelloBody, WelcomeBody
from starsd_edge.protocol.limits import DEFAULT_TIMING, EdgeTiming
from starsd_edge.protocol.telemetry import EdgeReport

__all__ = ["LinkStats", "RemoteDrafter"]


@dataclass(frozen=True, slots=True)
class LinkStats:
    """How the link is doing. Seconds; smoothed unless they say `last`."""

    link_s: float
    dwell_s: float
    jitter_s: float
    last_link_s: float
    last_dwell_s: float
    last_outage: str
    counters: Counters


class RemoteDrafter:
    """A Drafter at the other end of a link.

    address  tcp://HOST:PORT of the service, or ipc://PATH
    hello    who this device is and what it runs
    keys     None only for addresses of this machine (ConfigError otherwise)
    others   more services that could be used; which is, and which next, follows from the device's name

    It connects in the background; nothing is raised when there is no service, now or later.
    """

    def __init__(
        self,
        address: str,
        hello: HelloBody,
        keys: EdgeKeys | None = None,
        timing: EdgeTiming = DEFAULT_TIMING,
        others: Sequence[Place] = (),
    ) -> None:
        self.session = secrets.randbits(64)
        self._connection = EdgeConnection(self.session, hello, random.random, timing=timing)
        # The newest tree, and what was drafted ahead of the next one.
        self._trees: deque[DraftTree] = deque()
        self._arrived_s = 0.0  # the newest that was asked for
        places = Placement(hello.device, (Place(address, keys), *others))
        self._loop = EdgeLoop(places, self._connection, self._take)
        self._changed = self._loop.changed
        self._arrived = threading.Condition(self._loop.lock)  # of a tree: nothing else wakes the decode loop

    def start(self, first_token: int) -> None:
        with self._changed:
            self._trees.clear()
            self._loop.settle()
            self._connection.start(first_token, time.monotonic())

    def update(self, update: Update) -> None:
        with self._changed:
            self._connection.update(update, time.monotonic())
            self._loop.send()

    def poll(self, timeout_s: float) -> DraftTree | None:
        until_s = time.monotonic() + timeout_s
        if timeout_s > 0:
            self._loop.receive(self._polled_enough, timeout_s)
        with self._changed:
            if not self._trees and timeout_s > 0:
                self._arrived.wait_for(self._polled_enough, until_s - time.monotonic())
            return self._trees.popleft() if self._trees else None

    def rollback(self, committed_len: int) -> None:
        with self._changed:
            self._trees.clear()
            self._connection.rollback(committed_len, time.monotonic())

    def state(self) -> DrafterState:
        with self._changed:
            return replace(self._connection.drafter_state(), answered_s=self._arrived_s)

    def wait_until_ready(self, timeout_s: float) -> DrafterState:
        """Wait for the service to be usable; the state it is in by then."""
        with self._changed:
            self._changed.wait_for(lambda: self._connection.drafter_state().ready, timeout_s)
            return self._connection.drafter_state()

    def welcome(self) -> WelcomeBody | None:
        """What the service said of itself; None while there is no link."""
        with self._changed:
            return self._connection.welcome

    @property
    def address(self) -> str:
        """Of the service that is used now."""
        return self._loop.address

    def stats(self) -> LinkStats:
        with self._changed:
            times = self._connection.times
            return LinkStats(
                times.link_s,
                times.dwell_s,
                times.deviation_s,
                times.last_link_s,
                times.last_dwell_s,
                self._connection.last_outage,
                replace(self._connection.counters),
            )

    def report(self, body: EdgeReport) -> None:
        """Tell the service how this device is doing; dropped while there is no link."""
        with self._changed:
            self._connection.report(body)
        self._loop.wake()

    def close(self) -> None:
        self._loop.stop()

    def _polled_enough(self) -> bool:
        return bool(self._trees) or self._loop.stopped

    def _take(self, arrived: TreeArrived) -> None:
        if not arrived.ahead:
            self._trees.clear()
            self._arrived_s = time.monotonic()
        self._trees.append(arrived.tree)
        self._arrived.notify()
