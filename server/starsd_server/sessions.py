"""All sessions of the service: messages in, replies out, and what the scheduler and the engine make of them.

No socket and no clock: `receive`, `begin`, `finish`, `answer` and `tick` take values and fill `outbox`. The
worker is the loop around it; a simulator can be another.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np

from starsd_edge.decoding.costs import CostCurve
from starsd_edge.decoding.tree import NO_PARENT, DraftTree
from starsd_edge.protocol.codec import Frames
from starsd_edge.protocol.limits import MAX_NODES
from starsd_edge.protocol.messages import BusyReason, ErrorCode, Hints, Message
from starsd_edge.protocol.server_connection import (
    Closed,
    Greeted,
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
from starsd_server.heads.grow import AheadLimits, GrowthLimits, VerifyCosts
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
)
from starsd_server.session import Block, Ended, Flight, OutgoingReply, Part, Session
from starsd_server.sharing import Sharing
from starsd_server.step import (
    NO_TREE,
    Advanced,
    Extend,
    GoAhead,
    Grow,
    Outcome,
    Refused,
    SessionRows,
    StepEngine,
    TreeReady,
    WorkItem,
)
from starsd_server.telemetry import Recorder, SessionFacts

__all__ = ["Clock", "Sessions", "TreeShape"]

Clock: TypeAlias = Callable[[], float]
"""Monotonic seconds."""

BUSY_REASONS = {
    RefuseReason.SESSIONS: BusyReason.SESSIONS,
    RefuseReason.MEMORY: BusyReason.MEMORY,
    RefuseReason.RATE: BusyReason.RATE,
    RefuseReason.QUEUE: BusyReason.QUEUE,
    RefuseReason.LOAD: BusyReason.LOAD,
    RefuseReason.DRAINING: BusyReason.DRAINING,
}
GROW, AHEAD = Phase.GROW, Phase.AHEAD  # a member is slow to look up
NOBODY: frozenset[SessionKey] = frozenset()
NO_ROWS: Mapping[SessionKey, int] = {}
# What is drafted ahead: children offered per row, rows of a step where many come free, and steps. Of 250
# nodes about a hundred have children; deeper than six levels beyond a tree hardly a text follows.
AHEAD_WIDTH = 16
AHEAD_ROWS = 32
AHEAD_STEPS = 6
MAX_SEATS = 1024  # sessions that may be known at once; those without a slot cost a few kilobytes each


@dataclass(frozen=True, slots=True)
class TreeShape:
    """How wide and deep trees may get; small trees are narrower by themselves."""

    top_k: int = 10
    steps: int = 7

    def limits(
        self, max_nodes: int, costs: VerifyCosts | None, ahead: AheadLimits | None = None
    ) -> GrowthLimits:
        """For a tree of `max_nodes`, root included: wide enough to fill it, deep enough to be a chain."""
        top_k = min(self.top_k, max(4, max_nodes // 3), max_nodes - 1)
        return GrowthLimits(max_nodes, top_k, min(self.steps, max_nodes - 2), costs, ahead)

    def ahead(self, free_rows: int) -> AheadLimits:
        """For what is drafted ahead on an engine of which so many rows come free."""
        return AheadLimits(MAX_NODES, min(free_rows, AHEAD_ROWS), max(AHEAD_WIDTH, self.top_k), AHEAD_STEPS)


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
        *,
        ahead: bool = False,
    ) -> None:
        """`ahead`: let answered trees go on while nobody needs the engine."""
        self._table = SessionTable(
            offer, max_sessions_per_device=limits.device_sessions, max_sessions=MAX_SEATS
        )
        self._engines = engines
        self.by_itself = all(engine.by_itself for engine in engines.values())
        self._scheduler = Scheduler(limits, tuple(engines), policy)
        self._shape = shape or TreeShape()
        self._ahead = self._shape.ahead(limits.free_rows) if ahead and policy is not Policy.SERIAL else None
        self._sessions: dict[SessionKey, Session] = {}
        self.recorder = recorder or Recorder(offer, limits, policy)
        self._sharing = Sharing(limits.free_rows) if policy is Policy.BATCHED else None
        self._price = 0.0  # what a row of a tree has to bring, as of the newest step that was answered
        self._flight: Flight | None = None
        # An engine that computes by itself has ended a step, and somebody goes on: whatever else has come in
        # is better received while the next one runs.
        self.hurried = False
        self._last_step_s = 0.0  # when the newest step ended
        self._arrived: list[tuple[Session, RowsArrived, float]] = []  # to be counted, and when they came in
        self._ended: list[Ended] = []  # to be answered
        self.outbox: list[OutgoingReply] = []
        self.drained = False

    def facts(self) -> list[SessionFacts]:
        """Where every session stands, for a snapshot."""
        return [session.facts() for session in self._sessions.values()]

    @property
    def waiting(self) -> bool:
        """Whether anybody is ready for a step."""
        return self._scheduler.num_waiting > 0

    # ------------------------------------------------------------------------------------------- in

    def receive(
        self, device: str, route: bytes, message: Message, now_s: float, waited_s: float = 0.0
    ) -> None:
        """A message of an authenticated device, which came in at `now_s` and has waited so long since."""
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
                    self._schedule(Heard(key, now_s), now_s)
                    self.outbox.append(OutgoingReply(route, connection.send_pong(nonce, int(waited_s * 1e6))))
                case Reported(body):
                    self.recorder.reported(device, body, now_s)
                case Violated(code, text):
                    self.recorder.violated(key, code, text)
                case Closed():
                    self.recorder.left(key)
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
        """`begin`, `finish` and `answer` at once; whether there was a step to run."""
        begun = self.begin(clock)
        self.finish(clock)
        self.answer()
        return begun

    def begin(self, clock: Clock) -> bool:
        """Launch a step if anyone is ready and none is under way; whether one was launched.

        Call it when everything that came in has been received, so that all of it takes part; at once while
        `hurried`. `clock` gives monotonic seconds."""
        if self._flight is not None:
            return False
        self.hurried = False
        for action in self._scheduler.handle(EngineFree()):
            if isinstance(action, RunStep):
                self._launch(action.turns, clock)
            else:
                self._act(action)
        return self._flight is not None

    def left_s(self) -> float:
        """Seconds until the step under way is done; not above zero when it is, or when there is none.

        Messages may be received meanwhile: sessions that close or start anew are taken out of the step."""
        if self._flight is None:
            return 0.0
        return max([self._engines[head].left_s() for head in self._flight.heads])

    def finish(self, clock: Clock) -> None:
        """Wait for the step under way, if there is one, so that the next can begin; `answer` is for later."""
        flight = self._flight
        if flight is None:
            return
        late_s = max(0.0, -self.left_s())
        self._flight = None
        began_s = flight.started_s if self.by_itself else clock()
        outcomes = self._collect(flight)
        ended_s = self._last_step_s = clock() - late_s
        if self._price > 0.0:
            self._narrow(flight, outcomes)
        beams: list[int] = []
        refused: list[tuple[Part, Refused]] = []
        for part, outcome in zip(flight.parts, outcomes, strict=True):
            if isinstance(outcome, Advanced):
                beams.append(outcome.beams if part.going_on else 0)
                continue
            beams.append(0)
            if isinstance(outcome, Refused):
                refused.append((part, outcome))
        failed = frozenset([part.turn.key for part, _ in refused]) if refused else NOBODY
        ahead = going_ahead(flight.parts, outcomes) if self._ahead is not None else NO_ROWS
        self._scheduler.handle(StepEnded(tuple(beams), failed, ahead))
        self.hurried = self.by_itself and self.waiting
        for part, refusal in refused:
            if self._still(part):
                self._refused(part.session, refusal)
        self._ended.append(Ended(flight, outcomes, began_s, ended_s))

    def answer(self) -> None:
        """Count what came in and the steps that have ended, and answer what they have done. While the next
        one runs is the best time."""
        self._count_arrivals()
        ended, self._ended = self._ended, []
        for flight, outcomes, began_s, ended_s in ended:
            turns, step_s = [part.turn for part in flight.parts], ended_s - began_s
            if turns[0].phase is AHEAD:
                self._went_ahead(flight.parts, outcomes, step_s, ended_s)
                continue
            self.recorder.stepped(turns, flight.waited_s + began_s - flight.started_s, step_s)
            if self._sharing is not None:
                self._price = self._sharing.stepped(turns, step_s, ended_s)
                self.recorder.priced(self._price)
            for part, outcome in zip(flight.parts, outcomes, strict=True):
                if isinstance(outcome, TreeReady) and self._still(part):
                    self._tree_done(part.session, part.block, outcome, ended_s)
                elif part.turn.ends_block and not part.turn.starts_tree and self._still(part):
                    self._block_done(part.session, part.block, ended_s)

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
        refusal = self._schedule(Open(session.key, session.head.name, now_s), now_s)
        if refusal is not None:
            self._busy(session, event.round_id, refusal)
            return
        self._send(session, session.connection.send_ack(event.round_id))
        self.recorder.opened(session.key, now_s)

    def _rows_arrived(self, session: Session, event: RowsArrived, now_s: float) -> None:
        wants_tree = event.hints is not None and event.hints.max_nodes > 1
        session.drafting = session.going_ahead = None  # overtaken
        if session.ahead is not None:
            self.recorder.drafted_ahead(used=leads_on(session.ahead, event))
            session.ahead = None
        refusal = self._schedule(Arrive(session.key, len(event.tokens), wants_tree, now_s), now_s)
        if refusal is not None:
            self._busy(session, event.round_id, refusal)
            return
        limits = self._tree_limits(session, event.hints) if event.hints is not None and wants_tree else None
        session.blocks.append(Block(event, now_s, limits))
        self._arrived.append((session, event, now_s))

    def _count_arrivals(self) -> None:
        """What the next step does not wait for."""
        arrived, self._arrived = self._arrived, []
        for session, event, now_s in arrived:
            if event.hints is not None and self._sharing is not None:
                session.trust.brought(event.hints.num_accepted)
                self._sharing.brought(min(event.hints.num_accepted + 1, len(event.tokens)), now_s)
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
                session.forget_rows()
                self.recorder.evicted(key, reason)
            case Drained():
                self.drained = True

    # ------------------------------------------------------------------------------------- the step

    def _launch(self, turns: tuple[Turn, ...], clock: Clock) -> None:
        """One engine step per head. The accelerator idles until it is done: nothing here that can wait."""
        sessions = [self._sessions[turn.key] for turn in turns]
        items: list[WorkItem] = []
        blocks: list[Block | None] = []
        for turn, session in zip(turns, sessions, strict=True):
            rows = session.rows
            assert rows is not None
            if turn.phase is GROW:
                items.append(Grow(rows))
                blocks.append(session.drafting)
            elif turn.phase is AHEAD:
                items.append(GoAhead(rows))
                blocks.append(session.going_ahead)
            else:
                block = session.blocks[0]
                items.append(self._extension(session, rows, block, turn))
                blocks.append(block)
        started_s = clock()
        heads = self._launch_items(items, sessions)
        # What is left to do is done while the engine runs.
        parts = [
            Part(turn, session, head, item.session, block)
            for turn, session, head, item, block in zip(turns, sessions, heads, items, blocks, strict=True)
        ]
        waited_s = started_s - max(self._last_step_s, self._begin_blocks(parts, started_s))
        self._flight = Flight(parts, tuple(dict.fromkeys(heads)), started_s, waited_s)

    def _launch_items(self, items: list[WorkItem], sessions: list[Session]) -> list[str]:
        """Each engine gets its items; whose, by item."""
        if len(self._engines) == 1:
            ((head, engine),) = self._engines.items()
            engine.launch(items)
            return [head] * len(items)
        heads = [session.head.name for session in sessions]
        for head in dict.fromkeys(heads):
            self._engines[head].launch([item for item, its in zip(items, heads, strict=True) if its == head])
        return heads

    def _begin_blocks(self, parts: list[Part], started_s: float) -> float:
        """Since when the first of them could have run, had nothing been in its way."""
        ready_s = started_s
        for part in parts:
            block = part.block
            if block is not None and block.started_s is None:
                block.started_s = started_s
                ready_s = min(ready_s, block.arrived_s)
            elif part.turn.phase is not AHEAD:  # for which nobody waits
                ready_s = min(ready_s, self._last_step_s)
        return ready_s

    def _collect(self, flight: Flight) -> list[Outcome]:
        """What became of each part."""
        if len(flight.heads) == 1:
            return self._engines[flight.heads[0]].collect()
        collected = {head: iter(self._engines[head].collect()) for head in flight.heads}
        return [next(collected[part.head]) for part in flight.parts]

    def _narrow(self, flight: Flight, outcomes: list[Outcome]) -> None:
        """Where the engine is saturated, trees go on as far as their rows are worth its time."""
        for place, part in enumerate(flight.parts):
            outcome = outcomes[place]
            if isinstance(outcome, Advanced) and outcome.beams and part.going_on:
                engine = self._engines[part.head]
                outcomes[place] = engine.narrow(part.rows, self._price / part.session.trust.ratio)
                if outcomes[place] != outcome:
                    self._narrowed(part.block)

    def _narrowed(self, block: Block | None) -> None:
        """The tree on `block` lost rows; it is counted once."""
        if block is not None and not block.narrowed:
            block.narrowed = True
            self.recorder.narrowed()

    def _extension(self, session: Session, rows: SessionRows, block: Block, turn: Turn) -> Extend:
        """The next rows of `block`, and the tree on them if it is time for that."""
        arrived, done = block.rows, block.done
        if turn.ends_block:
            session.blocks.popleft()
        limits = None
        if turn.starts_tree:
            session.drafting, limits = block, block.limits
        if turn.ends_block and done == 0:  # all of them
            return Extend(rows, arrived.tokens, arrived.features, arrived.start, limits)
        block.done = end = done + turn.rows
        return Extend(
            rows, arrived.tokens[done:end], arrived.features[done:end], arrived.start + done, limits
        )

    def _still(self, part: Part) -> bool:
        """Whether the session has neither ended nor begun anew since the step was launched."""
        return self._sessions.get(part.turn.key) is part.session and part.session.rows is part.rows

    def _tree_limits(self, session: Session, hints: Hints) -> GrowthLimits:
        costs, ahead = None, None
        if session.verify_s is not None:
            costs = VerifyCosts(session.verify_s[: hints.max_nodes], hints.wait_us / 1e6)
        if self._ahead is not None and hints.ahead_nodes > hints.max_nodes:
            ahead = replace(self._ahead, max_nodes=hints.ahead_nodes)
        return self._shape.limits(hints.max_nodes, costs, ahead)

    def _block_done(self, session: Session, block: Block | None, now_s: float) -> None:
        """The last rows of a message are in, and no tree grows on them."""
        assert block is not None
        if not session.connection.wants(block.rows.round_id):
            return
        if block.rows.hints is None:
            self._send(session, session.connection.send_ack(block.rows.round_id))
        else:
            self._tree_done(session, block, NO_TREE, now_s)  # a tree of one node was wanted

    def _tree_done(self, session: Session, block: Block | None, ready: TreeReady, now_s: float) -> None:
        if session.drafting is block:
            session.drafting = None
        if block is None or not session.connection.wants(block.rows.round_id):
            self.recorder.overtaken(session.key)
            return
        started_s = now_s if block.started_s is None else block.started_s
        queue_s, draft_s = started_s - block.arrived_s, now_s - started_s
        session.trust.sent(float(ready.probabilities.sum()))
        self.recorder.drafted(session.key, 1 + len(ready.tokens), queue_s, draft_s)
        frames = session.connection.send_draft(
            block.rows.round_id,
            block.rows.base_len,
            ready.tokens,
            ready.parents,
            queue_us=int(queue_s * 1e6),
            draft_us=int(draft_s * 1e6),
        )
        self._send(session, frames)

    def _went_ahead(self, parts: list[Part], outcomes: list[Outcome], step_s: float, ended_s: float) -> None:
        """A step of trees that were answered: what is done is sent, unless the next rows are there."""
        self.recorder.went_ahead(step_s)
        for part, outcome in zip(parts, outcomes, strict=True):
            session, block = part.session, part.block
            if not isinstance(outcome, TreeReady) or not self._still(part) or block is None:
                continue
            if block is not session.going_ahead or not session.connection.wants_ahead(block.rows.round_id):
                continue
            assert block.started_s is not None
            draft_us = int((ended_s - block.started_s) * 1e6)
            session.ahead = whole_tree(block, outcome)
            frames = session.connection.send_ahead(
                block.rows.round_id, outcome.tokens, outcome.parents, draft_us=draft_us
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
            self._count_arrivals()
            self._scheduler.handle(Close(key))
            self.recorder.closed(key)

    def _release(self, session: Session) -> None:
        """Give the slot back; the session stays known."""
        if session.rows is not None:
            for action in self._scheduler.handle(Close(session.key)):
                self._act(action)
            session.forget_rows()


def going_ahead(parts: list[Part], outcomes: list[Outcome]) -> dict[SessionKey, int]:
    """Sessions whose trees are done and may go on, or go on already, and the rows of their next step."""
    rows: dict[SessionKey, int] = {}
    for part, outcome in zip(parts, outcomes, strict=True):
        if isinstance(outcome, TreeReady) and outcome.ahead and part.going_on:
            part.session.going_ahead = part.block
            rows[part.turn.key] = outcome.ahead
        elif isinstance(outcome, Advanced) and outcome.beams and part.turn.phase is AHEAD:
            rows[part.turn.key] = outcome.beams
    return rows


def whole_tree(block: Block, ready: TreeReady) -> DraftTree:
    """A tree on top of `block`. Which token its root is does not matter here, and is not always known."""
    tokens = np.concatenate([np.zeros(1, np.int32), ready.tokens])
    parents = np.concatenate([np.array([NO_PARENT], np.int32), ready.parents])
    return DraftTree(tokens, parents, block.rows.base_len)


def leads_on(tree: DraftTree, rows: RowsArrived) -> bool:
    """Whether `tree` goes on where the text that came after its root ends."""
    if rows.start + 1 != tree.base_len:
        return False
    left = tree.descend(rows.tokens.tolist())
    return left is not None and len(left) > 1
