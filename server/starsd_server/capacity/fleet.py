"""A fleet in virtual time: many devices, several draft services, failures; events instead of seconds.

Which service a device uses is decided by the product's `Placement`, who takes part in a step by its
`Scheduler`; what a round asks and brings is played from a recording. Steps and verifications take what their
profiles say. There are no messages and no processor time in it: the host is as fast as it likes. A device
waits for its tree while it has a service, as the benchmark's do, and decodes plainly while it has none.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from starsd_edge.decoding.costs import CostCurve
from starsd_edge.link.placement import Place, Placement
from starsd_edge.protocol.session_table import SessionKey
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
RETRY_S = 1.0  # plain steps before a device asks again that found no service with room


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
    return _Fleet(plan).run()


class _Fleet:
    """Events, and whom they concern."""

    def __init__(self, plan: FleetPlan) -> None:
        self.plan = plan
        self.now_s = 0.0
        self.moves = self.refused = 0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self.services = [_Service(self, number) for number in range(plan.services)]
        places = [Place(f"tcp://draft-{number}:7731") for number in range(plan.services)]
        self._devices = [_Device(self, number, places) for number in range(plan.devices)]

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
            self.after(plan.warm_up_s * device.number / (2 * plan.devices), device.join)
        self.after(plan.warm_up_s, self._forget_the_warm_up)
        end_s = plan.warm_up_s + plan.seconds
        while self._events and self._events[0][0] <= end_s:
            self.now_s, _, action = heapq.heappop(self._events)
            action()
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


class _Service:
    """One draft service: the real scheduler, and an engine that only takes time."""

    def __init__(self, fleet: _Fleet, number: int) -> None:
        self._fleet, self.number = fleet, number
        self.busy_s = 0.0
        self.is_up = True
        self.members: dict[SessionKey, _Device] = {}
        self._scheduler = self._new_scheduler()
        self._life = 0  # counts restarts: a step of an earlier life ends nowhere
        self._stepping = False

    def open(self, key: SessionKey, device: _Device) -> bool:
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
        done: list[_Device] = []
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


class _Device:
    """One edge: where it is in its conversation, and which service it uses."""

    def __init__(self, fleet: _Fleet, number: int, places: Sequence[Place]) -> None:
        self._fleet, self.number = fleet, number
        self._name = f"jet{number}"
        self._key = SessionKey(self._name, number)
        self._placement = Placement(self._name, places)
        self._index = {place.address: place_number for place_number, place in enumerate(places)}
        played = fleet.plan.conversations
        self._conversations = itertools.cycle(
            [*played[number % len(played) :], *played[: number % len(played)]]
        )
        self._rounds: list[Played] = []
        self._level = 0
        self._epoch = 0  # counts losses of the service: what was under way then comes no more
        self.tokens = self.plain_tokens = 0.0
        self.context = 0

    @property
    def _service(self) -> _Service:
        return self._fleet.services[self._index[self._placement.current.address]]

    def join(self) -> None:
        """Open a session, here or at the next service that has room; the whole context goes up with it."""
        for _ in range(len(self._placement)):
            if not self._service.is_up:
                self.lost()
                return
            if self._service.open(self._key, self):
                self._epoch += 1
                if not self._rounds:
                    self._next_conversation()
                self._update(self.context + self._rounds[0].new_rows)
                return
            self._fleet.refused += 1
            if not self._placement.leave(self._fleet.now_s):
                break
            self._fleet.moves += 1
        self._plain_until(RETRY_S, self.join)

    def lost(self) -> None:
        """The service died: plain steps until that is certain, then the next one."""
        self._epoch += 1
        self._plain_until(self._fleet.plan.detect_s, self._move)

    def evicted(self) -> None:
        self._epoch += 1
        self.after(self._fleet.plan.rtt_s, self.join)

    def grown(self, turn: Turn) -> int:
        """Rows of the next level of its tree, after a step it took part in; 0: done, or none was begun."""
        if turn.phase is Phase.EXTEND and not turn.starts_tree:
            return 0
        self._level = 0 if turn.phase is Phase.EXTEND else self._level + 1
        beams = self._rounds[0].beams
        return beams[self._level] if self._level < len(beams) else 0

    def drafted(self) -> None:
        plan, round_ = self._fleet.plan, self._rounds[0]
        self.after(plan.rtt_s / 2 + plan.curve(round_.nodes), self._verified)

    def _verified(self) -> None:
        round_ = self._rounds.pop(0)
        self.tokens += round_.tokens
        self.context += round_.new_rows
        if not self._rounds:
            self._service.close(self._key)
            self.context = 0
            self._next_conversation()
            if self._placement.prefers_another(self._fleet.now_s):
                self._placement.go_back(self._fleet.now_s)
                self._fleet.moves += 1
            self.join()
            return
        self._update(self._rounds[0].new_rows)

    def _update(self, rows: int) -> None:
        self.after(self._fleet.plan.rtt_s / 2, lambda: self._arrive(rows))

    def _arrive(self, rows: int) -> None:
        # A service that fails tells nobody: its edges find out after `detect_s`.
        if self._key in self._service.members:
            self._service.rows(self._key, rows)

    def _move(self) -> None:
        self._fleet.moves += 1
        if self._placement.leave(self._fleet.now_s):
            self.join()
        else:  # all have failed of late
            self._plain_until(RETRY_S, self.join)

    def _plain_until(self, seconds: float, action: Callable[[], None]) -> None:
        """Decode plainly meanwhile; the conversation's recorded rounds stay where they are."""
        tokens = seconds / self._fleet.plan.curve.plain_s
        self.tokens += tokens
        self.plain_tokens += tokens
        self.after(seconds, action)

    def _next_conversation(self) -> None:
        self._rounds = list(next(self._conversations))

    def after(self, seconds: float, action: Callable[[], None]) -> None:
        """Unless its service is lost before."""
        epoch = self._epoch

        def unless_lost() -> None:
            if epoch == self._epoch:
                action()

        self._fleet.after(seconds, unless_lost)
