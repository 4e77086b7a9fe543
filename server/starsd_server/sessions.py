"""All sessions of the service: messages in, replies out, and what the scheduler and the engine make of them.

No socket and no clock: `receive`, `run_step` and `tick` take values and fill `outbox`. The worker is the loop
around it; a simulator can be another.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np

from starsd_edge.decoding.costs import CostCurve
from starsd_edge.decoding.tree import NO_PARENT, DraftTree
from starsd_edge.protocol.codec import Frames
from starsd_edge.protocol.messages import BusyReason, ErrorCode, Hints, Message
from starsd_edge.protocol.server_connection import (
    Closed,
    Greeted,
    HeadOffer,
    Opened,
    Pinged,
    Reply,
    Reported,
    RowsArrived,
    ServerConnection,
    ServiceOffer,
    Violated,
)
from starsd_edge.protocol.session_table import SessionKey, SessionTable
from starsd_edge.protocol.telemetry import SessionState
from starsd_edge.types import Float64Array
from starsd_server.engine import (
    Advanced,
    Extend,
    Grow,
    Outcome,
    Refused,
    SessionRows,
    StepEngine,
    TreeReady,
    WorkItem,
)
from starsd_server.heads.grow import GrowthLimits, VerifyCosts
from starsd_server.scheduler import Scheduler
from starsd_server.scheduling import (
    Action,
    Admit,
    Arrive,
    Close,
    Drain,
    Drained,
    EngineFree,
    Event,
    Evict,
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
)
from starsd_server.telemetry import Recorder, SessionFacts

__all__ = ["OutgoingReply", "Session", "Sessions", "TreeShape"]

Clock: TypeAlias = Callable[[], float]
"""Monotonic seconds."""

BUSY_REASONS = {
    RefuseReason.SESSIONS: BusyReason.SESSIONS,
    RefuseReason.MEMORY: BusyReason.MEMORY,
    RefuseReason.RATE: BusyReason.RATE,
    RefuseReason.DRAINING: BusyReason.DRAINING,
}
MAX_SEATS = 1024  # sessions that may be known at once; those without a slot cost a few kilobytes each


@dataclass(frozen=True, slots=True)
class TreeShape:
    """How wide and deep trees may get; small trees are narrower by themselves."""

    top_k: int = 10
    steps: int = 7

    def limits(self, max_nodes: int, costs: VerifyCosts | None) -> GrowthLimits:
        """For a tree of `max_nodes`, root included: wide enough to fill it, deep enough to be a chain."""
        top_k = min(self.top_k, max(4, max_nodes // 3), max_nodes - 1)
        return GrowthLimits(max_nodes, top_k, min(self.steps, max_nodes - 2), costs)


@dataclass(frozen=True, slots=True)
class OutgoingReply:
    route: bytes
    frames: Frames


@dataclass(slots=True)
class Block:
    """Rows that arrived in one message, and how many of them the head has seen."""

    rows: RowsArrived
    arrived_s: float
    done: int = 0
    started_s: float | None = None


@dataclass(slots=True)
class Session:
    """One session of one device, as the service holds it."""

    key: SessionKey
    connection: ServerConnection
    head: HeadOffer
    route: bytes
    verify_s: Float64Array | None  # [max_nodes] seconds of its device's forwards; None: not told
    opened_s: float
    rows: SessionRows | None = None  # None: no slot
    root: int = 0  # the newest committed token
    blocks: deque[Block] = field(default_factory=deque)
    drafting: Block | None = None  # whose tree is being grown


class Sessions:
    """The service without its sockets."""

    def __init__(
        self,
        offer: ServiceOffer,
        engines: dict[str, StepEngine],
        limits: Limits,
        policy: Policy,
        shape: TreeShape | None = None,
        recorder: Recorder | None = None,
    ) -> None:
        self._table = SessionTable(
            offer, max_sessions_per_device=limits.device_sessions, max_sessions=MAX_SEATS
        )
        self._engines = engines
        self._scheduler = Scheduler(limits, tuple(engines), policy)
        self._shape = shape or TreeShape()
        self._sessions: dict[SessionKey, Session] = {}
        self.recorder = recorder or Recorder(offer, limits, policy)
        self._last_step_s = 0.0  # when the newest step ended
        self.outbox: list[OutgoingReply] = []
        self.drained = False

    def facts(self) -> list[SessionFacts]:
        """Where every session stands, for a snapshot."""
        return [
            SessionFacts(
                session.key,
                session.head.name,
                _state(session),
                session.connection.held_len,
                _kv_rows(session),
            )
            for session in self._sessions.values()
        ]

    @property
    def waiting(self) -> bool:
        """Whether anybody is ready for a step."""
        return self._scheduler.num_waiting > 0

    # ------------------------------------------------------------------------------------------- in

    def receive(self, device: str, route: bytes, message: Message, now_s: float) -> None:
        """A message of an authenticated device, which came in at `now_s`."""
        connection, events = self._table.receive(device, message, now_s)
        key = SessionKey(device, message.head.session)
        session = self._sessions.get(key)
        if session is not None:
            session.route = route
        for event in events:
            match event:
                case Reply(frames):
                    self.outbox.append(OutgoingReply(route, frames))
                case Greeted():
                    self._greeted(key, connection, event, route, now_s)
                case Opened():
                    self._opened(self._sessions[key], event, now_s)
                case RowsArrived():
                    self._rows_arrived(self._sessions[key], event, now_s)
                case Pinged(nonce):
                    self.recorder.pinged(key)
                    self.outbox.append(OutgoingReply(route, connection.send_pong(nonce, 0)))
                case Reported(body):
                    self.recorder.reported(device, body, now_s)
                case Violated(code, text):
                    self.recorder.violated(key, code, text)
                case Closed():
                    self._drop(key)
        self.recorder.heard(device, now_s)

    def tick(self, now_s: float) -> None:
        """Call about once a second: leases run out."""
        for key in self._table.expire(now_s):
            self.recorder.lease_over(key)
            self._drop(key)
        self._schedule(Tick(now_s), now_s)

    def drain(self, now_s: float, remaining_ms: int) -> None:
        """Tell every edge, take nothing new; `drained` is set when all that was under way is answered."""
        self._table.drain()
        for session in self._sessions.values():
            self.outbox.append(OutgoingReply(session.route, session.connection.send_goaway(remaining_ms)))
        self._schedule(Drain(), now_s)

    def drop_device(self, device: str) -> None:
        """Its key was revoked: its sessions end."""
        for key in self._table.drop_device(device):
            self._drop(key)

    def step(self, clock: Clock) -> bool:
        """Run one engine step if anyone is ready, and answer what it finished; False when nobody is.

        Call it when everything that came in has been received: all of it takes part. `clock` gives monotonic
        seconds."""
        turns: tuple[Turn, ...] = ()
        for action in self._scheduler.handle(EngineFree()):
            if isinstance(action, RunStep):
                turns = action.turns
            else:
                self._act(action)
        if turns:
            self._run_step(turns, clock)
        return bool(turns)

    def _run_step(self, turns: tuple[Turn, ...], clock: Clock) -> None:
        started_s = clock()
        waited_s = started_s - max(self._last_step_s, min(self._ready_s(turn) for turn in turns))
        outcomes = self._run(turns, started_s)
        ended_s = self._last_step_s = clock()
        self.recorder.stepped(turns, waited_s, ended_s - started_s)
        growing: dict[SessionKey, int] = {}
        failed: set[SessionKey] = set()
        for turn, outcome in zip(turns, outcomes, strict=True):
            session = self._sessions[turn.key]
            if isinstance(outcome, Refused):
                failed.add(turn.key)
                continue
            if turn.ends_block and not turn.starts_tree:
                self._block_done(session, ended_s)
            elif turn.starts_tree:
                session.drafting = session.blocks.popleft()
            if isinstance(outcome, TreeReady):
                self._tree_done(session, outcome, ended_s)
            elif isinstance(outcome, Advanced) and outcome.beams:
                growing[turn.key] = outcome.beams
        self._schedule(StepEnded(growing, frozenset(failed)), ended_s)
        for turn, outcome in zip(turns, outcomes, strict=True):
            if isinstance(outcome, Refused):
                self._refused(self._sessions[turn.key], outcome)

    # --------------------------------------------------------------------------------- what came in

    def _greeted(
        self, key: SessionKey, connection: ServerConnection, event: Greeted, route: bytes, now_s: float
    ) -> None:
        verify_s = None
        if event.hello.cost_sizes:
            try:
                curve = CostCurve(tuple(event.hello.cost_sizes), tuple(event.hello.cost_seconds))
                verify_s = curve.table(event.head.max_nodes)
            except ValueError:
                self.recorder.violated(key, ErrorCode.MALFORMED, "the cost curve of HELLO makes no sense")
        old = self._sessions.get(key)
        if old is None:
            self._sessions[key] = Session(key, connection, event.head, route, verify_s, now_s)
        else:
            if old.head != event.head:
                self._release(old)
            old.head, old.verify_s = event.head, verify_s
        self.recorder.greeted(key, event, now_s)

    def _opened(self, session: Session, event: Opened, now_s: float) -> None:
        """A new context takes a fresh place in the queue for slots; the old one's rows are forgotten."""
        self._release(session)
        session.root = event.first_token
        refusal = self._schedule(Open(session.key, session.head.name, now_s), now_s)
        if refusal is not None:
            self._busy(session, event.round_id, refusal)
            return
        self._send(session, session.connection.send_ack(event.round_id))
        self.recorder.opened(session.key, now_s)

    def _rows_arrived(self, session: Session, event: RowsArrived, now_s: float) -> None:
        wants_tree = event.hints is not None and event.hints.max_nodes > 1
        session.drafting = None  # overtaken
        refusal = self._schedule(Arrive(session.key, len(event.tokens), wants_tree, now_s), now_s)
        if refusal is not None:
            self._busy(session, event.round_id, refusal)
            return
        session.blocks.append(Block(event, now_s))
        self.recorder.rows_arrived(session.key, event, now_s)

    def _schedule(self, event: Event, now_s: float) -> Refuse | None:
        """Let the scheduler decide and do as it says; the refusal of `event`, if it was refused."""
        refusal = None
        for action in self._scheduler.handle(event):
            if isinstance(action, Refuse):
                refusal = action
            else:
                self._act(action)
        return refusal

    def _act(self, action: Action) -> None:
        match action:
            case Admit(key, slot):
                session = self._sessions[key]
                session.rows = self._engines[session.head.name].reset(slot)
            case Evict(key, reason):
                session = self._sessions[key]
                session.connection.evicted()
                self._forget_rows(session)
                self.recorder.evicted(key, reason)
            case Drained():
                self.drained = True

    # ------------------------------------------------------------------------------------- the step

    def _ready_s(self, turn: Turn) -> float:
        """Since when the turn could have run."""
        block = self._sessions[turn.key].blocks[0] if turn.phase is Phase.EXTEND else None
        return block.arrived_s if block is not None and block.started_s is None else self._last_step_s

    def _run(self, turns: tuple[Turn, ...], started_s: float) -> list[Outcome]:
        """One engine step per head; outcomes in the order of `turns`."""
        items: dict[str, list[WorkItem]] = {}
        places: dict[str, list[int]] = {}
        for place, turn in enumerate(turns):
            session = self._sessions[turn.key]
            items.setdefault(session.head.name, []).append(self._item(session, turn, started_s))
            places.setdefault(session.head.name, []).append(place)
        outcomes: list[Outcome] = [Advanced()] * len(turns)
        for head, work in items.items():
            for place, outcome in zip(places[head], self._engines[head].step(work), strict=True):
                outcomes[place] = outcome
        return outcomes

    def _item(self, session: Session, turn: Turn, started_s: float) -> WorkItem:
        assert session.rows is not None
        if turn.phase is Phase.GROW:
            return Grow(session.rows)
        block = session.blocks[0]
        if block.started_s is None:
            block.started_s = started_s
        rows = slice(block.done, block.done + turn.rows)
        start = block.rows.start + block.done
        block.done += turn.rows
        limits = self._tree_limits(session, block.rows.hints) if turn.starts_tree else None
        return Extend(session.rows, block.rows.tokens[rows], block.rows.features[rows], start, limits)

    def _tree_limits(self, session: Session, hints: Hints | None) -> GrowthLimits:
        assert hints is not None
        costs = None
        if session.verify_s is not None:
            costs = VerifyCosts(session.verify_s[: hints.max_nodes], hints.wait_us / 1e6)
        return self._shape.limits(hints.max_nodes, costs)

    def _block_done(self, session: Session, now_s: float) -> None:
        """The last rows of a message are in, and no tree grows on them."""
        block = session.blocks.popleft()
        if len(block.rows.tokens):
            session.root = int(block.rows.tokens[-1])
        if not session.connection.wants(block.rows.round_id):
            return
        if block.rows.hints is None:
            self._send(session, session.connection.send_ack(block.rows.round_id))
        else:
            session.drafting = block  # a tree of one node was wanted
            self._tree_done(session, TreeReady(NO_TOKENS, NO_TOKENS, np.empty(0, np.float32)), now_s)

    def _tree_done(self, session: Session, ready: TreeReady, now_s: float) -> None:
        block, session.drafting = session.drafting, None
        if block is None or not session.connection.wants(block.rows.round_id):
            self.recorder.overtaken(session.key)
            return
        if len(block.rows.tokens):
            session.root = int(block.rows.tokens[-1])
        tree = DraftTree(
            np.concatenate([np.array([session.root], np.int32), ready.tokens]),
            np.concatenate([np.array([NO_PARENT], np.int32), ready.parents]),
            block.rows.base_len,
        )
        started_s = now_s if block.started_s is None else block.started_s
        queue_s, draft_s = started_s - block.arrived_s, now_s - started_s
        self.recorder.drafted(session.key, len(tree), queue_s, draft_s)
        frames = session.connection.send_draft(
            block.rows.round_id, tree, int(queue_s * 1e6), int(draft_s * 1e6)
        )
        self._send(session, frames)

    def _refused(self, session: Session, outcome: Refused) -> None:
        """The engine could not use this session's rows: it starts over, alone."""
        self.recorder.violated(session.key, ErrorCode.INTERNAL, outcome.reason)
        self._send(session, session.connection.send_error(ErrorCode.INTERNAL, outcome.reason))
        session.connection.evicted()
        self._release(session)

    # -------------------------------------------------------------------------------------- replies

    def _send(self, session: Session, frames: Frames) -> None:
        self.outbox.append(OutgoingReply(session.route, frames))

    def _busy(self, session: Session, round_id: int, refusal: Refuse) -> None:
        reason = BUSY_REASONS[refusal.reason]
        retry_after_ms = max(1, int(refusal.retry_after_s * 1e3))
        self._send(session, session.connection.send_busy(round_id, retry_after_ms, reason))
        self.recorder.refused(session.key, refusal)

    # ----------------------------------------------------------------------------------- the ending

    def _drop(self, key: SessionKey) -> None:
        """The session is over."""
        session = self._sessions.pop(key, None)
        if session is not None:
            self._scheduler.handle(Close(key))
            self.recorder.closed(key)

    def _release(self, session: Session) -> None:
        """Give the slot back; the session stays known."""
        if session.rows is not None:
            for action in self._scheduler.handle(Close(session.key)):
                self._act(action)
            self._forget_rows(session)

    def _forget_rows(self, session: Session) -> None:
        session.rows = session.drafting = None
        session.blocks.clear()


def _kv_rows(session: Session) -> int:
    return session.rows.committed if session.rows is not None else 0


def _state(session: Session) -> SessionState:
    if session.rows is None:
        return SessionState.EVICTED
    if session.drafting is not None:
        return SessionState.DRAFTING
    if session.blocks:
        wants_tree = session.blocks[-1].rows.hints is not None
        return SessionState.QUEUED if wants_tree else SessionState.PREFILLING
    return SessionState.VERIFYING if session.rows.committed else SessionState.IDLE


NO_TOKENS = np.empty(0, np.int32)
