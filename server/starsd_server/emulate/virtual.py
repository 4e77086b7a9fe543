"""The same measurement in virtual time: no sockets, no processes, and no noise of the machine.

Scheduler, sessions, protocol and messages are the real ones, in one process. The clock moves by what steps,
verifications and the line are said to take, and by the processor time that handling messages and scheduling
really used, times `host_factor`. So a busy machine cannot spoil a row, and 64 devices need no 64 threads.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from starsd_edge.errors import UsageError
from starsd_edge.protocol.codec import Frames, decode
from starsd_edge.protocol.server_connection import HeadOffer, ServiceOffer
from starsd_server.config import REAL_ENGINE
from starsd_server.emulate.bench import BenchPlan, BenchRow, row_of
from starsd_server.emulate.devices import Players
from starsd_server.emulate.engines import EmulatedEngine, load_engine_profile
from starsd_server.emulate.trace import RecordedTrees
from starsd_server.scheduling import Policy
from starsd_server.sessions import Sessions, TreeShape
from starsd_server.telemetry import copy_of

__all__ = ["measure_virtually"]


class VirtualClock:
    """Seconds that pass only when told."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s

    def spend(self, seconds: float) -> None:
        self.now_s += seconds


class VirtualService:
    """The worker's loop around Sessions, without its socket."""

    def __init__(self, plan: BenchPlan, scheduler: str, clock: VirtualClock, host_factor: float) -> None:
        config = plan.config
        profile = load_engine_profile(config.engine)
        trees = RecordedTrees.load(Path(config.trees))
        engine = EmulatedEngine(profile, trees, config.limits.max_sessions, config.max_len, clock.spend)
        offer = HeadOffer("emulated", plan.fleet.identity, config.max_len, config.max_nodes)
        service = ServiceOffer("virtual", config.software, 1, (offer,))
        self.sessions = Sessions(
            service,
            {offer.name: engine},
            config.limits,
            Policy(scheduler),
            TreeShape(config.top_k, config.max_steps),
        )
        self._clock, self._factor = clock, host_factor
        self._players = Players(plan.fleet, clock)
        self._inbox: list[tuple[float, int, Frames]] = []

    @property
    def players(self) -> Players:
        return self._players

    def join(self, count: int) -> None:
        """Let `count` devices greet the service."""
        for number in range(count):
            self._players.add(self._line(number))
        self._players.hello()

    def run(self, until_s: float) -> None:
        """Let devices and service go on until the clock says so."""
        while self._clock.now_s < until_s:
            self._run_timers()
            before = time.process_time()
            inbox, self._inbox = self._inbox, []
            for arrived_s, number, frames in inbox:
                self.sessions.receive(f"device-{number}", str(number).encode(), decode(frames), arrived_s)
            spent_before = self._clock.now_s
            stepped = self.sessions.step(self._clock)
            used_s = time.process_time() - before
            replies, self.sessions.outbox = self.sessions.outbox, []
            if stepped or inbox:
                # What the host did delays the replies and whatever comes next.
                self._clock.spend(used_s * self._factor)
            for reply in replies:
                self._players.arrived(int(reply.route), reply.frames)
            if not stepped and self._clock.now_s == spent_before and not self._inbox:
                self._clock.now_s = min(until_s, max(self._clock.now_s, self._players.timers.next_s))

    def _run_timers(self) -> None:
        """Each at its own time, though a step may have gone on beyond it: a message that came in while a step
        ran has waited since then."""
        now_s = self._clock.now_s
        while self._players.timers.next_s <= now_s:
            self._clock.now_s = self._players.timers.next_s
            self._players.timers.run(self._clock.now_s)
        self._clock.now_s = now_s

    def _line(self, number: int) -> Callable[[Frames], None]:
        return lambda frames: self._inbox.append((self._clock.now_s, number, frames))


def measure_virtually(plan: BenchPlan, scheduler: str, targets: int, host_factor: float = 1.0) -> BenchRow:
    """One row of the benchmark. Raises UsageError for the real engine, which takes real time."""
    if plan.config.engine == REAL_ENGINE:
        raise UsageError("virtual time needs an emulated engine: --engine rtx-4090")
    clock = VirtualClock()
    service = VirtualService(plan, scheduler, clock, host_factor)
    service.join(targets)
    service.run(plan.warm_up_s)
    players, recorder = service.players, service.sessions.recorder
    first, up, down = copy_of(recorder.engine), players.bytes_up, players.bytes_down
    players.rounds.clear()
    started_s = clock.now_s
    service.run(started_s + plan.seconds)
    seconds = clock.now_s - started_s
    bytes_each = (players.bytes_up - up, players.bytes_down - down)
    return row_of(plan, scheduler, targets, players.rounds, seconds, (first, recorder.engine), bytes_each)
