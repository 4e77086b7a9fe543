"""An engine whose head computes by itself: the host puts a step on a queue and goes on until it is done.

The step is the one of `Engine`, in two halves. `launch` puts everything on the queue: the rows' way up, the
forward, the scores and their way down, and a mark behind them. `collect` waits for the mark, once a step, and
grows the trees. In between a session may be rewound, or end: its tree does not grow then. Its slot may not be
reset.

Not yet run on a GPU: on a fake of its queue, and on memory that cannot be read at all.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from starsd_server.engine import Engine, Underway
from starsd_server.step import Outcome, SessionRows, WorkItem
from starsd_server.transfers import Mark, Queue

__all__ = ["CudaQueue", "QueuedEngine"]

RECENT_STEPS = 8  # by which the next one's end is guessed
OVERDUE_S = 1e-6  # left of a step that takes longer than guessed: look again


class CudaQueue:
    """The device's current stream."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def host_memory(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def copy(self, source: Tensor, into: Tensor) -> None:
        into.copy_(source, non_blocking=True)

    def mark(self) -> Mark:
        # Who waits for it sleeps.
        event = torch.cuda.Event(enable_timing=True, blocking=True)  # type: ignore[no-untyped-call]
        torch.cuda.current_stream(self.device).record_event(event)
        return event


@dataclass(slots=True)
class _Flight:
    """A step on the queue.

    began, ended  marks before and behind it
    started_s     when it was begun to be put there, and
    launched_s    when all of it was
    going_s       when it was last seen not to be done
    done_s        when it was done, once that is known
    """

    step: Underway
    began: Mark
    ended: Mark
    started_s: float
    launched_s: float
    going_s: float
    done_s: float | None = None


class QueuedEngine:
    """A StepEngine of an Engine whose head is on an accelerator. One step at a time is on `queue`."""

    by_itself = True

    def __init__(self, engine: Engine, queue: Queue, clock: Callable[[], float] = time.monotonic) -> None:
        self.engine = engine
        self._queue, self._clock = queue, clock
        self._flight: _Flight | None = None
        self._took_s: deque[float] = deque([0.0], RECENT_STEPS)  # from the end of a launch on

    def reset(self, slot: int) -> SessionRows:
        """See Engine. Not for a slot that the step under way writes to."""
        assert self._flight is None or not self._flight.step.writes_to(slot)
        return self.engine.reset(slot)

    @torch.inference_mode()
    def launch(self, items: list[WorkItem]) -> None:
        """See StepEngine."""
        assert self._flight is None
        started_s, began = self._clock(), self._queue.mark()
        step = self.engine.begin(items)
        launched_s = self._clock()
        self._flight = _Flight(step, began, self._queue.mark(), started_s, launched_s, launched_s)

    def left_s(self) -> float:
        """See StepEngine: guessed by the shortest of the last steps, so that the end is not slept through."""
        flight, now_s = self._flight, self._clock()
        assert flight is not None
        if flight.done_s is None:
            if not flight.ended.query():
                flight.going_s = now_s
                return max(OVERDUE_S, flight.launched_s + min(self._took_s) - now_s)
            # The queue was empty; where it was not, for another head's step, the end comes later.
            done_s = flight.started_s + flight.began.elapsed_time(flight.ended) / 1e3
            flight.done_s = min(max(done_s, flight.going_s), now_s)
            self._took_s.append(flight.done_s - flight.launched_s)
        return flight.done_s - now_s

    @torch.inference_mode()
    def collect(self) -> list[Outcome]:
        """See StepEngine."""
        flight, self._flight = self._flight, None
        assert flight is not None
        return self.engine.finish(flight.step)

    def narrow(self, session: SessionRows, floor: float) -> Outcome:
        """See StepEngine."""
        return self.engine.narrow(session, floor)
