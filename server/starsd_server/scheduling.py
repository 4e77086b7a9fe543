"""What the scheduler is told and what it answers: limits, events and actions, all of them plain values.

`now` in an event is monotonic seconds; rows are rows of the draft head.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import NamedTuple, TypeAlias

from msgspec import Struct

from starsd_edge.protocol.session_table import SessionKey

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
    "Heard",
    "Limits",
    "Open",
    "Phase",
    "Policy",
    "Refuse",
    "RefuseReason",
    "RunStep",
    "StepEnded",
    "Tick",
    "Turn",
    "make_turn",
]


class Policy(enum.Enum):
    BATCHED = "batched"
    WHOLE = "whole"  # batched, and every tree as large as it was asked for, however busy the engine is
    SERIAL = "serial"


class Phase(enum.Enum):
    EXTEND = "extend"
    GROW = "grow"
    AHEAD = "ahead"  # of a tree that was answered and goes on


class RefuseReason(enum.Enum):
    SESSIONS = "sessions"  # the device has as many as it may
    MEMORY = "memory"  # no slot is free, and nobody is idle
    RATE = "rate"  # the device brings rows faster than it may
    QUEUE = "queue"  # the device has as many rows waiting as it may
    LOAD = "load"  # the service as a whole has enough
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
    rows_per_s           the same for all devices together
    device_queue_rows    rows of one device that may wait: a few prompts
    queue_rows           the same for all devices together
    step_rows            rows of one step
    chunk_rows           rows of one session's prompt in one step; also what prompts together get of a step
                         in which trees take the rest
    free_rows            rows that a step carries for hardly more than one of them costs; beyond, devices with
                         several sessions leave room for the others
    idle_lease_s         silence after which a session loses its slot
    """

    max_sessions: int = 64
    device_sessions: int = 8
    device_rows_per_s: float = 4000.0
    rows_per_s: float = 100_000.0
    rate_window_s: float = 5.0
    device_queue_rows: int = 16_384
    queue_rows: int = 131_072
    step_rows: int = 1024
    chunk_rows: int = 64
    free_rows: int = 16
    idle_lease_s: float = 60.0

    def __post_init__(self) -> None:
        counts = (self.max_sessions, self.device_sessions, self.chunk_rows)
        rates = (self.device_rows_per_s, self.rows_per_s, self.rate_window_s)
        queues = (self.device_queue_rows, self.queue_rows, self.free_rows)
        if min(*counts, *queues) < 1 or min(rates) <= 0:
            raise ValueError(f"limits below one serve nobody: {self}")
        if self.step_rows < self.chunk_rows:
            raise ValueError("a step must hold at least one chunk")


# --------------------------------------------------------------------------------------------------- events


class Open(Struct, frozen=True):
    """A session asks for a slot of `head`."""

    key: SessionKey
    head: str
    now: float


class Arrive(Struct, frozen=True):
    """`rows` head rows of a session came in; with `wants_tree`, a tree on top of them is wanted. Unstarted
    trees of the session are no longer wanted then, their rows still are."""

    key: SessionKey
    rows: int
    wants_tree: bool
    now: float


class Close(Struct, frozen=True):
    key: SessionKey


class Heard(Struct, frozen=True):
    """A session whose device is there and wants nothing: somebody reads an answer."""

    key: SessionKey
    now: float


class EngineFree(Struct, frozen=True):
    """No step runs: the moment to choose the next one."""


class StepEnded(NamedTuple):
    """`beams`: for each turn of the step, in order, the rows of its tree's next level; 0 when none grows.
    `failed`: sessions whose rows were refused; what else they have queued is dropped.
    `ahead`: sessions whose tree is done and may go on, or goes on already, and the rows of its next step."""

    beams: tuple[int, ...]
    failed: frozenset[SessionKey] = frozenset()
    ahead: Mapping[SessionKey, int] = MappingProxyType({})


class Tick(Struct, frozen=True):
    now: float


class Drain(Struct, frozen=True):
    """Take no new session; finish what is under way."""


Event: TypeAlias = Open | Arrive | Close | Heard | EngineFree | StepEnded | Tick | Drain


# -------------------------------------------------------------------------------------------------- actions


class Turn(NamedTuple):
    """One session's part in a step. `ends_block`: these are the last rows of what arrived together, and a
    tree starts on them if one is wanted."""

    key: SessionKey
    phase: Phase
    rows: int
    starts_tree: bool = False
    ends_block: bool = False


make_turn: partial[Turn] = partial(tuple.__new__, Turn)
"""A Turn of a sequence of its fields: half of what its own constructor takes."""


class RunStep(NamedTuple):
    """Run these together now, then tell StepEnded."""

    turns: tuple[Turn, ...]


class Admit(Struct, frozen=True):
    key: SessionKey
    slot: int


class Refuse(Struct, frozen=True):
    """Nothing was taken of what the session asked."""

    key: SessionKey
    reason: RefuseReason
    retry_after_s: float


class Evict(Struct, frozen=True):
    """The session lost its slot: should it come back, it has to open and prefill again."""

    key: SessionKey
    reason: EvictReason


class Drained(Struct, frozen=True):
    """Nothing is left to do."""


Action: TypeAlias = RunStep | Admit | Refuse | Evict | Drained
