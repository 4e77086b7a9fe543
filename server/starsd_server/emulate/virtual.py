"""The same measurement in virtual time: no sockets, no processes, and no noise of the machine.

Scheduler, sessions, protocol and messages are the real ones, in one process. The clock moves by what steps,
verifications and the line are said to take, and by the processor time that handling messages and scheduling
really used, times `host_factor`; the host works on while a step is under way, as an accelerator lets it. So a
busy machine cannot spoil a row, and 64 devices need no 64 threads.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path

from starsd_edge.errors import UsageError
from starsd_edge.protocol.codec import Frames, decode
from starsd_edge.protocol.server_connection import HeadOffer, ServiceOffer
from starsd_server.config import REAL_ENGINE
from starsd_server.emulate.bench import BenchPlan, BenchRow, Edges, row_of
from starsd_server.emulate.devices import Players
from starsd_server.emulate.engines import EmulatedEngine, load_engine_profile
from starsd_server.emulate.trace import RecordedTrees
from starsd_server.scheduling import Policy
from starsd_server.sessions import Sessions, TreeShape
from starsd_server.step_loop import run_step
from starsd_server.telemetry import copy_of

__all__ = ["VirtualClock", "VirtualService", "measure_virtually"]

READING_TRIES, READINGS = 20, 50  # of the processor time, for what one of them takes


class VirtualClock:
    """Seconds that pass only when told, and while the host works as it really does, times `host_factor`.

    That work is read off this thread's processor time. A reading is a call of the system's, which takes
    longer than some of what is measured: its own time is left out, `reading_s` of it."""

    def __init__(self, host_factor: float, processor: Callable[[], float] = time.thread_time) -> None:
        """`processor` gives the thread's processor time in seconds."""
        self._now_s, self._factor = 0.0, host_factor
        self._processor = processor
        self._reading_s = reading_s(processor)
        self._working_since: float | None = None  # processor time, later by what readings have taken since
        # What happens in the first takes time; in the second, inside it, none.
        self.host_works = Between(self._begin_work, self._end_work)
        self.host_rests = Between(self._end_work, self._begin_work)

    def __call__(self) -> float:
        if self._working_since is None:
            return self._now_s
        worked_s = max(0.0, self._processor() - self._working_since - self._reading_s)
        self._working_since += self._reading_s
        return self._now_s + worked_s * self._factor

    @contextlib.contextmanager
    def set_back(self, then_s: float) -> Iterator[None]:
        """What happens in it happened at `then_s`."""
        now_s, self._now_s = self._now_s, then_s
        yield
        self._now_s = now_s

    def wait_until(self, until_s: float) -> None:
        self._now_s += max(0.0, until_s - self())

    def _begin_work(self) -> None:
        self._working_since = self._processor()

    def _end_work(self) -> None:
        self._now_s, self._working_since = self(), None


def reading_s(processor: Callable[[], float]) -> float:
    """Seconds of processor time between two readings of it with nothing in between, the least of a few tries:
    rather too little is left out than too much."""
    tries: list[float] = []
    for _ in range(READING_TRIES):
        began_s = processor()
        for _ in range(READINGS):
            processor()
        tries.append((processor() - began_s) / (READINGS + 1))
    return min(tries)


class Between:
    """A context by the two functions that begin and end it. (A generator takes longer than what it
    measures.)"""

    def __init__(self, begin: Callable[[], None], end: Callable[[], None]) -> None:
        self._begin, self._end = begin, end

    def __enter__(self) -> None:
        self._begin()

    def __exit__(self, *_: object) -> None:
        self._end()


class VirtualService:
    """The worker without its socket."""

    def __init__(self, plan: BenchPlan, scheduler: str, clock: VirtualClock) -> None:
        config = plan.config
        profile = load_engine_profile(config.engine)
        trees = RecordedTrees.load(Path(config.trees))
        engine = EmulatedEngine(
            profile, trees, config.limits.max_sessions, config.max_len, clock, clock.wait_until
        )
        offer = HeadOffer("emulated", plan.fleet.identity, config.max_len, config.max_nodes)
        service = ServiceOffer("virtual", config.software, 1, (offer,))
        self.sessions = Sessions(
            service,
            {offer.name: engine},
            dataclasses.replace(config.limits, free_rows=profile.free_rows),
            Policy(scheduler),
            TreeShape(config.top_k, config.max_steps),
        )
        self._clock = clock
        self._players = Players(plan.fleet, clock)
        self._inbox: deque[tuple[float, int, Frames]] = deque()

    @property
    def players(self) -> Players:
        return self._players

    def join(self, edges: Edges) -> None:
        """Let `edges` greet the service."""
        for number, device in enumerate(edges):
            self._players.add(self._line(number), device)
        self._players.hello()

    def run(self, until_s: float) -> None:
        """Let devices and service go on until the clock says so."""
        clock = self._clock
        while clock() < until_s:
            self._run_timers()
            with clock.host_works:
                begun = run_step(self.sessions, self, clock)
            if not begun and not self._inbox:
                clock.wait_until(min(until_s, self._players.timers.next_s))

    @property
    def num_waiting(self) -> int:
        """See Line."""
        return len(self._inbox)

    def look(self) -> None:
        """See Line."""
        with self._clock.host_rests:
            self._run_timers()

    def wait(self, seconds: float) -> None:
        """See Line."""
        with self._clock.host_rests:
            self._clock.wait_until(min(self._clock() + seconds, self._players.timers.next_s))
            self._run_timers()

    def hand_on(self, at_most: int) -> None:
        """See Line."""
        for _ in range(min(at_most, len(self._inbox))):
            arrived_s, number, frames = self._inbox.popleft()
            name, route = self._players.name(number), str(number).encode()
            self.sessions.receive(name, route, decode(frames), arrived_s)

    def reply(self) -> None:
        """See Line."""
        if not self.sessions.outbox:
            return
        with self._clock.host_rests:
            replies, self.sessions.outbox = self.sessions.outbox, []
            for reply in replies:
                self._players.arrived(int(reply.route), reply.frames)

    def _run_timers(self) -> None:
        """What the devices do, each at its own time, though the host may have worked on beyond it: a message
        has waited since it came in."""
        now_s = self._clock()
        while self._players.timers.next_s <= now_s:
            with self._clock.set_back(self._players.timers.next_s):
                self._players.timers.run(self._clock())

    def _line(self, number: int) -> Callable[[Frames], None]:
        return lambda frames: self._inbox.append((self._clock(), number, frames))


def measure_virtually(plan: BenchPlan, scheduler: str, edges: Edges, host_factor: float = 1.0) -> BenchRow:
    """One row of the benchmark. Raises UsageError for the real engine, which takes real time."""
    if plan.config.engine == REAL_ENGINE:
        raise UsageError("virtual time needs an emulated engine: --engine rtx-4090")
    with without_old_garbage():
        return _measure(plan, scheduler, edges, VirtualClock(host_factor))


@contextlib.contextmanager
def without_old_garbage() -> Iterator[None]:
    """What is there already is not looked through again and again, as in the worker: with torch that takes a
    tenth of a second, and would be taken for the host's work."""
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _measure(plan: BenchPlan, scheduler: str, edges: Edges, clock: VirtualClock) -> BenchRow:
    service = VirtualService(plan, scheduler, clock)
    service.join(edges)
    service.run(plan.warm_up_s)
    players, recorder = service.players, service.sessions.recorder
    first, up, down = copy_of(recorder.engine), players.bytes_up, players.bytes_down
    players.rounds.clear()
    started_s = clock()
    service.run(started_s + plan.seconds)
    seconds = clock() - started_s
    bytes_each = (players.bytes_up - up, players.bytes_down - down)
    return row_of(plan, scheduler, len(edges), players.rounds, seconds, (first, recorder.engine), bytes_each)
