"""The edge's side of its session, without sockets or clock.

Whoever owns the socket calls `receive`, `tick`, `connected`, `lost` and `denied`, sends what `take_frames`
gives and obeys the events that come back. The decode loop calls `start`, `update` and `rollback`. Nothing
here waits, and decoding goes on in every state.

One tree at a time: rows committed while an UPDATE is under way wait for its DRAFT and leave together. A tree
that is still of use holds the next UPDATE back until the loop has verified it; a useless one does not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from starsd_edge.decoding.roles import DrafterState
from starsd_edge.decoding.roles import Update as CommittedRows
from starsd_edge.errors import LocalProtocolError, RemoteProtocolError
from starsd_edge.protocol.breaker import CONNECT_PATIENCE_S, MAX_RESENDS_IN_A_ROW, Breaker
from starsd_edge.protocol.codec import Buffer, Frames, decode
from starsd_edge.protocol.draft_tree import rebuild_tree, still_leads_on
from starsd_edge.protocol.edge_events import Connect, Counters, Disconnect, LinkEvent, TreeArrived
from starsd_edge.protocol.edge_outbox import EdgeOutbox, wire_hints
from starsd_edge.protocol.features import FeatureDtype
from starsd_edge.protocol.greeting import HelloBody, WelcomeBody
from starsd_edge.protocol.history import History
from starsd_edge.protocol.limits import DEFAULT_TIMING, MAX_HISTORY_BYTES, EdgeTiming
from starsd_edge.protocol.link_times import LARGEST_TIMED_BYTES, LinkTimes
from starsd_edge.protocol.messages import (
    Busy,
    BusyReason,
    Draft,
    Error,
    ErrorCode,
    GoAway,
    Head,
    Hints,
    Message,
    MessageKind,
    NeedPrefill,
    Pong,
    PrefillAck,
    Welcome,
)
from starsd_edge.protocol.states import LINKED, TIMED, EdgeEvent, EdgeState, next_edge_state
from starsd_edge.protocol.telemetry import EdgeReport
from starsd_edge.protocol.uplink import Request, Uplink

__all__ = ["EdgeConnection"]


class EdgeConnection:
    """One session with one draft service. All times are monotonic seconds, given by the caller."""

    def __init__(
        self,
        session: int,
        hello: HelloBody,
        jitter: Callable[[], float],
        *,
        timing: EdgeTiming = DEFAULT_TIMING,
        max_history_bytes: int = MAX_HISTORY_BYTES,
    ) -> None:
        dtype = FeatureDtype[hello.dtypes[0].upper()]
        self.state = EdgeState.DOWN
        self.reason = "not connected yet"
        self.times = LinkTimes()
        self.counters = Counters()
        self.last_outage = ""
        self.welcome: WelcomeBody | None = None
        self._session = session
        self._hello = hello
        self._timing = timing
        self._breaker = Breaker(timing, jitter)
        history = History(hello.identity.feature_size, dtype, max_history_bytes)
        self._uplink = Uplink(session, history)
        self._hints = Hints()
        self._outbox = EdgeOutbox(self._uplink, self.counters)
        self._wants_tree = False
        self._holds_tree = False  # a tree of use is with the decode loop
        self._answered_round = 0  # the newest whose tree came
        self._blocked = ""  # why this context is not drafted for, though the link is up
        self._due_s = 0.0  # probe, greeting deadline or end of pause, by state
        self._heard_s = 0.0
        self._ping: int | None = None  # nonce of the one under way
        self._ping_sent_s = 0.0
        self._leaves_at_s: float | None = None  # GOAWAY's deadline
        self._resends = 0

    # ------------------------------------------------------------------------- from the decode loop

    def start(self, first_token: int, now_s: float) -> None:
        """A new context whose position 0 holds `first_token`."""
        self._restart()
        self._uplink.open_context(first_token)
        self._wants_tree = self._holds_tree = False
        self._blocked = ""

    def update(self, rows: CommittedRows, now_s: float) -> None:
        """Rows were committed; a tree on top of them is wanted.

        Raises LocalProtocolError when they do not join the context.
        """
        history = self._uplink.history
        self._hints = wire_hints(rows.hints, self.times.last_link_s)
        if self._blocked:
            return
        ahead = rows.start + 1 - history.committed_len
        if ahead > 0:
            raise LocalProtocolError(
                f"rows from position {rows.start} on a context of {history.committed_len} tokens"
            )
        if ahead < 0:
            self.rollback(rows.start + 1, now_s)
        self._holds_tree = False
        self._wants_tree = True
        try:
            history.extend(rows.tokens, rows.features)
        except (ValueError, OverflowError) as error:
            self._block(str(error))
        self._pump(now_s)

    def rollback(self, committed_len: int, now_s: float) -> None:
        """The context was cut back; the next rows replace what the service has beyond."""
        if committed_len < 1:
            raise LocalProtocolError("a context keeps at least its first token")
        self._restart()
        if committed_len <= self._uplink.history.committed_len:
            self._blocked = ""  # what could not be kept is gone
        self._uplink.history.cut(committed_len)
        self._uplink.rewind(committed_len)
        self._wants_tree = self._holds_tree = False

    def report(self, body: EdgeReport) -> None:
        """Tell the service how the device is doing; dropped while there is no link."""
        if self.state in LINKED:
            self._outbox.report(body)

    def close(self, now_s: float) -> list[LinkEvent]:
        """Say goodbye. The last frames should still be sent before the socket is thrown away."""
        if self.state in LINKED:
            self._outbox.close()
        self._enter(EdgeEvent.CLOSE)
        self.reason = "closed"
        return [Disconnect()]

    @property
    def least_patience_s(self) -> float:
        """No answer is late sooner than this after its request left."""
        return min(self._timing.answer_s, self._timing.chunk_s)

    def drafter_state(self) -> DrafterState:
        """What the policy and the status line may know."""
        reason = self._why_not_ready()
        updates = [request for request in self._uplink.in_flight if request.kind is MessageKind.UPDATE]
        asked_len, asked_s = (updates[0].base_len, updates[0].sent_s) if updates else (0, 0.0)
        return DrafterState(
            not reason,
            self.times.expected_s,
            reason,
            blocked=bool(reason) and reason == self._blocked,
            asked_len=asked_len,
            asked_s=asked_s,
            draft_s=self.times.last_draft_s,
        )

    def _why_not_ready(self) -> str:
        if self.state not in (EdgeState.IDLE, EdgeState.FILLING, EdgeState.DRAFTING):
            return self.reason
        if self._blocked:
            return self._blocked
        if self._breaker.misses:
            return "the draft service is late"
        total = self._uplink.history.committed_len
        filling = any(request.kind is not MessageKind.UPDATE for request in self._uplink.in_flight)
        if self.state is EdgeState.FILLING or (filling and self._uplink.acked_len > 1):
            return f"giving the service the context ({100 * self._uplink.acked_len // max(total, 1)} %)"
        if self._leaves_at_s is not None and self._uplink.sent_len == 0:
            return BusyReason.DRAINING.text
        return ""

    # -------------------------------------------------------------------------------- from the socket

    def connected(self, now_s: float) -> list[LinkEvent]:
        """The security handshake is done."""
        if self.state is not EdgeState.CONNECTING:
            return []
        self._enter(EdgeEvent.CONNECTED)
        self._send_hello(now_s)
        return []

    def lost(self, reason: str, now_s: float) -> list[LinkEvent]:
        """The connection broke or could not be made, or a send failed. A probe follows by itself."""
        if self.state in (EdgeState.DOWN, EdgeState.REFUSED, EdgeState.CLOSED):
            return []
        self._leave(EdgeEvent.LOST, reason)
        self._due_s = self._breaker.probe_at(now_s)
        return [Disconnect()]

    def denied(self, reason: str, now_s: float) -> list[LinkEvent]:
        """The security handshake was refused, or the ends do not fit: probed again, but rarely."""
        if self.state in (EdgeState.REFUSED, EdgeState.CLOSED):
            return []
        self._leave(EdgeEvent.DENIED, reason)
        self._due_s = self._breaker.refused_until(now_s)
        return [Disconnect()]

    def try_now(self, now_s: float) -> None:
        """The link is down, and the next attempt goes to another service: it need not wait."""
        if self.state in (EdgeState.DOWN, EdgeState.REFUSED):
            self._due_s = now_s

    def take_frames(self) -> list[Frames]:
        """What is to be sent now, in order."""
        return self._outbox.take()

    def receive(self, frames: Sequence[Buffer], now_s: float) -> list[LinkEvent]:
        """A message arrived. Never raises for what a service may send: violations are counted and dropped."""
        self.counters.bytes_down += sum(map(len, frames))
        if self.state not in LINKED:
            return []
        try:
            return self._handle(decode(frames), now_s)
        except RemoteProtocolError as error:
            self.counters.violations += 1
            self.reason = f"the service broke the protocol: {error}"
            return []

    def _handle(self, message: Message, now_s: float) -> list[LinkEvent]:
        head = message.head
        if head.session != self._session and not (isinstance(message, Error) and head.session == 0):
            return []
        self._heard_s = now_s
        self._breaker.worked()
        match message:
            case Welcome():
                return self._receive_welcome(message, now_s)
            case Draft():
                return self._receive_ahead(message) if message.ahead else self._receive_draft(message, now_s)
            case PrefillAck():
                return self._receive_ack(message, now_s)
            case NeedPrefill():
                return self._receive_need_prefill(message, now_s)
            case Busy():
                return self._receive_busy(message, now_s)
            case Pong():
                return self._receive_pong(message, now_s)
            case GoAway():
                self._leaves_at_s = now_s + message.remaining_ms / 1e3
                return []
            case Error():
                return self._receive_error(message, now_s)
        raise RemoteProtocolError(f"{type(message).__name__} is not for an edge")

    def _receive_welcome(self, message: Welcome, now_s: float) -> list[LinkEvent]:
        if self.state is not EdgeState.GREETING:
            return []
        body = message.body
        if body.digest != self._hello.digest:
            return self.denied(f"draft head '{body.head}' is for another target", now_s)
        if body.dtype not in self._hello.dtypes:
            raise RemoteProtocolError(f"feature dtype {body.dtype} was not offered")
        self._enter(EdgeEvent.WELCOMED)
        self.welcome = body
        self.reason = ""
        self._leaves_at_s = None
        history = self._uplink.history
        try:
            history.recode(FeatureDtype[body.dtype.upper()])
        except ValueError as error:
            self._block(str(error))
        self._uplink.resume(message.head)
        # What was committed while the link was away is given in the background.
        self._wants_tree, self._holds_tree = history.committed_len > 1, False
        self._pump(now_s)
        return []

    def _receive_draft(self, message: Draft, now_s: float) -> list[LinkEvent]:
        request = self._settle(message.head, MessageKind.UPDATE)
        dwell_s = (message.queue_us + message.draft_us) / 1e6
        round_trip_s = 0.0
        if request is not None:
            round_trip_s = now_s - request.sent_s
            # A reply to a request that was sent twice may answer either (Karn's rule).
            if not request.resent and request.num_bytes <= LARGEST_TIMED_BYTES:
                self.times.note(round_trip_s, dwell_s, drafted=True)
                self.times.last_draft_s = message.draft_us / 1e6
                self._breaker.measured()
            self._resends = 0
            self._answered_round = message.head.round_id
            self._enter(EdgeEvent.DRAFTED)
        tree = None
        if message.head.epoch == self._uplink.epoch:
            tree = rebuild_tree(message, self._uplink.history, self._hello.identity.vocab_size)
        if tree is None:
            self.counters.stale_trees += 1
            self._pump(now_s)
            return []
        self._holds_tree = still_leads_on(tree, self._uplink.history)
        if self._holds_tree:
            self.counters.trees += 1
        else:
            self.counters.stale_trees += len(tree) > 1
            self._pump(now_s)
        return [TreeArrived(tree, round_trip_s, dwell_s)]

    def _receive_ahead(self, message: Draft) -> list[LinkEvent]:
        """More of the newest tree. Nobody waits for it, and it holds no update back."""
        head, uplink = message.head, self._uplink
        if head.round_id != self._answered_round or head.epoch != uplink.epoch:
            return []
        tree = rebuild_tree(message, uplink.history, self._hello.identity.vocab_size)
        if tree is None or not still_leads_on(tree, uplink.history):
            self.counters.stale_trees += 1
            return []
        self.counters.ahead_trees += 1
        return [TreeArrived(tree, 0.0, 0.0, ahead=True)]

    def _receive_ack(self, message: PrefillAck, now_s: float) -> list[LinkEvent]:
        request = self._settle(message.head, MessageKind.OPEN, MessageKind.PREFILL)
        if request is not None:
            if request.kind is MessageKind.PREFILL:
                self._resends = 0
            if self.state is EdgeState.FILLING and not self._uplink.in_flight:
                self._enter(EdgeEvent.FILLED)
            self._pump(now_s)
        return []

    def _receive_need_prefill(self, message: NeedPrefill, now_s: float) -> list[LinkEvent]:
        head = message.head
        if self.state is EdgeState.GREETING:
            return []
        if head.boot_id != self._uplink.boot_id:
            self._greet_again(now_s)
            return []
        if head.epoch != self._uplink.epoch or self._uplink.find(head.round_id) is None:
            return []
        self._resends += 1
        if self._resends > MAX_RESENDS_IN_A_ROW:
            self._resends = 0
            return self.lost("the draft service keeps forgetting this session", now_s)
        self._restart()
        self._uplink.resume(head)
        self._wants_tree = True
        self._pump(now_s)
        return []

    def _receive_busy(self, message: Busy, now_s: float) -> list[LinkEvent]:
        head = message.head
        if self.state is not EdgeState.GREETING and self._uplink.find(head.round_id) is None:
            return []
        self._enter(EdgeEvent.TOLD_TO_WAIT)
        self.reason = message.reason.text
        self._due_s = self._breaker.told_to_wait(now_s, message.retry_after_ms / 1e3)
        self._uplink.rewind(head.base_len)
        self._wants_tree = True
        return []

    def _receive_pong(self, message: Pong, now_s: float) -> list[LinkEvent]:
        if self._ping is not None and message.nonce == self._ping:
            self.times.note(now_s - self._ping_sent_s, message.queue_us / 1e6, drafted=False)
            self._ping = None
            self._breaker.recovered()
            self._breaker.measured()
        return []

    def _receive_error(self, message: Error, now_s: float) -> list[LinkEvent]:
        if message.code.fatal:
            return self.denied(message.text, now_s)
        if message.code is ErrorCode.LIMIT:
            self._restart()
            self._block(message.text)
            return []
        if message.kind == MessageKind.REPORT:
            return []  # a service without a monitor
        return self.lost(f"the draft service reports: {message.text}", now_s)

    # -------------------------------------------------------------------------------------- from the clock

    def next_wake_s(self) -> float | None:
        """When `tick` must be called at the latest; None: not before something else happens."""
        times = [time for time in (self._deadline_s(), self._leaves_at_s) if time is not None]
        return min(times, default=None)

    def _deadline_s(self) -> float | None:
        if self.state is EdgeState.CLOSED:
            return None
        if self.state in TIMED:
            return self._due_s
        if self._uplink.in_flight:
            return self._patience_ends_s(self._uplink.in_flight[0])
        if self._ping is not None:
            return self._ping_sent_s + self._answer_s()
        return self._heard_s + self._timing.ping_s

    def _answer_s(self) -> float:
        return self._breaker.patience_s(self.times.expected_s)

    def _patience_ends_s(self, oldest: Request) -> float:
        # Bytes of all that is under way are in front of the answer on a slow line.
        small = sum(request.num_bytes for request in self._uplink.in_flight) <= LARGEST_TIMED_BYTES
        patience_s = self._answer_s() if small else self._timing.chunk_s
        return max(oldest.sent_s, self._heard_s if not small else 0.0) + patience_s

    def tick(self, now_s: float) -> list[LinkEvent]:
        """Time has passed."""
        if self._leaves_at_s is not None and now_s >= self._leaves_at_s:
            self._leaves_at_s = None
            return self.lost(BusyReason.DRAINING.text, now_s)
        deadline_s = self._deadline_s()
        if deadline_s is None or now_s < deadline_s:
            return []
        match self.state:
            case EdgeState.DOWN | EdgeState.REFUSED:
                self._enter(EdgeEvent.CONNECT)
                self._due_s = now_s + CONNECT_PATIENCE_S
                return [Connect()]
            case EdgeState.CONNECTING:
                return self.lost("no answer at the address of the draft service", now_s)
            case EdgeState.PAUSED:
                self._resume(now_s)
                return []
            case EdgeState.IDLE if self._ping is None:
                self._send_ping(now_s)
                return []
        return self._miss(now_s)

    def _miss(self, now_s: float) -> list[LinkEvent]:
        """Something was not answered in time: ask again, or give up."""
        self.counters.misses += 1
        if self._breaker.missed():
            return self.lost("the draft service stopped answering", now_s)
        if self.state is EdgeState.GREETING:
            self._send_hello(now_s)
        elif self.state is EdgeState.DRAFTING:
            # The same round again: at the service it counts once, however often it comes.
            for request in self._uplink.in_flight:
                request.sent_s, request.resent = now_s, True
                self._outbox.request(request)
        elif self.state is EdgeState.FILLING:
            self._restart()
            self._uplink.rewind(self._uplink.acked_len)
            self._pump(now_s)
        else:
            self._send_ping(now_s)
        return []

    def _resume(self, now_s: float) -> None:
        """The pause is over."""
        if self.welcome is None:
            self._greet_again(now_s)
        else:
            self._enter(EdgeEvent.PAUSE_OVER)
            self.reason = ""
            self._pump(now_s)

    # ------------------------------------------------------------------------------------------------- out

    def _pump(self, now_s: float) -> None:
        """Send what the service lacks, if a tree is wanted and none is under way."""
        if self.state not in (EdgeState.IDLE, EdgeState.FILLING) or self._blocked:
            return
        committed_len = self._uplink.history.committed_len
        if not self._wants_tree or self._holds_tree or committed_len < 2:
            return
        assert self.welcome is not None
        if committed_len > self.welcome.max_len:
            self._block(f"the draft service takes contexts of at most {self.welcome.max_len} tokens")
            return
        hints = self._hints
        if hints.max_nodes > self.welcome.max_nodes:
            hints = hints._replace(max_nodes=self.welcome.max_nodes)
        may_open = self._leaves_at_s is None
        for request in self._uplink.plan(now_s, self.welcome.chunk_bytes, hints, may_open=may_open):
            self._outbox.request(request)
            if request.kind is MessageKind.UPDATE:
                self._enter(EdgeEvent.SEND_UPDATE)
                self.counters.rounds += 1
                self.counters.bytes_updates += request.num_bytes
                self._wants_tree = False
            else:
                self._enter(EdgeEvent.SEND_ROWS)

    def _send_hello(self, now_s: float) -> None:
        self._due_s = now_s + self._answer_s()
        self._outbox.hello(self._hello)

    def _send_ping(self, now_s: float) -> None:
        self._ping_sent_s = now_s
        self._ping = self._outbox.ping()

    def _settle(self, head: Head, *kinds: MessageKind) -> Request | None:
        """The request of one of `kinds` that `head` answers; None when it is not under way (any more)."""
        request = self._uplink.find(head.round_id)
        if request is None or head.epoch != self._uplink.epoch:
            return None
        if request.kind not in kinds:
            raise RemoteProtocolError(
                f"the answer to round {head.round_id} is not one to {request.kind.name}"
            )
        self._breaker.recovered()
        self._uplink.settle(request)
        return request

    def _enter(self, event: EdgeEvent) -> None:
        self.state = next_edge_state(self.state, event)

    def _restart(self) -> None:
        """What is under way no longer counts."""
        self._uplink.in_flight.clear()
        if self.state in (EdgeState.FILLING, EdgeState.DRAFTING):
            self._enter(EdgeEvent.RESTART)

    def _greet_again(self, now_s: float) -> None:
        self._uplink.in_flight.clear()
        self.welcome = None
        self._enter(EdgeEvent.GREET_AGAIN)
        self._send_hello(now_s)

    def _leave(self, event: EdgeEvent, reason: str) -> None:
        self._enter(event)
        self._uplink.in_flight.clear()
        self._outbox.clear()
        self._ping = None
        self._leaves_at_s = None
        if self.welcome is not None:
            self.counters.outages += 1
            self.last_outage = reason
        self.welcome = None
        self.reason = reason

    def _block(self, why: str) -> None:
        self._blocked = f"this context is not drafted: {why}"
