"""A fleet in virtual time: many devices, several draft services, failures; events instead of seconds.

Which service a device uses is decided by the product's `Placement`, who takes part in a step by its
`Scheduler`. Steps and verifications take what their profiles say. There are no messages and no processor time
in it: the host is as fast as it likes. What a round asks and brings is played from a recording, and a device
waits for its tree while it has a service, like those of the service's benchmark (`edge`); or each device runs
the product's decode loop and policy over recorded texts, which takes far longer (`deciding`).
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from starsd_edge.bench.trace import Trace
from starsd_edge.decoding.costs import CostCurve
from starsd_edge.link.placement import Place
from starsd_edge.protocol.session_table import SessionKey
from starsd_server.capacity.deciding import DecidingEdge
from starsd_server.capacity.edge import Edge, PlayedEdge
from starsd_server.capacity.model import StepSeconds
from starsd_server.capacity.recorded import Played
from starsd_server.scheduler import Scheduler
from starsd_server.scheduling import (
    Action,
    Admit,
    Arrive,
    Close,
    EngineFree,
    Evict,
    Limits,
    Open,
    Phase,
    Policy,
    Refuse,
    RunStep,
    StepEnded,
    Turn,
)

__all__ = ["Failure", "FleetPlan", "FleetResult", "simulate"]

HEAD = "head"


@dataclass(frozen=True, slots=True)
class Failure:
    """A service answers nobody from `from_s` to `until_s`; what it held is lost."""

    service: int
    from_s: float
    until_s: float = math.inf


@dataclass(frozen=True, slots=True)
class FleetPlan:
    """What is simulated.

    conversations  of the recording, round by round; each device begins with another one
    traces         instead, texts and trees over which devices decide as real ones do; slower
    detect_s       from a service's failure to an edge's giving it up
    """

    devices: int
    services: int
    curve: CostCurve
    step_s: StepSeconds
    conversations: Sequence[Sequence[Played]]
    rtt_s: float = 0.002
    seconds: float = 10.0
    warm_up_s: float = 1.0
    failures: tuple[Failure, ...] = ()
    detect_s: float = 2.0
    limits: Limits = field(default_factory=lambda: Limits(device_rows_per_s=1e9, rows_per_s=1e12))
    policy: Policy = Policy.BATCHED
    traces: Sequence[Trace] = ()


@dataclass(frozen=True, slots=True)
class FleetResult:
    """What came of it, after the warm-up.

    device_tokens_per_s  float [devices]
    plain_share          of all tokens, those of plain steps
    busy                 float [services]: share of the time in which it stepped
    moves                times that a device went to another service
    refused              OPENs that a service had no room for
    """

    device_tokens_per_s: np.ndarray[tuple[int], np.dtype[np.float64]]
    plain_share: float
    busy: np.ndarray[tuple[int], np.dtype[np.float64]]
    devices_at: tuple[int, ...]
    moves: int
    refused: int

    @property
    def tokens_per_s(self) -> float:
        return float(self.device_tokens_per_s.sum())


def simulate(plan: FleetPlan) -> FleetResult:
    """Run the plan; the same result for the same plan."""
    return Fleet(plan).run()


class Fleet:
    """Events, and whom they concern."""

    def __init__(self, plan: FleetPlan) -> None:
        self.plan = plan
        self.now_s = 0.0
        self.moves = self.refused = 0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self.services = [Service(self, number) for number in range(plan.services)]
        places = [Place(f"tcp://draft-{number}:7731") for number in range(plan.services)]
        kind = DecidingEdge if plan.traces else PlayedEdge
        self._devices: list[Edge] = [kind(self, number, places) for number in range(plan.devices)]

    def after(self, seconds: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now_s + seconds, next(self._order), action))

    def run(self) -> FleetResult:
        plan = self.plan
        for failure in plan.failures:
            self.after(failure.from_s, self.services[failure.service].fail)
            if failure.until_s < math.inf:
                self.after(failure.until_s, self.services[failure.service].recover)
        for device in self._devices:
            # Not all at once: a fleet is not switched on by one switch.
            self.after(plan.warm_up_s * device.number / (2 * plan.devices), device.begin)
        self.after(plan.warm_up_s, self._forget_the_warm_up)
        end_s = plan.warm_up_s + plan.seconds
        while self._events and self._events[0][0] <= end_s:
            self.now_s, _, action = heapq.heappop(self._events)
            action()
        for device in self._devices:
            device.end()
        tokens = np.array([device.tokens for device in self._devices])
        plain = sum(device.plain_tokens for device in self._devices)
        return FleetResult(
            device_tokens_per_s=tokens / plan.seconds,
            plain_share=float(plain / max(1.0, tokens.sum())),
            busy=np.array([service.busy_s for service in self.services]) / plan.seconds,
            devices_at=tuple(len(service.members) for service in self.services),
            moves=self.moves,
            refused=self.refused,
        )

    def _forget_the_warm_up(self) -> None:
        for device in self._devices:
            device.tokens = device.plain_tokens = 0.0
        for service in self.services:
            service.busy_s = 0.0
        self.moves = self.refused = 0


class Service:
    """One draft service: the real scheduler, and an engine that only takes time."""

    def __init__(self, fleet: Fleet, number: int) -> None:
        self._fleet, self.number = fleet, number
        self.busy_s = 0.0
        self.is_up = True
        self.members: dict[SessionKey, Edge] = {}
        self._scheduler = self._new_scheduler()
        self._life = 0  # counts restarts: a step of an earlier life ends nowhere
        self._stepping = False

    def open(self, key: SessionKey, device: Edge) -> bool:
        """Whether there was room."""
        for action in self._scheduler.handle(Open(key, HEAD, self._fleet.now_s)):
            if isinstance(action, Refuse):
                return False
            self._act(action)
        self.members[key] = device
        return True

    def rows(self, key: SessionKey, count: int) -> None:
        """Rows came in, and a tree is wanted on top of them."""
        actions = self._scheduler.handle(Arrive(key, count, True, self._fleet.now_s))
        assert not actions, "the fleet's limits let everybody bring rows"
        self._step()

    def close(self, key: SessionKey) -> None:
        if self.members.pop(key, None) is not None:
            self._scheduler.handle(Close(key))

    def fail(self) -> None:
        self.is_up = False
        self._life += 1
        self._stepping = False
        self._scheduler = self._new_scheduler()
        members, self.members = list(self.members.values()), {}
        for device in members:
            device.lost()

    def recover(self) -> None:
        self.is_up = True

    def _new_scheduler(self) -> Scheduler:
        return Scheduler(self._fleet.plan.limits, (HEAD,), self._fleet.plan.policy)

    def _act(self, action: Action) -> None:
        if isinstance(action, Evict):
            self.members.pop(action.key).evicted()
        else:
            assert isinstance(action, Admit)

    def _step(self) -> None:
        if self._stepping:
            return
        for action in self._scheduler.handle(EngineFree()):
            if isinstance(action, RunStep):
                self._launch(action.turns)

    def _launch(self, turns: tuple[Turn, ...]) -> None:
        self._stepping = True
        rows = sum(turn.rows for turn in turns)
        kv_rows = sum(self.members[turn.key].context for turn in turns)
        seconds, life = self._fleet.plan.step_s(rows, kv_rows), self._life
        self._fleet.after(seconds, lambda: self._step_ended(turns, seconds, life))

    def _step_ended(self, turns: tuple[Turn, ...], seconds: float, life: int) -> None:
        if life != self._life:
            return
        self.busy_s += seconds
        self._stepping = False
        beams: list[int] = []
        done: list[Edge] = []
        for turn in turns:
            device = self.members.get(turn.key)
            next_beams = device.grown(turn) if device is not None else 0
            beams.append(next_beams)
            if device is not None and not next_beams and (turn.starts_tree or turn.phase is Phase.GROW):
                done.append(device)
        self._scheduler.handle(StepEnded(tuple(beams), frozenset()))
        for device in done:
            device.drafted()
        self._step()
