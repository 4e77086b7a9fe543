"""Who takes part in the next step: pure, `handle(event) -> [action]`, no clock, no socket, no model.

Batched (the default): every session that has rows joins the very next step, whatever phase it is in; trees
before prompts, prompts in bounded chunks, and where a step has too few rows for all, devices share by cost
(virtual token counters with lift on re-entry: Sheng et al., arXiv 2401.00588). Serial: the baseline of the
StarSD paper, whole prompts and whole trees of one session after another, first come, first served.

The scheduler counts rows and never sees them. `now` in an event is monotonic seconds.
"""

from __future__ import annotations

import enum
from collections import deque
from dataclasses import dataclass, field
from typing import TypeAlias

from starsd_edge.errors import LocalProtocolError
from starsd_edge.protocol.session_table import SessionKey
from starsd_server.slots import Slots

__all__ = [
    "Action",
    "Admit",
    "Arrive",
    "Close",
    "Drain",
    "Drained",
    "EngineFree",
    "Event",
    "Evict",
    "EvictReason",
    "Limits",
    "Open",
    "Phase",
    "Policy",
    "Refuse",
    "RefuseReason",
    "RunStep",
    "Scheduler",
    "StepEnded",
    "Tick",
    "Turn",
]

TURN_COST = 8  # a turn costs its rows and this much: a step's fixed price, in rows (measured on a CPU head)
RETRY_SESSIONS_S = 5.0  # until another session of the device may have ended
RETRY_MEMORY_S = 1.0  # until some session may have gone idle
RETRY_DRAINING_S = 10.0  # until another process may have taken over


class Policy(enum.Enum):
    BATCHED = "batched"
    SERIAL = "serial"


class Phase(enum.Enum):
    EXTEND = "extend"
    GROW = "grow"


class RefuseReason(enum.Enum):
    SESSIONS = "sessions"
    MEMORY = "memory"
    RATE = "rate"
    DRAINING = "draining"


class EvictReason(enum.Enum):
    ROOM = "room"  # another session needed the slot
    IDLE = "idle"  # its lease ran out


@dataclass(frozen=True, slots=True)
class Limits:
    """What devices and the whole service may use.

    max_sessions         KV slots of one head
    device_sessions      sessions of one device
    device_rows_per_s    head rows a device may bring per second, on average over `rate_window_s`
    step_rows            rows of one step
    chunk_rows           rows of one session's prompt in one step; also what prompts together get of a step
                         in which trees take the rest
    idle_lease_s         silence after which a session loses its slot
    """

    max_sessions: int = 64
    device_sessions: int = 8
    device_rows_per_s: float = 4000.0
    rate_window_s: float = 5.0
    step_rows: int = 512
    chunk_rows: int = 64
    idle_lease_s: float = 60.0

    def __post_init__(self) -> None:
        if min(self.max_sessions, self.device_sessions, self.chunk_rows) < 1 or self.device_rows_per_s <= 0:
            raise ValueError(f"limits below one serve nobody: {self}")
        if self.step_rows < self.chunk_rows:
            raise ValueError("a step must hold at least one chunk")


# ------------------------------------------------------------------------------------------ events, actions


@dataclass(frozen=True, slots=True)
class Open:
    """A session asks for a slot of `head`."""

    key: SessionKey
    head: str
    now: float


@dataclass(frozen=True, slots=True)
class Arrive:
    """`rows` head rows of a session came in; with `wants_tree`, a tree on top of them is wanted. Unstarted
    trees of the session are no longer wanted then, their rows still are."""

    key: SessionKey
    rows: int
    wants_tree: bool
    now: float


@dataclass(frozen=True, slots=True)
class Close:
    key: SessionKey


@dataclass(frozen=True, slots=True)
class EngineFree:
    """No step runs, and all that came in has been told: the moment to choose the next step."""


@dataclass(frozen=True, slots=True)
class StepEnded:
    """`growing`: beams that each session with an unfinished tree wants to run next. `failed`: sessions
    whose rows were refused; what else they have queued is dropped."""

    growing: dict[SessionKey, int] = field(default_factory=dict)
    failed: frozenset[SessionKey] = frozenset()


@dataclass(frozen=True, slots=True)
class Tick:
    now: float


@dataclass(frozen=True, slots=True)
class Drain:
    """Take no new session; finish what is under way."""


Event: TypeAlias = Open | Arrive | Close | EngineFree | StepEnded | Tick | Drain


@dataclass(frozen=True, slots=True)
class Turn:
    """One session's part in a step. `ends_block`: these are the last rows of what arrived together, and a
    tree starts on them if one is wanted."""

    key: SessionKey
    phase: Phase
    rows: int
    starts_tree: bool = False
    ends_block: bool = False


@dataclass(frozen=True, slots=True)
class RunStep:
    """Run these together now, then tell StepEnded."""

    turns: tuple[Turn, ...]


@dataclass(frozen=True, slots=True)
class Admit:
    key: SessionKey
    slot: int


@dataclass(frozen=True, slots=True)
class Refuse:
    """Nothing was taken of what the session asked."""

    key: SessionKey
    reason: RefuseReason
    retry_after_s: float


@dataclass(frozen=True, slots=True)
class Evict:
    """The session lost its slot: should it come back, it has to open and prefill again."""

    key: SessionKey
    reason: EvictReason


@dataclass(frozen=True, slots=True)
class Drained:
    """Nothing is left to do."""


Action: TypeAlias = RunStep | Admit | Refuse | Evict | Drained


# ------------------------------------------------------------------------------------------------ state


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
    last_used: float
    blocks: deque[_Block] = field(default_factory=deque)
    beams: int = 0  # rows of the next level of the tree that grows
    tree_arrival: int = 0  # of the block that the tree grows on
    running: bool = False

    @property
    def ready(self) -> bool:
        return not self.running and (self.beams > 0 or bool(self.blocks))

    @property
    def idle(self) -> bool:
        return not self.running and self.beams == 0 and not self.blocks


@dataclass(slots=True)
class _Device:
    """Cost counter and rate allowance of one device."""

    sessions: dict[SessionKey, _Session] = field(default_factory=dict)
    counter: float = 0.0
    backlogged: bool = False
    allowance: float = 0.0  # rows it may still bring, as of `allowance_at`
    allowance_at: float = 0.0


class Scheduler:
    """State of all sessions and devices of a service."""

    def __init__(self, limits: Limits, heads: tuple[str, ...], policy: Policy = Policy.BATCHED) -> None:
        self._limits, self._policy = limits, policy
        self._slots: dict[str, Slots[SessionKey]] = {head: Slots(limits.max_sessions) for head in heads}
        self._sessions: dict[SessionKey, _Session] = {}
        self._devices: dict[str, _Device] = {}
        self._virtual_time = 0.0  # what a device that re-enters is lifted to
        self._arrivals = 0
        self._stepping = False
        self._draining = self._drained = False
        self._serving: SessionKey | None = None  # serial: whose prompt or tree is under way

    def handle(self, event: Event) -> list[Action]:
        """What `event` brings about. Raises LocalProtocolError for one that cannot happen."""
        actions: list[Action] = []
        if isinstance(event, Open):
            self._open(event, actions)
        elif isinstance(event, Arrive):
            self._arrive(event, actions)
        elif isinstance(event, StepEnded):
            self._step_ended(event)
        elif isinstance(event, Close):
            self._forget(event.key)
        elif isinstance(event, Tick):
            self._expire(event.now, actions)
        elif isinstance(event, Drain):
            self._draining = True
        else:
            self._dispatch(actions)
        return actions

    @property
    def num_sessions(self) -> int:
        return len(self._sessions)

    @property
    def num_waiting(self) -> int:
        """Sessions with work that no step has taken yet."""
        return sum(session.ready for session in self._sessions.values())

    # -------------------------------------------------------------------------------------- events

    def _open(self, event: Open, actions: list[Action]) -> None:
        key, limits = event.key, self._limits
        if key in self._sessions:
            raise LocalProtocolError(f"session {key.session:x} of {key.device} is open already")
        if self._draining:
            actions.append(Refuse(key, RefuseReason.DRAINING, RETRY_DRAINING_S))
            return
        device = self._devices.setdefault(key.device, self._new_device(event.now))
        if len(device.sessions) >= limits.device_sessions:
            actions.append(Refuse(key, RefuseReason.SESSIONS, RETRY_SESSIONS_S))
            return
        slots = self._slots[event.head]
        slot = slots.take(key)
        if slot is None:
            victim = slots.least_recently_used(lambda other: self._sessions[other].idle)
            if victim is None:
                actions.append(Refuse(key, RefuseReason.MEMORY, RETRY_MEMORY_S))
                self._drop_device_if_empty(key.device)
                return
            self._forget(victim)
            actions.append(Evict(victim, EvictReason.ROOM))
            device = self._devices.setdefault(key.device, self._new_device(event.now))
            slot = slots.take(key)
            assert slot is not None
        session = _Session(key, event.head, event.now)
        self._sessions[key] = device.sessions[key] = session
        actions.append(Admit(key, slot))

    def _arrive(self, event: Arrive, actions: list[Action]) -> None:
        session = self._known(event.key)
        device = self._devices[event.key.device]
        retry_after_s = self._over_rate(device, event)
        if retry_after_s > 0:
            actions.append(Refuse(event.key, RefuseReason.RATE, retry_after_s))
            return
        session.last_used = event.now
        self._slots[session.head].touch(event.key)
        for block in session.blocks:
            block.wants_tree = False
        self._arrivals += 1
        session.beams = 0  # a tree that still grows is for an older prefix
        session.blocks.append(_Block(event.rows, event.wants_tree, self._arrivals))
        self._lift(device)

    def _step_ended(self, event: StepEnded) -> None:
        if not self._stepping:
            raise LocalProtocolError("a step ended that was not running")
        self._stepping = False
        for session in self._sessions.values():
            if not session.running:
                continue
            session.running = False
            superseded = any(block.wants_tree for block in session.blocks)
            session.beams = 0 if superseded else event.growing.get(session.key, 0)
            if session.key in event.failed:
                session.blocks.clear()
                session.beams = 0
        if self._serving is not None and not self._unfinished(self._serving):
            self._serving = None
        for device in self._devices.values():
            device.backlogged = any(not session.idle for session in device.sessions.values())

    def _expire(self, now: float, actions: list[Action]) -> None:
        for session in list(self._sessions.values()):
            if session.idle and now - session.last_used > self._limits.idle_lease_s:
                self._forget(session.key)
                actions.append(Evict(session.key, EvictReason.IDLE))

    def _forget(self, key: SessionKey) -> None:
        session = self._sessions.pop(key, None)
        if session is None:
            return
        self._slots[session.head].give(key)
        del self._devices[key.device].sessions[key]
        if self._serving == key:
            self._serving = None
        self._drop_device_if_empty(key.device)

    def _drop_device_if_empty(self, name: str) -> None:
        # Its counter may go: on re-entry it is lifted to the virtual time anyway.
        if not self._devices[name].sessions:
            del self._devices[name]

    # ------------------------------------------------------------------------------------ fairness

    def _new_device(self, now: float) -> _Device:
        limits = self._limits
        return _Device(
            allowance=limits.device_rows_per_s * limits.rate_window_s,
            allowance_at=now,
            counter=self._virtual_time,
        )

    def _over_rate(self, device: _Device, event: Arrive) -> float:
        """Seconds until the device may bring these rows; 0 when it may now, and then they are charged."""
        limits = self._limits
        full = limits.device_rows_per_s * limits.rate_window_s
        refill = (event.now - device.allowance_at) * limits.device_rows_per_s
        device.allowance = min(full, device.allowance + max(0.0, refill))
        device.allowance_at = event.now
        missing = min(event.rows, full) - device.allowance
        if missing > 0:
            return missing / limits.device_rows_per_s
        device.allowance -= event.rows
        return 0.0

    def _lift(self, device: _Device) -> None:
        """A device that was idle starts level with the others: it cannot have saved up service."""
        if not device.backlogged:
            device.backlogged = True
            device.counter = max(device.counter, self._virtual_time)

    def _charge(self, turn: Turn) -> None:
        self._devices[turn.key.device].counter += turn.rows + TURN_COST

    # -------------------------------------------------------------------------------------- steps

    def _dispatch(self, actions: list[Action]) -> None:
        """Work-conserving: when the engine is free and anyone is ready, a step runs."""
        if self._stepping:
            raise LocalProtocolError("the engine cannot be free while a step runs")
        turns = self._serial_turns() if self._policy is Policy.SERIAL else self._batched_turns()
        if turns:
            for turn in turns:
                self._sessions[turn.key].running = True
                self._charge(turn)
            self._stepping = True
            counters = [device.counter for device in self._devices.values() if device.backlogged]
            self._virtual_time = max(self._virtual_time, min(counters))
            actions.append(RunStep(tuple(turns)))
        elif self._draining and not self._drained:
            self._drained = True
            actions.append(Drained())

    def _batched_turns(self) -> list[Turn]:
        rounds: list[_Session] = []
        prompts: list[_Session] = []
        for session in self._sessions.values():
            if session.ready:
                (rounds if self._is_round(session) else prompts).append(session)
        limits = self._limits
        reserved = limits.chunk_rows if prompts else 0
        turns = self._share(rounds, limits.step_rows - reserved)
        left = limits.step_rows - sum(turn.rows for turn in turns)
        if rounds:
            left = min(left, limits.chunk_rows)  # a prompt may slow everyone's tree by one chunk, not more
        return turns + self._share(prompts, left)

    def _share(self, sessions: list[_Session], rows: int) -> list[Turn]:
        """Turns for as many sessions as fit into `rows`, the devices with the least cost first."""
        if not sessions or rows <= 0:
            return []
        if len(sessions) * self._limits.chunk_rows <= rows:
            return [self._take(session) for session in sessions]  # all fit: order does not matter
        cost = {name: device.counter for name, device in self._devices.items()}
        waiting: dict[str, deque[_Session]] = {}
        for session in sorted(sessions, key=self._arrival):
            waiting.setdefault(session.key.device, deque()).append(session)
        turns: list[Turn] = []
        while waiting and rows > 0:
            name = min(waiting, key=lambda device: (cost[device], device))
            session = waiting[name].popleft()
            if not waiting[name]:
                del waiting[name]
            if self._next_rows(session) > rows:
                break  # neither a level nor a chunk is torn apart, and nobody smaller slips past: it is next
            turn = self._take(session)
            turns.append(turn)
            rows -= turn.rows
            cost[name] += turn.rows + TURN_COST
        return turns

    def _serial_turns(self) -> list[Turn]:
        if self._serving is None:
            ready = [session for session in self._sessions.values() if session.ready]
            if not ready:
                return []
            self._serving = min(ready, key=self._arrival).key
        return [self._take(self._sessions[self._serving])]

    def _next_rows(self, session: _Session) -> int:
        """Rows of the session's next turn. Chunks end at the same rows of a block whoever else is there, so
        that a session's bits depend on itself alone."""
        return session.beams or min(session.blocks[0].rows, self._limits.chunk_rows)

    def _take(self, session: _Session) -> Turn:
        """The session's next turn."""
        rows = self._next_rows(session)
        if session.beams:
            session.beams = 0
            return Turn(session.key, Phase.GROW, rows)
        block = session.blocks[0]
        block.rows -= rows
        if block.rows:
            return Turn(session.key, Phase.EXTEND, rows)
        session.blocks.popleft()
        session.tree_arrival = block.arrival
        return Turn(session.key, Phase.EXTEND, rows, starts_tree=block.wants_tree, ends_block=True)

    def _is_round(self, session: _Session) -> bool:
        return session.beams > 0 or (
            session.blocks[0].wants_tree and session.blocks[0].rows <= self._limits.chunk_rows
        )

    def _arrival(self, session: _Session) -> int:
        return session.tree_arrival if session.beams else session.blocks[0].arrival

    def _unfinished(self, key: SessionKey) -> bool:
        """Serial: the session's prompt or tree is not done yet."""
        session = self._sessions.get(key)
        return session is not None and not session.idle

    def _known(self, key: SessionKey) -> _Session:
        session = self._sessions.get(key)
        if session is None:
            raise LocalProtocolError(f"session {key.session:x} of {key.device} is not open")
        return session
