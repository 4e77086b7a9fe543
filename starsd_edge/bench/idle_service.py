"""A draft service with one device and nothing else to do, which goes on with trees that it has answered.

Unlike `VirtualService` it delivers a tree when it comes and not when it is polled, as the link's own thread
does: an update that leaves after a tree came in the middle of a forward does not wait for anything.
"""

from __future__ import annotations

from collections import deque

from starsd_edge.bench.trace import Trace
from starsd_edge.bench.virtual import STEP_S, Conditions, VirtualService
from starsd_edge.decoding.roles import RoundHints, Update
from starsd_edge.decoding.tree import DraftTree
from starsd_edge.testing import FakeClock

__all__ = ["IdleService"]

AHEAD_STEPS = 6  # that drafting ahead takes, beyond a tree's own


class IdleService(VirtualService):
    """What it has drafted ahead follows a tree, unless the next update is there first."""

    def __init__(self, trace: Trace, conditions: Conditions, clock: FakeClock, seed: int) -> None:
        super().__init__(trace, conditions, clock, seed)
        self._hints = RoundHints()
        self._ahead: tuple[float, DraftTree] | None = None  # due, what follows the newest tree
        self._arrived: deque[DraftTree] = deque()
        self._holds_tree = False  # one of use: the next update waits for its rows

    def start(self, first_token: int) -> None:
        self.rollback(1)

    def update(self, update: Update) -> None:
        self._deliver(self._clock())
        self._committed_len, self._hints = update.committed_len, update.hints
        self._max_nodes = update.hints.max_nodes
        self._wants_tree, self._holds_tree = True, False
        self._send_if_free(self._clock())

    def poll(self, timeout_s: float) -> DraftTree | None:
        deadline_s = self._clock() + timeout_s
        self._deliver(self._clock())
        while not self._arrived:
            due_s = min(self._next_due_s(), deadline_s)
            self._clock.advance(max(0.0, due_s - self._clock()))
            if due_s >= deadline_s:
                break
            self._deliver(due_s)
        return self._arrived.popleft() if self._arrived else None

    def rollback(self, committed_len: int) -> None:
        super().rollback(committed_len)
        self._ahead = None
        self._arrived.clear()
        self._wants_tree = self._holds_tree = False

    def _next_due_s(self) -> float:
        due_s = [self._under_way[1]] if self._under_way else []
        return min([*due_s, *([self._ahead[0]] if self._ahead else [])], default=float("inf"))

    def _deliver(self, now_s: float) -> None:
        """Take in what has come by now."""
        while (due_s := self._next_due_s()) <= now_s:
            if self._ahead is not None and self._ahead[0] == due_s:
                self._arrived.append(self._ahead[1])
                self._ahead = None
                continue
            assert self._under_way is not None
            sent_s, _, tree = self._under_way
            self._under_way, self._draft_s = None, self._drafting_s(tree)
            self._arrived = deque([tree])
            self._times.note(due_s - sent_s, self._draft_s, drafted=True)
            more = self._trace.ahead_after(tree.base_len)
            if more is not None and self._hints.ahead_nodes:
                self._ahead = (due_s + AHEAD_STEPS * STEP_S, more.first(self._hints.ahead_nodes))
            left = tree.descend(self._trace.tokens[tree.base_len : self._committed_len].tolist())
            self._holds_tree = left is not None and len(left) > 1
            self._send_if_free(due_s)

    def _send_if_free(self, now_s: float) -> None:
        if self._under_way is not None or not self._wants_tree or self._holds_tree:
            return
        self._wants_tree = False
        rtt_s = self._conditions.rtt_ms / 1e3
        if self._ahead is not None and self._ahead[0] > now_s + rtt_s:
            self._ahead = None  # it is not done when this update comes
        tree = self._trace.tree_after(self._committed_len).first(self._max_nodes)
        self._under_way = (now_s, now_s + self._round_trip_s(0) + self._drafting_s(tree), tree)

    def _drafting_s(self, tree: DraftTree) -> float:
        return STEP_S * max(1, int(tree.depths.max()))
