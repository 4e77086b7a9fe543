"""Who takes part in the next step: pure, `handle(event) -> [action]`, no clock, no socket, no model.

Batched (the default): every session that has rows joins the very next step, whatever phase it is in; trees
before prompts, prompts in bounded chunks, and where a step has too few rows for all, devices share by cost
(`fairness`). Serial: the baseline of the StarSD paper, whole prompts and whole trees of one session after
another, first come, first served.

The scheduler counts rows and never sees them.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from starsd_edge.errors import LocalProtocolError
from starsd_edge.protocol.session_table import SessionKey
from starsd_server.fairness import Allowance, Share, turn_cost
from starsd_server.scheduling import (
    Action,
    Admit,
    Arrive,
    Close,
    Drained,
    EngineFree,
    Event,
    Evict,
    EvictReason,
    Heard,
    Limits,
    Open,
    Phase,
    Policy,
    Refuse,
    RefuseReason,
    RunStep,
    StepEnded,
    Tick,
    Turn,
    make_turn,
)
from starsd_server.slots import Slots

__all__ = ["Scheduler"]

EXTEND, GROW = Phase.EXTEND, Phase.GROW  # a member is slow to look up
RETRY_SESSIONS_S = 5.0  # until another session of the device may have ended
RETRY_MEMORY_S = 1.0  # until some session may have gone idle
RETRY_STEP_S = 0.05  # until the step under way has ended
RETRY_QUEUE_S = 0.5  # until some of what waits may be done: a few hundred rows at the least
RETRY_DRAINING_S = 10.0  # until another process may have taken over


@dataclass(slots=True)
class _Block:
    """Rows that arrived together."""

    rows: int
    wants_tree: bool
    arrival: int


@dataclass(slots=True)
class _Session:
    key: SessionKey
    head: str
    last_heard: float
    device: _Device
    blocks: deque[_Block] = field(default_factory=deque)
    beams: int = 0  # rows of the next level of the tree that grows
    tree_arrival: int = 0  # of the block that the tree grows on
    running: bool = False
    slot: int | None = None  # to be released when the step has ended: the session left while it ran

    @property
    def idle(self) -> bool:
        return not self.running and self.beams == 0 and not self.blocks

    @property
    def queued_rows(self) -> int:
        return sum(block.rows for block in self.blocks)


@dataclass(slots=True)
class _Device:
    """Sessions of one device, what it was given and what it may bring."""

    allowance: Allowance
    share: Share
    sessions: dict[SessionKey, _Session] = field(default_factory=dict)
    queued_rows: int = 0


class Scheduler:
    """State of all sessions and devices of a service."""

    def __init__(self, limits: Limits, heads: tuple[str, ...], policy: Policy = Policy.BATCHED) -> None:
        self._limits, self._policy = limits, policy
        self._slots: dict[str, Slots[SessionKey]] = {head: Slots(limits.max_sessions) for head in heads}
        self._sessions: dict[SessionKey, _Session] = {}
        self._ready: dict[SessionKey, _Session] = {}  # those with work that no step has taken yet
        self._going_ahead: dict[SessionKey, int] = {}  # trees that were answered, and rows of their next step
        self._devices: dict[str, _Device] = {}
        self._allowance: Allowance | None = None  # of all devices, from the first arrival on
        self._queued_rows = 0
        self._virtual_time = 0.0  # what a device that re-enters is lifted to
        self._arrivals = 0
        self._step: list[_Session] | None = None  # who takes part in the step that runs
        self._draining = self._drained = False
        self._serving: SessionKey | None = None  # serial: whose prompt or tree is under way

    def handle(self, event: Event) -> list[Action]:
        """What `event` brings about. Raises LocalProtocolError for one that cannot happen."""
        actions: list[Action] = []
        if isinstance(event, EngineFree):
            self._dispatch(actions)
        elif isinstance(event, StepEnded):
            self._step_ended(event)
        elif isinstance(event, Arrive):
            self._arrive(event, actions)
        elif isinstance(event, Open):
            self._open(event, actions)
        elif isinstance(event, Close):
            self._forget(event.key)
        elif isinstance(event, Heard):
            self._heard(event)
        elif isinstance(event, Tick):
            self._expire(event.now, actions)
        else:
            self._draining = True
        return actions

    @property
    def num_sessions(self) -> int:
        return len(self._sessions)

    @property
    def num_waiting(self) -> int:
        """Sessions with work that no step has taken yet."""
        return len(self._ready)

    # -------------------------------------------------------------------------------------- events

    def _open(self, event: Open, actions: list[Action]) -> None:
        key, limits = event.key, self._limits
        if key in self._sessions:
            raise LocalProtocolError(f"session {key.session:x} of {key.device} is open already")
        if self._draining:
            actions.append(Refuse(key, RefuseReason.DRAINING, RETRY_DRAINING_S))
            return
        device = self._devices.get(key.device)
        if device is not None and len(device.sessions) >= limits.device_sessions:
            actions.append(Refuse(key, RefuseReason.SESSIONS, RETRY_SESSIONS_S))
            return
        slots = self._slots[event.head]
        slot = slots.take(key)
        if slot is None and slots.soon:
            actions.append(Refuse(key, RefuseReason.MEMORY, RETRY_STEP_S))
            return
        if slot is None:
            victim = slots.least_recently_used(lambda other: self._sessions[other].idle)
            if victim is None:
                actions.append(Refuse(key, RefuseReason.MEMORY, RETRY_MEMORY_S))
                return
            self._forget(victim)
            actions.append(Evict(victim, EvictReason.ROOM))
            slot = slots.take(key)
            assert slot is not None
        device = self._devices.get(key.device)  # looked up again: the victim may have been its last session
        if device is None:
            allowance = Allowance(limits.device_rows_per_s, limits.rate_window_s, event.now)
            device = self._devices[key.device] = _Device(allowance, Share(self._virtual_time))
        session = _Session(key, event.head, event.now, device)
        self._sessions[key] = device.sessions[key] = session
        actions.append(Admit(key, slot))

    def _arrive(self, event: Arrive, actions: list[Action]) -> None:
        session = self._known(event.key)
        refusal = self._objection(session.device, event)
        if refusal is not None:
            actions.append(refusal)
            return
        session.last_heard = event.now
        self._slots[session.head].touch(event.key)
        for block in session.blocks:
            block.wants_tree = False
        self._arrivals += 1
        session.beams = 0  # a tree that still grows is for an older prefix
        self._going_ahead.pop(event.key, None)
        session.blocks.append(_Block(event.rows, event.wants_tree, self._arrivals))
        if not session.running:
            self._ready[event.key] = session
        self._queue(session.device, event.rows)
        session.device.share.enter(self._virtual_time)

    def _objection(self, device: _Device, event: Arrive) -> Refuse | None:
        """Why the rows may not come in now; when they may, they are charged."""
        limits, key = self._limits, event.key
        if self._allowance is None:
            self._allowance = Allowance(limits.rows_per_s, limits.rate_window_s, event.now)
        if (wait_s := device.allowance.missing_s(event.rows, event.now)) > 0:
            return Refuse(key, RefuseReason.RATE, wait_s)
        if (wait_s := self._allowance.missing_s(event.rows, event.now)) > 0:
            return Refuse(key, RefuseReason.LOAD, wait_s)
        # Whoever has nothing waiting may always bring one message.
        if device.queued_rows and device.queued_rows + event.rows > limits.device_queue_rows:
            return Refuse(key, RefuseReason.QUEUE, RETRY_QUEUE_S)
        if device.queued_rows and self._queued_rows + event.rows > limits.queue_rows:
            return Refuse(key, RefuseReason.LOAD, RETRY_QUEUE_S)
        device.allowance.take(event.rows)
        self._allowance.take(event.rows)
        return None

    def _step_ended(self, event: StepEnded) -> None:
        if self._step is None:
            raise LocalProtocolError("a step ended that was not running")
        ended, self._step = self._step, None
        if len(event.beams) != len(ended):
            raise LocalProtocolError(f"a step of {len(ended)} turns ended with {len(event.beams)}")
        failed = event.failed
        resting: list[_Device] = []  # those of a session with nothing left
        for session, beams in zip(ended, event.beams, strict=True):
            session.running = False
            if session.slot is not None:
                self._slots[session.head].release(session.slot)  # it left meanwhile
            elif failed and session.key in failed:
                self._clear(session)
            elif not session.blocks:  # what came in meanwhile is for a newer prefix than the tree
                session.beams = beams
            if session.slot is None and (session.beams or session.blocks):
                self._ready[session.key] = session
            elif session.slot is None and session.key in event.ahead:
                self._going_ahead[session.key] = event.ahead[session.key]
            else:
                resting.append(session.device)
        if self._serving is not None and not self._unfinished(self._serving):
            self._serving = None
        for device in resting:
            device.share.backlogged = any(not each.idle for each in device.sessions.values())

    def _heard(self, event: Heard) -> None:
        """It keeps its slot, and is still the first to give it up where another session needs one."""
        session = self._sessions.get(event.key)
        if session is not None:
            session.last_heard = event.now

    def _expire(self, now: float, actions: list[Action]) -> None:
        for session in list(self._sessions.values()):
            if session.idle and now - session.last_heard > self._limits.idle_lease_s:
                self._forget(session.key)
                actions.append(Evict(session.key, EvictReason.IDLE))

    def _forget(self, key: SessionKey) -> None:
        session = self._sessions.pop(key, None)
        if session is None:
            return
        slots = self._slots[session.head]
        slot = slots.give(key)
        if session.running:
            session.slot = slot  # the step under way still writes to it
        else:
            slots.release(slot)
        self._clear(session)
        device = session.device
        del device.sessions[key]
        if self._serving == key:
            self._serving = None
        if not device.sessions:
            # Its counter may go: on re-entry it is lifted to the virtual time anyway.
            del self._devices[key.device]

    def _clear(self, session: _Session) -> None:
        """Drop what the session has queued."""
        self._queue(session.device, -session.queued_rows)
        self._ready.pop(session.key, None)
        self._going_ahead.pop(session.key, None)
        session.blocks.clear()
        session.beams = 0

    def _queue(self, device: _Device, rows: int) -> None:
        device.queued_rows += rows
        self._queued_rows += rows

    # --------------------------------------------------------------------------------------- steps

    def _dispatch(self, actions: list[Action]) -> None:
        """Work-conserving: when the engine is free and anyone is ready, a step runs."""
        if self._step is not None:
            raise LocalProtocolError("the engine cannot be free while a step runs")
        chosen = self._serial_choice() if self._policy is Policy.SERIAL else self._batched_choice()
        if chosen:
            backlogged = list(self._ready.values())
            turns = self._take(chosen)
            self._step = chosen
            lowest = min([session.device.share.counter for session in backlogged])
            self._virtual_time = max(self._virtual_time, lowest)
            actions.append(RunStep(turns))
        elif self._draining and not self._drained:
            self._drained = True
            actions.append(Drained())
        elif self._going_ahead and not self._draining:
            actions.append(RunStep(self._go_ahead()))

    def _go_ahead(self) -> tuple[Turn, ...]:
        """What to do while nobody needs the engine: trees that were answered go on, in turn, as many at once
        as come free. It costs their devices nothing; whoever gets ready meanwhile is next."""
        turns: list[Turn] = []
        left = self._limits.free_rows
        for key, rows in self._going_ahead.items():
            if turns and rows > left:
                break
            turns.append(Turn(key, Phase.AHEAD, rows))
            left -= rows
        self._step = [self._sessions[turn.key] for turn in turns]
        for session in self._step:
            session.running = True
            del self._going_ahead[session.key]
        return tuple(turns)

    def _batched_choice(self) -> list[_Session]:
        limits, chunk_rows = self._limits, self._limits.chunk_rows
        rounds: list[_Session] = []
        prompts: list[_Session] = []
        rows = 0  # of rounds
        for session in self._ready.values():
            if session.beams:
                rounds.append(session)
                rows += session.beams
                continue
            block = session.blocks[0]
            if block.wants_tree and block.rows <= chunk_rows:
                rounds.append(session)
                rows += block.rows
            else:
                prompts.append(session)
        if not prompts and rows <= min(limits.free_rows, limits.step_rows):
            return rounds  # there is room for all
        rounds = self._evenly(rounds)
        if not prompts:
            return self._fitting(rounds, limits.step_rows)
        chosen = self._fitting(rounds, limits.step_rows - limits.chunk_rows)
        left = limits.step_rows - sum(map(self._next_rows, chosen))
        if rounds:
            left = min(left, limits.chunk_rows)  # a prompt may slow everyone's tree by one chunk, not more
        return chosen + self._fitting(prompts, left)

    def _evenly(self, rounds: list[_Session]) -> list[_Session]:
        """Those that may take part where a step costs by its rows: one session of every device, and more of
        a device while they keep within its share of the rows that come free."""
        if len(rounds) < 2 or sum(map(self._next_rows, rounds)) <= self._limits.free_rows:
            return rounds
        devices = {session.key.device for session in rounds}
        if len(devices) in (1, len(rounds)):
            return rounds
        share = self._limits.free_rows // len(devices)
        taken: dict[str, int] = {}
        chosen: list[_Session] = []
        for session in sorted(rounds, key=_arrival):
            needed, name = self._next_rows(session), session.key.device
            if name not in taken or taken[name] + needed <= share:
                taken[name] = taken.get(name, 0) + needed
                chosen.append(session)
        return chosen

    def _fitting(self, sessions: list[_Session], rows: int) -> list[_Session]:
        """As many of the sessions as fit into `rows`, those of the devices with the least cost first."""
        if sum(map(self._next_rows, sessions)) <= rows:
            return sessions
        cost = {name: device.share.counter for name, device in self._devices.items()}
        waiting: dict[str, deque[_Session]] = {}
        for session in sorted(sessions, key=_arrival):
            waiting.setdefault(session.key.device, deque()).append(session)
        chosen: list[_Session] = []
        while waiting:
            name = min(waiting, key=lambda device: (cost[device], device))
            session = waiting[name].popleft()
            if not waiting[name]:
                del waiting[name]
            needed = self._next_rows(session)
            if needed > rows:
                break  # neither a level nor a chunk is torn apart, and nobody smaller slips past: it is next
            chosen.append(session)
            rows -= needed
            cost[name] += turn_cost(needed)
        return chosen

    def _serial_choice(self) -> list[_Session]:
        if self._serving is None:
            if not self._ready:
                return []
            self._serving = min(self._ready.values(), key=_arrival).key
        return [self._sessions[self._serving]]

    def _next_rows(self, session: _Session) -> int:
        """Rows of the session's next turn. Chunks end at the same rows of a block whoever else is there, so
        that a session's bits depend on itself alone."""
        return session.beams or min(session.blocks[0].rows, self._limits.chunk_rows)

    def _take(self, chosen: list[_Session]) -> tuple[Turn, ...]:
        """The next turn of each, charged to its device."""
        if len(chosen) == len(self._ready):
            self._ready.clear()
        else:
            for session in chosen:
                del self._ready[session.key]
        turns: list[Turn] = []
        for session in chosen:
            key, rows = session.key, session.beams
            session.running = True
            if rows:
                session.beams = 0
                turns.append(make_turn((key, GROW, rows, False, False)))
            else:
                rows = self._next_rows(session)
                turns.append(self._take_block(session, rows))
            session.device.share.counter += turn_cost(rows)
        return tuple(turns)

    def _take_block(self, session: _Session, rows: int) -> Turn:
        block = session.blocks[0]
        block.rows -= rows
        self._queue(session.device, -rows)
        if block.rows:
            return Turn(session.key, EXTEND, rows)
        session.blocks.popleft()
        session.tree_arrival = block.arrival
        return Turn(session.key, EXTEND, rows, block.wants_tree, True)

    def _unfinished(self, key: SessionKey) -> bool:
        """Serial: the session's prompt or tree is not done yet."""
        session = self._sessions.get(key)
        return session is not None and not session.idle

    def _known(self, key: SessionKey) -> _Session:
        session = self._sessions.get(key)
        if session is None:
            raise LocalProtocolError(f"session {key.session:x} of {key.device} is not open")
        return session


def _arrival(session: _Session) -> int:
    return session.tree_arrival if session.beams else session.blocks[0].arrival
