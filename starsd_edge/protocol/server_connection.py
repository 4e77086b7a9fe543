"""The service's side of one session, without sockets: messages in, events and frames out.

What the service must do is small. Feed every message to `receive`; send each Reply; hand the other events to
the scheduler; answer each with one of `send_ack`, `send_draft`, `send_busy`, `send_pong`; say `evicted` when
the session's KV is dropped. In return it is spared rounds that come twice, late, with a gap, for another boot
or on another prefix.

At most once. A session's requests (OPEN, PREFILL, UPDATE) are numbered. The newest number again: its reply
once more, or nothing while that is still being made. An older one: dropped. Rows have positions: those that
do not join what is held, or whose prefix has another checksum, are answered with NEED_PREFILL.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from msgspec import Struct

from starsd_edge.decoding.prefix import Prefix, prefix_crc
from starsd_edge.errors import LocalProtocolError, RemoteProtocolError
from starsd_edge.protocol.codec import Frames, encode, kind_of
from starsd_edge.protocol.features import FeatureDtype, decode_rows
from starsd_edge.protocol.greeting import HelloBody, Identity, WelcomeBody
from starsd_edge.protocol.largest import largest
from starsd_edge.protocol.limits import MAX_CHUNK_BYTES, MAX_PENDING
from starsd_edge.protocol.messages import (
    Busy,
    BusyReason,
    Close,
    Draft,
    Error,
    ErrorCode,
    GoAway,
    Head,
    Hello,
    Hints,
    Message,
    MessageKind,
    NeedPrefill,
    Open,
    Ping,
    Pong,
    Prefill,
    PrefillAck,
    Report,
    Update,
    Welcome,
    WireError,
)
from starsd_edge.protocol.states import ServerState, ServiceAct, next_server_state
from starsd_edge.protocol.telemetry import EdgeReport
from starsd_edge.types import FeatureArray, TokenArray

__all__ = [
    "Closed",
    "Dropped",
    "Greeted",
    "HeadOffer",
    "Opened",
    "Pinged",
    "Reply",
    "Reported",
    "RowsArrived",
    "ServerConnection",
    "ServerEvent",
    "ServiceOffer",
    "Violated",
    "refusal",
]


@dataclass(frozen=True, slots=True)
class HeadOffer:
    """A draft head the service has loaded. `dtypes` are the features it takes."""

    name: str
    identity: Identity
    max_len: int
    max_nodes: int
    dtypes: tuple[FeatureDtype, ...] = tuple(FeatureDtype)


@dataclass(frozen=True, slots=True)
class ServiceOffer:
    """What the service says of itself."""

    service: str
    software: str
    boot_id: int
    heads: tuple[HeadOffer, ...]
    chunk_bytes: int = MAX_CHUNK_BYTES
    idle_lease_s: float = 60.0


class Reply(Struct, frozen=True):
    """To be sent to the peer as it is."""

    frames: Frames


class Greeted(Struct, frozen=True):
    """The edge fits `head`. Its Reply (WELCOME) is beside this event."""

    head: HeadOffer
    hello: HelloBody


class Opened(Struct, frozen=True):
    """A new context: drop what the session held. Answer with `send_ack` or `send_busy`."""

    round_id: int
    epoch: int
    first_token: int


class RowsArrived(Struct, frozen=True):
    """Head rows [n] from row `start` on; whatever was held from `start` on is to be replaced.

    Row i pairs the feature of position `start + i` with the token at `start + i + 1`. After it the context
    counts `base_len` tokens. `hints` is None for prefill: answer with `send_ack` once the rows are in the KV
    cache. Otherwise a tree is wanted: `send_draft`. Or `send_busy`, having taken none of the rows. A newer
    request for a tree overtakes an older one that is still unanswered: `wants(old round)` is False then.
    Features are float16 or float32 [n, F], finite; tokens are below the vocabulary size.
    """

    round_id: int
    base_len: int
    start: int
    tokens: TokenArray
    features: FeatureArray
    hints: Hints | None


class Pinged(Struct, frozen=True):
    """Answer with `send_pong` out of the scheduling loop."""

    nonce: int


class Reported(Struct, frozen=True):
    """What the device says of itself; never answered."""

    body: EdgeReport


class Dropped(Struct, frozen=True):
    """A message that came late or twice; for the counters."""

    kind: MessageKind


class Violated(Struct, frozen=True):
    """The peer broke a rule; the Reply beside this event tells it. For log and counters."""

    code: ErrorCode
    text: str


class Closed(Struct, frozen=True):
    """The edge is done with the session: free what it held."""


ServerEvent: TypeAlias = (
    Reply | Greeted | Opened | RowsArrived | Pinged | Reported | Dropped | Violated | Closed
)


class Pending(Struct, frozen=True):
    """A request that the service has not answered yet."""

    head: Head  # for this boot, so that an answer may carry it as it is
    held_before: int  # tokens of the context that a refusal leaves
    wants_draft: bool


class ServerConnection:
    """One session of one authenticated device."""

    def __init__(self, session: int, offer: ServiceOffer) -> None:
        self.session = session
        self.state = ServerState.NEW
        self.head: HeadOffer | None = None
        self.epoch = 0
        self.draining = False
        self._offer = offer
        self._dtype = FeatureDtype.FP16
        self._prefix = Prefix()
        self._last_round = 0
        self._pending: dict[int, Pending] = {}
        self._cached: Frames | None = None  # the reply to `_last_round`
        self._drafted: Head | None = None  # of the newest request, once it was answered with a tree

    @property
    def held_len(self) -> int:
        """Committed tokens of the context, as far as the rows received reach."""
        return self._prefix.length

    def wants(self, round_id: int) -> bool:
        """Whether the request is still open: not answered, not overtaken by a newer one."""
        return round_id in self._pending

    # ------------------------------------------------------------------------------------------ in

    def receive(self, message: Message) -> list[ServerEvent]:
        """What `message` means. Never raises for what a peer may send."""
        try:
            next_server_state(self.state, kind_of(message))  # refuses what this state does not allow
            return self._handle(message)
        except RemoteProtocolError as error:
            code = error.code if isinstance(error, WireError) else ErrorCode.MALFORMED
            reply = Error(self._stamp(message.head), code, str(error), kind_of(message))
            return [Reply(encode(reply)), Violated(code, str(error))]

    def _handle(self, message: Message) -> list[ServerEvent]:
        match message:
            case Hello():
                return self._receive_hello(message)
            case Open():
                return self._receive_open(message)
            case Prefill() | Update():
                return self._receive_rows(message)
            case Ping():
                return [Pinged(message.nonce)]
            case Report():
                known = self.state is not ServerState.NEW
                return [Reported(message.body)] if known else [Dropped(MessageKind.REPORT)]
            case Close():
                self._enter(MessageKind.CLOSE)
                self._forget()
                return [Closed()]
        raise WireError(ErrorCode.UNEXPECTED, f"{type(message).__name__} is not for a service")

    def _receive_hello(self, message: Hello) -> list[ServerEvent]:
        hello = message.body
        head = self._choose_head(hello)
        dtype = choose_dtype(hello, head)
        if self.head is not None and (head != self.head or dtype is not self._dtype):
            self.evicted()
        self.head, self._dtype = head, dtype
        welcome = WelcomeBody(
            service=self._offer.service,
            software=self._offer.software,
            head=head.name,
            digest=head.identity.digest(),
            dtype=dtype.wire_name,
            max_len=head.max_len,
            max_nodes=min(head.max_nodes, hello.max_nodes),
            chunk_bytes=self._offer.chunk_bytes,
            idle_lease_s=self._offer.idle_lease_s,
        )
        self._enter(MessageKind.HELLO)
        return [
            Reply(encode(Welcome(self._stamp(message.head, self.held_len), welcome))),
            Greeted(head, hello),
        ]

    def _choose_head(self, hello: HelloBody) -> HeadOffer:
        named = [head for head in self._offer.heads if hello.head in ("", head.name)]
        if not named:
            loaded = ", ".join(head.name for head in self._offer.heads) or "none"
            raise WireError(
                ErrorCode.INCOMPATIBLE, f"no draft head '{hello.head}' is loaded; there is {loaded}"
            )
        differences = []
        for head in named:
            difference = head.identity.difference(hello.identity)
            if difference is None:
                return head
            differences.append((head, difference))
        head, difference = min(differences, key=lambda pair: pair[0].identity.target != hello.identity.target)
        raise WireError(
            ErrorCode.INCOMPATIBLE,
            f"draft head '{head.name}' does not fit '{hello.identity.target}': {difference} (at the edge)",
        )

    def _receive_open(self, message: Open) -> list[ServerEvent]:
        if (early := self._dispose(message)) is not None:
            return early
        self._check_tokens(np.array([message.first_token], np.int32))
        if self.draining:
            busy = Busy(self._stamp(message.head), DRAINING_RETRY_MS, BusyReason.DRAINING)
            return [Reply(encode(busy))]
        self._forget()
        self.epoch = message.head.epoch
        self._prefix.append([message.first_token])
        if self._prefix.crc != message.head.prefix_crc:
            self._forget()
            raise WireError(ErrorCode.MALFORMED, "the checksum of OPEN is not that of its token")
        self._enter(MessageKind.OPEN)
        self._accept(message.head, held_before=0, wants_draft=False)
        return [Opened(message.head.round_id, self.epoch, message.first_token)]

    def _receive_rows(self, message: Prefill | Update) -> list[ServerEvent]:
        if (early := self._dispose(message)) is not None:
            return early
        head, start = message.head, message.start
        assert self.head is not None
        if head.base_len > self.head.max_len:
            raise WireError(
                ErrorCode.LIMIT, f"{head.base_len} tokens; a context here has at most {self.head.max_len}"
            )
        if self.state is not ServerState.OPENED or head.epoch != self.epoch or start >= self._prefix.length:
            return self._need_prefill(head)
        self._check_rows(message)
        features = decode_rows(message.features)
        self._overtake(start + 1)
        if not self._append(start, message.tokens, head):
            self.evicted()
            return self._need_prefill(head)
        hints = message.hints if isinstance(message, Update) else None
        self._accept(head, held_before=start + 1, wants_draft=hints is not None)
        if hints is not None and hints.max_nodes > self.head.max_nodes:
            hints = hints._replace(max_nodes=self.head.max_nodes)
        return [RowsArrived(head.round_id, head.base_len, start, message.tokens, features, hints)]

    def _append(self, start: int, tokens: TokenArray, head: Head) -> bool:
        """Whether the rows, put behind the first `start + 1` tokens held, give the prefix the edge has."""
        self._prefix.truncate(start + 1)
        self._prefix.append(tokens)
        return self._prefix.crc == head.prefix_crc

    def _dispose(self, message: Open | Prefill | Update) -> list[ServerEvent] | None:
        """The reply to a request that must not be carried out, or None when it is to be."""
        head = message.head
        if self.state is ServerState.NEW or head.boot_id != self._offer.boot_id:
            return self._need_prefill(head)
        if head.round_id == self._last_round and head.epoch == self.epoch:
            if self._cached is not None:
                return [Reply(self._cached), Dropped(kind_of(message))]
            return [Dropped(kind_of(message))]
        if head.round_id <= self._last_round or head.epoch < self.epoch:
            return [Dropped(kind_of(message))]
        return None

    def _need_prefill(self, head: Head) -> list[ServerEvent]:
        held = self.held_len if head.epoch == self.epoch and self.state is ServerState.OPENED else 0
        return [Reply(encode(NeedPrefill(self._stamp(head, held))))]

    def _overtake(self, held_before: int) -> None:
        """New rows come behind `held_before` tokens: older requests for a tree, and rows that these replace,
        are waited for no more. Raises WireError when still more are under way than may be."""
        if not self._pending:
            return
        still = {
            number: pending
            for number, pending in self._pending.items()
            if not pending.wants_draft and pending.head.base_len <= held_before
        }
        if len(still) >= MAX_PENDING:
            raise WireError(ErrorCode.LIMIT, f"more than {MAX_PENDING} requests under way in one session")
        self._pending = still

    def _accept(self, head: Head, held_before: int, wants_draft: bool) -> None:
        """The request counts from here on."""
        self._last_round = head.round_id
        self._cached = self._drafted = None
        self._pending[head.round_id] = Pending(head, held_before, wants_draft)

    def _check_rows(self, message: Prefill | Update) -> None:
        assert self.head is not None
        rows, width = message.features, self.head.identity.feature_size
        if rows.width != width or rows.dtype is not self._dtype:
            raise WireError(
                ErrorCode.MALFORMED,
                f"{rows.dtype.wire_name} rows of {rows.width}; "
                f"{self._dtype.wire_name} rows of {width} were agreed",
            )
        self._check_tokens(message.tokens)

    def _check_tokens(self, tokens: TokenArray) -> None:
        assert self.head is not None
        vocab_size = self.head.identity.vocab_size
        if len(tokens) and largest(tokens) >= vocab_size:
            raise WireError(ErrorCode.MALFORMED, f"token {tokens.max()}; the vocabulary has {vocab_size}")

    # ------------------------------------------------------------------------------------------ out

    def send_ack(self, round_id: int) -> Frames:
        """The rows (or the OPEN) of `round_id` are in the KV cache."""
        pending = self._take(round_id, wants_draft=False)
        return self._answer(round_id, encode(PrefillAck(pending.head)))

    def send_draft(
        self,
        round_id: int,
        base_len: int,
        tokens: TokenArray,
        parents: TokenArray,
        *,
        queue_us: int,
        draft_us: int,
    ) -> Frames:
        """The tree for `round_id` on `base_len` tokens: int32 [N - 1] tokens and parents of the nodes below
        the root, which is node 0, by falling probability.

        `queue_us` and `draft_us` say how long the request waited and was worked on: dwell = their sum.
        """
        pending = self._take(round_id, wants_draft=True)
        if base_len != pending.head.base_len:
            raise LocalProtocolError(f"a tree on {base_len} tokens for a round on {pending.head.base_len}")
        draft = Draft(pending.head, tokens, parents, queue_us, draft_us)
        self._drafted = pending.head if round_id == self._last_round else None
        return self._answer(round_id, encode(draft))

    def wants_ahead(self, round_id: int) -> bool:
        """Whether `round_id` is the newest request, and answered with a tree."""
        return self._drafted is not None and self._drafted.round_id == round_id

    def send_ahead(self, round_id: int, tokens: TokenArray, parents: TokenArray, *, draft_us: int) -> Frames:
        """A tree drafted ahead, while the one that answered `round_id` is verified: that one, and what was
        found beyond it in the `draft_us` since. Sent once, never again."""
        if self._drafted is None or self._drafted.round_id != round_id:
            raise LocalProtocolError(f"session {self.session:x} has gone on from round {round_id}")
        head, self._drafted = self._drafted, None
        return encode(Draft(head, tokens, parents, 0, draft_us, ahead=True))

    def send_busy(self, round_id: int, retry_after_ms: int, reason: BusyReason) -> Frames:
        """Nothing of `round_id` was taken; requests behind it fall with it."""
        pending = self._pending.get(round_id)
        if pending is None:
            raise LocalProtocolError(f"session {self.session:x} waits for no answer to round {round_id}")
        for later in [number for number in self._pending if number >= round_id]:
            del self._pending[later]
        self._prefix.truncate(min(pending.held_before, self.held_len))
        self._cached = None
        if not self.held_len:
            self._enter(ServiceAct.EVICT)
        return encode(Busy(self._stamp(pending.head, self.held_len), retry_after_ms, reason))

    def send_pong(self, nonce: int, queue_us: int) -> Frames:
        return encode(Pong(self._stamp(Head(self.session)), nonce, queue_us))

    def send_goaway(self, remaining_ms: int) -> Frames:
        """From now on OPEN is answered with BUSY; rounds of contexts that are open go on."""
        self.draining = True
        return encode(GoAway(self._stamp(Head(self.session)), remaining_ms))

    def send_error(self, code: ErrorCode, text: str) -> Frames:
        return encode(Error(self._stamp(Head(self.session)), code, text))

    def evicted(self) -> None:
        """The session's KV was dropped: the next rows are answered with NEED_PREFILL."""
        self._enter(ServiceAct.EVICT)
        self._forget()

    def close(self) -> None:
        """The service itself ends the session (lease over, key revoked)."""
        self._enter(ServiceAct.CLOSE)
        self._forget()

    def _enter(self, event: MessageKind | ServiceAct) -> None:
        self.state = next_server_state(self.state, event)

    def _take(self, round_id: int, *, wants_draft: bool) -> Pending:
        pending = self._pending.get(round_id)
        if pending is None or pending.wants_draft is not wants_draft:
            what = "draft" if wants_draft else "acknowledgement"
            raise LocalProtocolError(f"session {self.session:x} waits for no {what} of round {round_id}")
        del self._pending[round_id]
        return pending

    def _answer(self, round_id: int, frames: Frames) -> Frames:
        if round_id == self._last_round:
            self._cached = frames
        return frames

    def _forget(self) -> None:
        self._prefix.truncate(0)
        self._pending.clear()
        self._cached = self._drafted = None

    def _stamp(self, head: Head, held: int | None = None) -> Head:
        """The head of a reply to `head`, saying what is held where that is known."""
        length = 0 if held is None else held
        crc = prefix_crc(self._prefix.tokens[:length]) if length else 0
        epoch = self.epoch if length else head.epoch
        return Head(self.session, self._offer.boot_id, epoch, head.round_id, length, crc)


def refusal(error: WireError, boot_id: int) -> Frames:
    """The ERROR that answers bytes which `decode` refused. Without a readable head it goes to session 0."""
    head = error.head or Head(0)
    return encode(Error(Head(head.session, boot_id, head.epoch, head.round_id), error.code, str(error)))


DRAINING_RETRY_MS = 5_000  # a service that drains is gone, or back, a few seconds later


def choose_dtype(hello: HelloBody, head: HeadOffer) -> FeatureDtype:
    """The first the edge wants that the head takes."""
    offered = {dtype.wire_name: dtype for dtype in head.dtypes}
    for name in hello.dtypes:
        if name in offered:
            return offered[name]
    raise WireError(
        ErrorCode.INCOMPATIBLE,
        f"feature dtypes are {', '.join(hello.dtypes)} at the edge and {', '.join(offered)} at the service",
    )
