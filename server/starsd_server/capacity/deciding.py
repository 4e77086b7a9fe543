"""A simulated device that decides as real ones do: the product's decode loop and policy, over recorded texts.

The loop blocks while it waits and while a forward runs, so each device has a thread; one of all threads and
the simulation runs at a time, and which one follows from the events alone.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from starsd_edge.bench.trace import Trace
from starsd_edge.bench.virtual import TraceTarget
from starsd_edge.decoding.decoder import Decoder
from starsd_edge.decoding.policy import AdaptivePolicy
from starsd_edge.decoding.roles import DrafterState, Update
from starsd_edge.decoding.sampling import SamplingParams
from starsd_edge.decoding.tree import DraftTree
from starsd_edge.link.placement import Place
from starsd_edge.metrics import RoundKind
from starsd_edge.protocol.link_times import LinkTimes
from starsd_server.capacity.edge import Edge

if TYPE_CHECKING:
    from starsd_server.capacity.fleet import Fleet

__all__ = ["DecidingEdge"]


class DecidingEdge(Edge):
    """Waits, verifies, takes plain steps and switches drafting off and on as `AdaptivePolicy` says."""

    def __init__(self, fleet: Fleet, number: int, places: Sequence[Place]) -> None:
        super().__init__(fleet, number, places)
        self._thread = _Turns(self._decode)
        self._alarm = 0  # counts sleeps: one that was cut short ends nothing any more
        self.has_session = False
        self._line: _Line | None = None

    def begin(self) -> None:
        self._thread.go_on()

    def end(self) -> None:
        self._thread.end()

    def drafted(self) -> None:
        line = self._line
        if line is not None:
            self.after(self._fleet.plan.rtt_s / 2, line.take)

    def evicted(self) -> None:
        self.has_session = False
        super().evicted()

    @property
    def rtt_s(self) -> float:
        return self._fleet.plan.rtt_s

    # What its thread asks for.

    def __call__(self) -> float:
        """The time."""
        return self._fleet.now_s

    def advance(self, seconds: float) -> None:
        """Sleep."""
        self._alarm += 1
        alarm = self._alarm
        self._fleet.after(seconds, lambda: self._wake(alarm))
        self._thread.pause()

    def wake(self) -> None:
        """Cut the sleep short."""
        self._wake(self._alarm)

    def ask(self, tree: DraftTree, rows: int) -> None:
        """`rows` go up, on which this tree will be drafted: a step for each of its levels."""
        inner = np.unique(tree.parents[1:])  # nodes that have children; the root's are the first step's
        self._beams = tuple(np.bincount(tree.depths[inner])[1:].tolist())
        self.context += rows
        self._send(rows)

    def _decode(self) -> None:
        plan = self._fleet.plan
        policy = AdaptivePolicy(plan.curve)
        start = self.number % len(plan.traces)
        for trace in itertools.cycle([*plan.traces[start:], *plan.traces[:start]]):
            line = self._line = _Line(self, trace)
            self.join()
            decoder = Decoder(TraceTarget(trace, plan.curve, self), line, policy, self)
            for committed in decoder.generate(
                trace.tokens[: trace.prompt_len], SamplingParams(), len(trace.answer)
            ):
                self.tokens += len(committed.tokens)
                if committed.stats.kind is not RoundKind.VERIFY:
                    self.plain_tokens += len(committed.tokens)
            self.has_session = False
            self._epoch += 1
            self._leave_for_the_preferred()

    def _opened(self) -> None:
        self.has_session = True
        self.context = 0
        if self._line is not None:
            self._line.opened()

    def _move(self) -> None:
        self.has_session = False
        super()._move()

    def _meanwhile(self, seconds: float, action: Callable[[], None]) -> None:
        self.after(seconds, action)

    def _wake(self, alarm: int) -> None:
        if alarm == self._alarm:
            self._alarm += 1
            self._thread.go_on()


class _Line:
    """The drafter that the decode loop sees: one update is under way, later ones leave together."""

    def __init__(self, edge: DecidingEdge, trace: Trace) -> None:
        self._edge, self._trace = edge, trace
        self._times = LinkTimes()
        self._committed_len = self._held_len = 0
        self._max_nodes = 0
        self._wants_tree = self._polling = False
        self._under_way: tuple[float, DraftTree] | None = None  # sent, what will come
        self._arrived: DraftTree | None = None
        self._arrived_s = self._draft_s = 0.0

    def opened(self) -> None:
        """A service that knows nothing: the whole context goes up."""
        self._held_len, self._under_way = 0, None
        if self._max_nodes:
            self._send()

    def take(self) -> None:
        """The tree is here."""
        if self._under_way is None:
            return
        sent_s, self._arrived = self._under_way
        self._under_way = None
        self._arrived_s = self._edge()
        took_s = self._arrived_s - sent_s
        self._draft_s = max(0.0, took_s - self._edge.rtt_s)
        self._times.note(took_s, self._draft_s, drafted=True)
        if self._polling:
            self._edge.wake()

    def start(self, first_token: int) -> None:
        self._committed_len = 1

    def update(self, update: Update) -> None:
        self._committed_len = update.committed_len
        self._max_nodes = update.hints.max_nodes
        self._wants_tree = True
        if self._under_way is None:
            self._send()

    def poll(self, timeout_s: float) -> DraftTree | None:
        if self._arrived is None and timeout_s > 0.0:
            self._polling = True
            self._edge.advance(timeout_s)
            self._polling = False
        tree, self._arrived = self._arrived, None
        if tree is not None:
            left = tree.descend(self._trace.tokens[tree.base_len : self._committed_len].tolist())
            if (left is None or len(left) == 1) and self._wants_tree:
                self._send()
        return tree

    def rollback(self, committed_len: int) -> None:
        self._committed_len = committed_len
        self._held_len = min(self._held_len, committed_len)
        self._under_way = self._arrived = None

    def state(self) -> DrafterState:
        if not self._edge.has_session:
            return DrafterState(False, 0.0, "no draft service has room, or none answers")
        asked_len, asked_s = 0, 0.0
        if self._under_way is not None:
            asked_s, tree = self._under_way
            asked_len = tree.base_len
        return DrafterState(
            True,
            self._times.expected_s,
            asked_len=asked_len,
            asked_s=asked_s,
            answered_s=self._arrived_s,
            draft_s=self._draft_s,
        )

    def close(self) -> None:
        pass

    def _send(self) -> None:
        if not self._edge.has_session:
            return
        self._wants_tree = False
        tree = self._trace.tree_after(self._committed_len).first(self._max_nodes)
        self._under_way = (self._edge(), tree)
        rows = self._committed_len - self._held_len
        self._held_len = self._committed_len
        self._edge.ask(tree, rows)


class _Over(BaseException):
    """Ends a device's thread, wherever its decode loop is."""


class _Turns:
    """A thread that runs only between `go_on` and its own `pause`."""

    def __init__(self, run: Callable[[], None]) -> None:
        self._run = run
        self._its_turn, self._ours = threading.Semaphore(0), threading.Semaphore(0)
        self._is_over = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._main, daemon=True)

    def go_on(self) -> None:
        """Let it run until it pauses. Raises what it raised."""
        if self._thread.ident is None:
            self._thread.start()
        else:
            self._its_turn.release()
        self._ours.acquire()
        if self._error is not None:
            raise self._error

    def pause(self) -> None:
        """Called by the thread: the others' turn."""
        self._ours.release()
        self._its_turn.acquire()
        if self._is_over:
            raise _Over

    def end(self) -> None:
        if self._thread.ident is not None:
            self._is_over = True
            self._its_turn.release()
            self._thread.join()

    def _main(self) -> None:
        try:
            self._run()
        except _Over:
            pass
        except BaseException as error:
            self._error = error
            self._ours.release()
