"""An accelerator's queue that is done when a test says so, on torch's CPU device."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from starsd_server.accelerator import QueuedEngine
from starsd_server.engine import Engine
from starsd_server.rows import RowHead
from starsd_server.step import Outcome, WorkItem
from starsd_server.transfers import PinnedMemory

UNWRITTEN = 0xFF  # of every byte: a NaN, or an id that there is none of


@dataclass
class HandQueue:
    """What comes down is there once `happen` was called, or somebody waits for it.

    `meta`: compute on memory that has shapes and no content; what comes down is what `scores` writes."""

    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    scores: Callable[[Tensor], None] | None = None
    waits: int = 0
    copies_up: int = 0
    copies_down: int = 0
    busy: bool = False  # something is before the next mark
    done: int = 0  # marks
    clock: Callable[[], float] = time.monotonic
    marks: list[HandMark] = field(default_factory=list)
    _pending: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    _host: list[int] = field(default_factory=list)  # addresses

    def host_memory(self, num_bytes: int) -> Tensor:
        memory = torch.full((num_bytes,), UNWRITTEN, dtype=torch.uint8)
        self._host.append(memory.data_ptr())
        return memory

    def copy(self, source: Tensor, into: Tensor) -> None:
        self.busy = True
        if into.device.type == "cpu" and into.data_ptr() in self._host:
            self.copies_down += 1
            self._pending.append((source, into))
            return
        self.copies_up += 1
        into.copy_(source)
        source.fill_(UNWRITTEN)  # the host may use it again

    def mark(self) -> HandMark:
        self.marks.append(HandMark(self, len(self.marks)))
        if not self.busy:
            self.happen()
        return self.marks[-1]

    @torch.inference_mode()
    def happen(self) -> None:
        """Everything on the queue is done."""
        for source, into in self._pending:
            if self.scores is None:
                into.copy_(source)
            else:
                self.scores(into)
        self._pending.clear()
        self._host.clear()
        for mark in self.marks[self.done :]:
            mark.past_s = self.clock()
        self.done = len(self.marks)
        self.busy = False


@dataclass
class HandMark:
    queue: HandQueue
    number: int
    past_s: float = 0.0

    def query(self) -> bool:
        return self.queue.done > self.number

    def elapsed_time(self, end: HandMark) -> float:
        assert self.query()
        assert end.query()
        return 1e3 * (end.past_s - self.past_s)

    def synchronize(self) -> None:
        self.queue.waits += 1
        self.queue.happen()


@dataclass
class Launched:
    """`Engine.step` of an engine that computes by itself."""

    engine: QueuedEngine
    queue: HandQueue
    steps: int = 0

    def step(self, items: list[WorkItem]) -> list[Outcome]:
        self.engine.launch(items)
        assert self.engine.left_s() > 0
        self.steps += 1
        if self.steps % 2:  # every other step has to be waited for
            self.queue.happen()
            assert self.engine.left_s() <= 0
        return self.engine.collect()


def launched(head: RowHead, slots: int, max_len: int, queue: HandQueue | None = None) -> Launched:
    queue = queue or HandQueue()
    return Launched(QueuedEngine(Engine(head, slots, max_len, PinnedMemory(queue)), queue), queue)


def queued(head: RowHead, slots: int, max_len: int) -> QueuedEngine:
    return launched(head, slots, max_len).engine
