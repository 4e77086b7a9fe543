"""All sessions of the service: messages in, replies out, and what the scheduler and the engine make of them.

No socket and no clock: `receive`, `begin`, `finish`, `answer` and `tick` take values and fill `outbox`;
`step_loop` calls them in order.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from msgspec.structs import replace

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
    Event,
    Evict,
    Heard,
    Limits,
    Open,
    Phase,
    Policy,
    Refuse,
    RefuseReason,
    Tick,
)
from starsd_server.session import Block, OutgoingReply, Part, Session
from starsd_server.sharing import Sharing
from starsd_server.step import NO_TREE, Outcome, Refused, StepEngine, TreeReady
from starsd_server.stepping import Clock, Steps
from starsd_server.telemetry import Recorder, SessionFacts

__all__ = ["Sessions", "TreeShape"]

BUSY_REASONS = {
    RefuseReason.SESSIONS: BusyReason.SESSIONS,
    RefuseReason.MEMORY: BusyReason.MEMORY,
    RefuseReason.RATE: BusyReason.RATE,
    RefuseReason.QUEUE: BusyReason.QUEUE,
    RefuseReason.LOAD: BusyReason.LOAD,
    RefuseReason.DRAINING: BusyReason.DRAINING,
}
AHEAD = Phase.AHEAD  # a member is slow to look up
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
        self._scheduler = Scheduler(limits, tuple(engines), policy)
        self._shape = shape or TreeShape()
        self._ahead = self._shape.ahead(limits.free_rows) if ahead and policy is not Policy.SERIAL else None
        self._sessions: dict[SessionKey, Session] = {}
        self.recorder = recorder or Recorder(offer, limits, policy)
        self._sharing = Sharing(limits.free_rows) if policy is Policy.BATCHED else None
        self._steps = Steps(
            engines,
            self._scheduler,
            self._sessions,
            self.recorder.narrowed,
            ahead=self._ahead is not None,
        )
        self._arrived: list[tuple[Session, RowsArrived, float]] = []  # to be counted, and when they came in
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

    @property
    def by_itself(self) -> bool:
        """Whether the engines compute while the host goes on."""
        return self._steps.by_itself

    @property
    def hurried(self) -> bool:
        """Whether to `begin` at once: an engine idles, and somebody goes on."""
        return self._steps.hurried

    def begin(self, clock: Clock) -> bool:
        """Launch a step if anyone is ready and none is under way; whether one was launched.

        Call it when everything that came in has been received, so that all of it takes part; at once while
        `hurried`. `clock` gives monotonic seconds."""
        if self._steps.under_way:
            return False
        for action in self._steps.begin(clock):
            self._act(action)
        return self._steps.under_way

    def left_s(self) -> float:
        """Seconds until the step under way is done; not above zero when it is, or when there is none.

        Messages may be received meanwhile: sessions that close or start anew are taken out of the step."""
        return self._steps.left_s()

    def finish(self, clock: Clock) -> None:
        """Wait for the step under way, if there is one, so that the next can begin; `answer` is for later."""
        for part, refusal in self._steps.finish(clock):
            if self._still(part):
                self._refused(part.session, refusal)

    def answer(self) -> None:
        """Count what came in and the steps that have ended, and answer what they have done. While the next
        one runs is the best time."""
        self._count_arrivals()
        for flight, outcomes, began_s, ended_s in self._steps.take_ended():
            turns, step_s = [part.turn for part in flight.parts], ended_s - began_s
            if turns[0].phase is AHEAD:
                self._went_ahead(flight.parts, outcomes, step_s, ended_s)
                continue
            self.recorder.stepped(turns, flight.waited_s + began_s - flight.started_s, step_s)
            if self._sharing is not None:
                self._steps.price = self._sharing.stepped(turns, step_s, ended_s)
                self.recorder.priced(self._steps.price)
            for part, outcome in zip(flight.parts, outcomes, strict=True):
                if isinstance(outcome, TreeReady) and self._still(part):
                    self._tree_done(part.session, part.block, outcome, ended_s)
                elif part.turn.ends_block and not part.turn.starts_tree and self._still(part):
                    self._block_done(part.session, part.block, ended_s)

    # --------------------------------------------------------------------------------- what came in

    def _greeted(
        self, key: SessionKey, connection: ServerConnection, event: Greeted, route: bytes, now_s: float
    ) -> None:
        verify_s: list[float] | None = None
        if event.hello.cost_sizes:
            try:
                curve = CostCurve(tuple(event.hello.cost_sizes), tuple(event.hello.cost_seconds))
                verify_s = curve.table(event.head.max_nodes).tolist()
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
