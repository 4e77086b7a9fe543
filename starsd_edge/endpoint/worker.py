"""One thread that owns the model and answers one request at a time, in the queue's order."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TypeAlias

from starsd_edge.chat.answer import AnswerEnd, AnswerEvent
from starsd_edge.chat.speaker import Speaker
from starsd_edge.endpoint.fair_queue import FairQueue
from starsd_edge.errors import ResourceError, StarSDError

__all__ = ["Delivery", "Failure", "Job", "StoppingError", "Worker"]

log = logging.getLogger(__name__)


class StoppingError(ResourceError):
    """Raised when a request comes, or is not answered yet, at the end of the server's time."""

    def __init__(self) -> None:
        super().__init__("the server is stopping")


@dataclass(frozen=True, slots=True)
class Failure:
    """No answer, or no more of it."""

    error: StarSDError


Delivery: TypeAlias = AnswerEvent | Failure


@dataclass(eq=False, slots=True)
class Job:
    """One request.

    client   whose turn it uses
    answer   asks the speaker; runs in the worker's thread
    deliver  takes every event; called from the worker's thread, must not block. AnswerEnd or Failure is last.
    """

    client: str
    answer: Callable[[Speaker], Iterator[AnswerEvent]]
    deliver: Callable[[Delivery], None]
    queued_s: float = 0.0
    cancelled: threading.Event = field(default_factory=threading.Event)


class Worker:
    """Runs jobs until closed. `submit` and `cancel` may be called from any thread."""

    def __init__(
        self, speaker: Speaker, max_waiting: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.speaker = speaker
        self._queue: FairQueue[Job] = FairQueue(max_waiting)
        self._clock = clock
        self._changed = threading.Condition()
        self._running: Job | None = None
        self._stopping = False
        self._closing = False
        self._thread = threading.Thread(target=self._loop, name="answers", daemon=True)
        self._thread.start()

    @property
    def num_waiting(self) -> int:
        with self._changed:
            return len(self._queue)

    @property
    def is_busy(self) -> bool:
        with self._changed:
            return self._running is not None

    def submit(self, job: Job) -> None:
        """Queue `job`. Raises QueueFullError, StoppingError."""
        with self._changed:
            if self._stopping:
                raise StoppingError
            job.queued_s = self._clock()
            self._queue.put(job.client, job)
            self._changed.notify()

    def cancel(self, job: Job) -> None:
        """Nobody waits for `job` any more: leave the queue, or stop within a round."""
        with self._changed:
            job.cancelled.set()
            self._queue.remove(job)
            if self._running is job:
                self.speaker.cancel()

    def stop(self) -> None:
        """End the answer under way and let nobody wait: they are told StoppingError."""
        with self._changed:
            self._stopping = True
            jobs = [] if self._running is None else [self._running]
            while (job := self._queue.take()) is not None:
                jobs.append(job)
            for job in jobs:
                job.deliver(Failure(StoppingError()))
                job.cancelled.set()
            if self._running is not None:
                self.speaker.cancel()

    def close(self) -> None:
        """Stop the answer under way and the thread; the speaker stays open."""
        with self._changed:
            self._closing = True
            if self._running is not None:
                self.speaker.cancel()
            self._changed.notify()
        self._thread.join()

    def _loop(self) -> None:
        while (job := self._next()) is not None:
            try:
                self._run(job)
            finally:
                with self._changed:
                    self._running = None

    def _next(self) -> Job | None:
        with self._changed:
            while not self._closing:
                job = self._queue.take()
                if job is not None:
                    self._running = job
                    return job
                self._changed.wait()
            return None

    def _run(self, job: Job) -> None:
        if job.cancelled.is_set():  # between the queue and here
            return
        queue_s = self._clock() - job.queued_s
        try:
            for event in job.answer(self.speaker):
                if job.cancelled.is_set():  # perhaps before the speaker had begun
                    self.speaker.cancel()
                if isinstance(event, AnswerEnd):
                    event.figures.queue_s = queue_s
                job.deliver(event)
        except StarSDError as error:
            job.deliver(Failure(error))
        except Exception as error:  # one broken request must not end the service
            log.exception("a request failed")
            job.deliver(Failure(StarSDError(f"internal error: {type(error).__name__}: {error}")))
