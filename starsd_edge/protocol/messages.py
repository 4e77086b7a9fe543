"""The messages of the link, as typed values. `codec` turns them into frames and back.

Every message starts with the same Head. Direction: -> edge to service, <- service to edge.

    HELLO         ->  who I am, what I run                WELCOME        <-  accepted; what I hold of you
    OPEN          ->  a new context and its first token
    PREFILL       ->  head rows, acknowledged             PREFILL_ACK    <-  base_len rows are mine
    UPDATE        ->  head rows; a tree is wanted         DRAFT          <-  the tree
    PING          ->  does the loop still turn?           PONG           <-  yes, after so long in the queue
    REPORT        ->  how the device is doing
    CLOSE         ->  the session is over                 NEED_PREFILL   <-  I hold only base_len tokens of it
                                                          BUSY           <-  not now; ask again later
                                                          GOAWAY         <-  I am leaving
                                                          ERROR          <-  refused, and why

A round makes several of these at either end: msgspec makes them in a fraction of a dataclass's time.
"""

from __future__ import annotations

from enum import IntEnum
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from starsd_edge.errors import RemoteProtocolError
from starsd_edge.protocol.features import EncodedRows
from starsd_edge.protocol.greeting import HelloBody, WelcomeBody
from starsd_edge.protocol.telemetry import EdgeReport
from starsd_edge.types import TokenArray

__all__ = [
    "Busy",
    "BusyReason",
    "Close",
    "Draft",
    "Error",
    "ErrorCode",
    "GoAway",
    "Head",
    "Hello",
    "Hints",
    "Integers",
    "Message",
    "MessageKind",
    "NeedPrefill",
    "Open",
    "Ping",
    "Pong",
    "Prefill",
    "PrefillAck",
    "Report",
    "Update",
    "Welcome",
    "WireError",
    "kind_of",
    "make_head",
    "make_hints",
]


Integers: TypeAlias = NDArray[np.integer[Any]]


class MessageKind(IntEnum):
    """The type byte. Numbers are never used again for something else."""

    HELLO = 1
    WELCOME = 2
    OPEN = 3
    PREFILL = 4
    PREFILL_ACK = 5
    UPDATE = 6
    DRAFT = 7
    NEED_PREFILL = 8
    BUSY = 9
    PING = 10
    PONG = 11
    CLOSE = 12
    GOAWAY = 13
    ERROR = 14
    REPORT = 15


class BusyReason(IntEnum):
    """Why a service that works says no for now."""

    OTHER = 0
    SESSIONS = 1  # this device has as many sessions as it may
    MEMORY = 2  # no KV slot is free
    RATE = 3  # this device brings rows faster than it may
    DRAINING = 4  # the service is about to stop
    STARTING = 5  # the engine is loading or restarting
    QUEUE = 6  # this device has as many rows waiting as it may
    LOAD = 7  # all devices together bring as much as the service takes

    @property
    def text(self) -> str:
        return BUSY_TEXTS[self]


BUSY_TEXTS = {
    BusyReason.OTHER: "the draft service is busy",
    BusyReason.SESSIONS: "this device already has as many sessions as the draft service allows",
    BusyReason.MEMORY: "the draft service has no memory left for another session",
    BusyReason.RATE: "this device brings more rows a second than the draft service takes from one",
    BusyReason.DRAINING: "the draft service is about to stop",
    BusyReason.STARTING: "the draft service is starting",
    BusyReason.QUEUE: "this device already has as many rows waiting as the draft service allows one",
    BusyReason.LOAD: "all devices together bring as many rows as the draft service takes",
}


class ErrorCode(IntEnum):
    """Why something was refused. FATAL ones end the attempt; the others concern one message."""

    INTERNAL = 0
    MALFORMED = 1
    VERSION = 2
    UNKNOWN_KIND = 3
    INCOMPATIBLE = 4
    LIMIT = 5
    REVOKED = 6
    UNEXPECTED = 7

    @property
    def fatal(self) -> bool:
        """Trying again at once cannot help: another version, another head, or a key to be trusted first."""
        return self in (ErrorCode.VERSION, ErrorCode.INCOMPATIBLE, ErrorCode.REVOKED)


class WireError(RemoteProtocolError):
    """Raised by the codec and the server's state machine; `code` is what an ERROR reply would carry."""

    def __init__(self, code: ErrorCode, text: str, head: Head | None = None) -> None:
        super().__init__(text)
        self.code = code
        self.head = head


class Head(NamedTuple):
    """What every message carries. (Made several times a message: a named tuple costs half of a dataclass.)

    session     u64, drawn at random by the edge; unique together with the authenticated device
    boot_id     u64, drawn at random by each start of the service's engine; 0 from an edge that knows none
    epoch       u32, counts the contexts of a session: OPEN brings the next one
    round_id    u32, counts the requests of a session that change its state (OPEN, PREFILL, UPDATE); a reply
                repeats the number of what it answers; 0 where there is none
    base_len    u32, committed tokens, root included, that the message refers to
    prefix_crc  u32, crc32 of the tokens [0, base_len) as little-endian int32
    """

    session: int
    boot_id: int = 0
    epoch: int = 0
    round_id: int = 0
    base_len: int = 0
    prefix_crc: int = 0


make_head: partial[Head] = partial(tuple.__new__, Head)
"""A Head of a sequence of its fields: a third of what its own constructor takes."""


class Hello(Struct, frozen=True):
    head: Head
    body: HelloBody


class Welcome(Struct, frozen=True):
    head: Head
    body: WelcomeBody


class Open(Struct, frozen=True):
    """A new context; whatever the session held before is forgotten. base_len is 1."""

    head: Head
    first_token: int


class Prefill(Struct, frozen=True):
    """Head rows [n]: row i pairs the feature of position `start + i` with the token at `start + i + 1`, where
    `start = base_len - 1 - n`. Rows the service holds from `start` on are replaced."""

    head: Head
    tokens: TokenArray
    features: EncodedRows

    @property
    def start(self) -> int:
        return self.head.base_len - 1 - len(self.tokens)


class PrefillAck(Struct, frozen=True):
    """All rows up to base_len are held. Also answers OPEN (base_len 1)."""

    head: Head


class Hints(NamedTuple):
    """What an edge says about its own speed with each update, so that the service can cut the tree by cost
    and the monitor can show it. Microseconds; 0 means not known.

    max_nodes     largest tree wanted, root included; 1 wants none but keeps the draft KV up to date
    num_accepted  draft tokens accepted in the round before
    verify_nodes  nodes of the last verification, which took verify_us
    ahead_nodes   largest tree wanted after this one, drafted ahead while it is verified; 0 wants none
    plain_us      what a plain step costs here
    wait_us       how long the edge is likely to wait for this tree
    link_us       link time of the last round trip, both ways together, the service's dwell taken off
    """

    max_nodes: int = 60
    num_accepted: int = 0
    verify_nodes: int = 0
    ahead_nodes: int = 0
    verify_us: int = 0
    plain_us: int = 0
    wait_us: int = 0
    link_us: int = 0


make_hints: partial[Hints] = partial(tuple.__new__, Hints)
"""Likewise, of its fields."""


class Update(Struct, frozen=True):
    """Rows as in Prefill, and a tree on top of them is wanted. n may be 0: a tree for what is held."""

    head: Head
    tokens: TokenArray
    features: EncodedRows
    hints: Hints

    @property
    def start(self) -> int:
        return self.head.base_len - 1 - len(self.tokens)


class Draft(Struct, frozen=True):
    """A tree without its root, which the edge knows: nodes 1 .. N-1 in order of falling probability.

    tokens    int32 [N - 1], or u16 as they came
    parents   int32 [N - 1], or u8 as they came, of nodes 1 .. N-1, counted with the root as node 0
    queue_us  the request's time waiting in the service, draft_us its time in engine steps
    ahead     a second tree of a round that was answered: the first one, and what was found beyond it since
    """

    head: Head
    tokens: Integers
    parents: Integers
    queue_us: int = 0
    draft_us: int = 0
    ahead: bool = False


class NeedPrefill(Struct, frozen=True):
    """The service holds only base_len tokens of the context (0: not even an OPEN)."""

    head: Head


class Busy(Struct, frozen=True):
    """Nothing of the request was taken. Ask again after `retry_after_ms`."""

    head: Head
    retry_after_ms: int
    reason: BusyReason = BusyReason.OTHER


class Ping(Struct, frozen=True):
    """Answered by the scheduling loop, so that a hung engine is seen. Padding measures the uplink."""

    head: Head
    nonce: int
    padding: bytes = b""


class Pong(Struct, frozen=True):
    head: Head
    nonce: int
    queue_us: int = 0


class Report(Struct, frozen=True):
    """The device's own counters and readings, for the monitor. Sent at most once a second, never answered;
    a service that does not know the kind drops it."""

    head: Head
    body: EdgeReport


class Close(Struct, frozen=True):
    head: Head


class GoAway(Struct, frozen=True):
    """No new context is taken, rounds are answered for `remaining_ms` more."""

    head: Head
    remaining_ms: int


class Error(Struct, frozen=True):
    """`kind` is the type byte of the refused message, 0 where it could not be read."""

    head: Head
    code: ErrorCode
    text: str
    kind: int = 0


Message: TypeAlias = (
    Hello
    | Welcome
    | Open
    | Prefill
    | PrefillAck
    | Update
    | Draft
    | NeedPrefill
    | Busy
    | Ping
    | Pong
    | Report
    | Close
    | GoAway
    | Error
)

KINDS: dict[type[Message], MessageKind] = {
    Hello: MessageKind.HELLO,
    Welcome: MessageKind.WELCOME,
    Open: MessageKind.OPEN,
    Prefill: MessageKind.PREFILL,
    PrefillAck: MessageKind.PREFILL_ACK,
    Update: MessageKind.UPDATE,
    Draft: MessageKind.DRAFT,
    NeedPrefill: MessageKind.NEED_PREFILL,
    Busy: MessageKind.BUSY,
    Ping: MessageKind.PING,
    Pong: MessageKind.PONG,
    Report: MessageKind.REPORT,
    Close: MessageKind.CLOSE,
    GoAway: MessageKind.GOAWAY,
    Error: MessageKind.ERROR,
}


def kind_of(message: Message) -> MessageKind:
    return KINDS[type(message)]
