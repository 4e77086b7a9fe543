"""One session as the service holds it, and its part in a step."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

from msgspec import Struct

from starsd_edge.decoding.tree import DraftTree
from starsd_edge.protocol.codec import Frames
from starsd_edge.protocol.server_connection import HeadOffer, RowsArrived, ServerConnection
from starsd_edge.protocol.session_table import SessionKey
from starsd_edge.protocol.telemetry import SessionState
from starsd_server.heads.grow import GrowthLimits
from starsd_server.scheduling import Turn
from starsd_server.sharing import Trust
from starsd_server.step import Outcome, SessionRows
from starsd_server.telemetry import SessionFacts

__all__ = ["Block", "Ended", "Flight", "OutgoingReply", "Part", "Session"]


class OutgoingReply(Struct, frozen=True):
    route: bytes
    frames: Frames


class Block(Struct):
    """Rows that arrived in one message, how many of them the head has seen, and what the tree on them may be
    if one is wanted. `narrowed`: not all rows of it were worth the engine's time."""

    rows: RowsArrived
    arrived_s: float
    limits: GrowthLimits | None = None
    done: int = 0
    started_s: float | None = None
    narrowed: bool = False


@dataclass(slots=True)
class Session:
    """One session of one device."""

    key: SessionKey
    connection: ServerConnection
    head: HeadOffer
    route: bytes
    verify_s: list[float] | None  # seconds of its device's forwards over 1, 2, ... nodes; None: not told
    opened_s: float
    rows: SessionRows | None = None  # None: no slot
    blocks: deque[Block] = field(default_factory=deque)
    drafting: Block | None = None  # whose tree is being grown
    going_ahead: Block | None = None  # whose tree was answered and may go on
    ahead: DraftTree | None = None  # what was drafted ahead of the next rows
    trust: Trust = field(default_factory=Trust)

    def facts(self) -> SessionFacts:
        """Where it stands, for a snapshot."""
        kv_rows = self.rows.committed if self.rows is not None else 0
        return SessionFacts(self.key, self.head.name, self._state(), self.connection.held_len, kv_rows)

    def forget_rows(self) -> None:
        """It has no slot any more."""
        self.rows = self.drafting = self.going_ahead = self.ahead = None
        self.blocks.clear()

    def _state(self) -> SessionState:
        if self.rows is None:
            return SessionState.EVICTED
        if self.drafting is not None:
            return SessionState.DRAFTING
        if self.blocks:
            wants_tree = self.blocks[-1].rows.hints is not None
            return SessionState.QUEUED if wants_tree else SessionState.PREFILLING
        return SessionState.VERIFYING if self.rows.committed else SessionState.IDLE


class Part(NamedTuple):
    """A session's part in a step. `block` is what its rows are of, or what its tree grows on; None for a tree
    that was overtaken."""

    turn: Turn
    session: Session
    head: str
    rows: SessionRows
    block: Block | None

    @property
    def going_on(self) -> bool:
        """Whether its tree is still wanted."""
        return self.block is not None and self.block is self.session.drafting


class Flight(Struct, frozen=True):
    """The step under way: who takes part, and with which heads."""

    parts: list[Part]
    heads: tuple[str, ...]
    started_s: float
    waited_s: float  # how long somebody waited for it while no step ran


class Ended(NamedTuple):
    """A step that has ended: what became of each part, and since when the engine computed, until when."""

    flight: Flight
    outcomes: list[Outcome]
    began_s: float
    ended_s: float
