"""Frames to messages. Never trusts a byte: sizes are checked against the frames before anything is allocated.

Everything must fit to the byte, except that a head may be longer than is known here. Only WireError leaves
`decode`.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import gt
from typing import NoReturn, TypeAlias

import numpy as np

from starsd_edge.errors import RemoteProtocolError
from starsd_edge.protocol.features import EncodedRows, FeatureDtype
from starsd_edge.protocol.greeting import HelloBody, WelcomeBody, decode_greeting
from starsd_edge.protocol.head import (
    BUSY_BODY,
    COMMON,
    DRAFT_BODY,
    EMPTY_BODY,
    ERROR_BODY,
    FLAG_AHEAD,
    FLAG_WIDE_IDS,
    GOAWAY_BODY,
    MAJOR,
    NARROW_ID,
    OPEN_BODY,
    PING_BODY,
    PONG_BODY,
    UPDATE_BODY,
    WIDE_ID,
    Buffer,
    Peek,
    peek,
)
from starsd_edge.protocol.limits import (
    MAX_CHUNK_BYTES,
    MAX_FEATURE_SIZE,
    MAX_FRAMES,
    MAX_NODES,
    MAX_PING_PADDING_BYTES,
    MAX_ROWS,
    MAX_TEXT_BYTES,
)
from starsd_edge.protocol.messages import (
    Busy,
    BusyReason,
    Close,
    Draft,
    Error,
    ErrorCode,
    GoAway,
    Hello,
    Integers,
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
    make_hints,
)
from starsd_edge.protocol.telemetry import decode_report
from starsd_edge.types import TokenArray

__all__ = ["DECODERS", "decode"]

NODES = range(MAX_NODES)  # parents[j] of node j + 1 must be at most j


def decode(frames: Sequence[Buffer]) -> Message:
    """The message in `frames`. Arrays and rows are views of the frames, which must stay unchanged.

    Raises WireError, and nothing else, for whatever bytes.
    """
    if not 1 <= len(frames) <= MAX_FRAMES:
        raise WireError(ErrorCode.MALFORMED, f"{len(frames)} frames; a message has 1 to {MAX_FRAMES}")
    first = peek(frames[0])
    entry = DECODERS.get(first.kind)
    if entry is None:
        raise WireError(
            ErrorCode.UNKNOWN_KIND, f"message type {first.kind} is not known to version {MAJOR}", first.head
        )
    try:
        if first.body_bytes < entry.body.size or not entry.min_frames <= len(frames) <= entry.max_frames:
            malformed(
                f"{entry.name} with {len(frames)} frames and {first.body_bytes} bytes behind the common head"
            )
        return entry.build(first, entry.body.unpack_from(frames[0], COMMON.size), frames)
    except WireError as error:
        error.head = first.head
        raise
    except RemoteProtocolError as error:
        raise WireError(ErrorCode.MALFORMED, str(error), first.head) from error


FEATURE_DTYPES = {int(dtype): dtype for dtype in FeatureDtype}


def malformed(text: str) -> NoReturn:
    raise WireError(ErrorCode.MALFORMED, text)


Body: TypeAlias = tuple[int, ...]


def decode_hello(first: Peek, body: Body, frames: Sequence[Buffer]) -> Hello:
    greeting = decode_greeting(as_readable(frames[1]), hello=True)
    assert isinstance(greeting, HelloBody)
    return Hello(first.head, greeting)


def decode_welcome(first: Peek, body: Body, frames: Sequence[Buffer]) -> Welcome:
    greeting = decode_greeting(as_readable(frames[1]), hello=False)
    assert isinstance(greeting, WelcomeBody)
    return Welcome(first.head, greeting)


def decode_open(first: Peek, body: Body, frames: Sequence[Buffer]) -> Open:
    if first.head.base_len != 1:
        malformed(f"OPEN with base_len {first.head.base_len}, not 1")
    if body[0] > np.iinfo(np.int32).max:
        malformed(f"token {body[0]}")
    return Open(first.head, body[0])


def rows_of(first: Peek, frames: Sequence[Buffer]) -> tuple[TokenArray, EncodedRows]:
    if first.num_items > MAX_ROWS or not 1 <= first.width <= MAX_FEATURE_SIZE:
        raise WireError(
            ErrorCode.LIMIT, f"{first.num_items} rows of width {first.width}; at most {MAX_ROWS} rows"
        )
    if first.head.base_len < first.num_items + 1:
        malformed(f"{first.num_items} rows cannot end at base_len {first.head.base_len}")
    dtype = FEATURE_DTYPES.get(first.dtype)
    if dtype is None:
        malformed(f"feature dtype {first.dtype}")
    size = max(first.num_items * first.width, len(frames[2]))  # an element takes a byte at least
    if size > MAX_CHUNK_BYTES:
        raise WireError(
            ErrorCode.LIMIT, f"{size} bytes of features; at most {MAX_CHUNK_BYTES} in one message"
        )
    tokens = ids_of(frames[1], first.num_items, first.flags, extra_bytes=0).astype(np.int32)
    return tokens, EncodedRows(dtype, first.num_items, first.width, frames[2])


def decode_prefill(first: Peek, body: Body, frames: Sequence[Buffer]) -> Prefill:
    if first.num_items == 0:
        malformed("PREFILL without rows")
    return Prefill(first.head, *rows_of(first, frames))


def decode_update(first: Peek, body: Body, frames: Sequence[Buffer]) -> Update:
    hints = make_hints(body)
    if not 1 <= hints.max_nodes <= MAX_NODES or hints.ahead_nodes > MAX_NODES:
        wanted = f"{hints.max_nodes} nodes wanted, {hints.ahead_nodes} ahead"
        raise WireError(ErrorCode.LIMIT, f"{wanted}; 1 to {MAX_NODES} may be")
    tokens, rows = rows_of(first, frames)
    return Update(first.head, tokens, rows, hints)


def decode_ack(first: Peek, body: Body, frames: Sequence[Buffer]) -> PrefillAck:
    return PrefillAck(first.head)


def decode_draft(first: Peek, body: Body, frames: Sequence[Buffer]) -> Draft:
    n = first.num_items
    if n >= MAX_NODES:
        raise WireError(ErrorCode.LIMIT, f"a draft of {n + 1} nodes; at most {MAX_NODES}")
    if first.head.base_len < 1:
        malformed("DRAFT for an empty prefix")
    ids = frames[1]
    tokens = ids_of(ids, n, first.flags, extra_bytes=n)
    start = len(ids) - n
    if any(map(gt, ids[start:], NODES)):  # so few are compared one by one before a ufunc has begun
        malformed("a draft node whose parent does not come before it")
    parents = np.frombuffer(ids, np.uint8, n, start)
    queue_us, draft_us = body
    ahead = bool(first.flags & FLAG_AHEAD)
    return Draft(first.head, tokens, parents, queue_us, draft_us, ahead)


def decode_need_prefill(first: Peek, body: Body, frames: Sequence[Buffer]) -> NeedPrefill:
    return NeedPrefill(first.head)


def decode_busy(first: Peek, body: Body, frames: Sequence[Buffer]) -> Busy:
    known = body[1] in BusyReason._value2member_map_
    return Busy(first.head, body[0], BusyReason(body[1]) if known else BusyReason.OTHER)


def decode_ping(first: Peek, body: Body, frames: Sequence[Buffer]) -> Ping:
    padding = bytes(frames[1]) if len(frames) == 2 and len(frames[1]) <= MAX_PING_PADDING_BYTES else b""
    if len(frames) == 2 and not padding:
        raise WireError(
            ErrorCode.LIMIT,
            f"a PING padded with {len(frames[1])} bytes; 1 to {MAX_PING_PADDING_BYTES} may be",
        )
    return Ping(first.head, body[0], padding)


def decode_pong(first: Peek, body: Body, frames: Sequence[Buffer]) -> Pong:
    return Pong(first.head, body[0], body[1])


def decode_edge_report(first: Peek, body: Body, frames: Sequence[Buffer]) -> Report:
    return Report(first.head, decode_report(as_readable(frames[1])))


def decode_close(first: Peek, body: Body, frames: Sequence[Buffer]) -> Close:
    return Close(first.head)


def decode_goaway(first: Peek, body: Body, frames: Sequence[Buffer]) -> GoAway:
    return GoAway(first.head, body[0])


def decode_error(first: Peek, body: Body, frames: Sequence[Buffer]) -> Error:
    if len(frames[1]) > MAX_TEXT_BYTES:
        raise WireError(ErrorCode.LIMIT, f"an error text of {len(frames[1])} bytes; at most {MAX_TEXT_BYTES}")
    # It will be shown in a terminal: no control characters, one line.
    text = bytes(frames[1]).decode("utf-8", "replace")
    text = "".join(c if c.isprintable() else " " for c in text)
    known = body[0] in ErrorCode._value2member_map_
    return Error(first.head, ErrorCode(body[0]) if known else ErrorCode.INTERNAL, text, body[1])


def ids_of(frame: Buffer, count: int, flags: int, *, extra_bytes: int) -> Integers:
    """A view of the ids in `frame`: u16 or int32 [count]."""
    wide = bool(flags & FLAG_WIDE_IDS)
    size = count * (4 if wide else 2)
    if len(frame) != size + extra_bytes:
        malformed(f"{count} ids take {size + extra_bytes} bytes, not {len(frame)}")
    if not wide:
        return np.frombuffer(frame, NARROW_ID, count)
    ids = np.frombuffer(frame, WIDE_ID, count)
    if len(ids) and ids.min() < 0:
        malformed("a token id beyond 2^31")
    return ids


def as_readable(frame: Buffer) -> bytes | memoryview:
    return bytes(frame) if isinstance(frame, bytearray) else frame


@dataclass(frozen=True, slots=True)
class KindEntry:
    """How a kind is read: frames it has, its fixed body, and what builds the message from them."""

    message: type[Message]
    body: struct.Struct
    min_frames: int
    max_frames: int
    build: Callable[[Peek, Body, Sequence[Buffer]], Message]

    @property
    def name(self) -> str:
        return self.message.__name__


DECODERS: dict[int, KindEntry] = {
    MessageKind.HELLO: KindEntry(Hello, EMPTY_BODY, 2, 2, decode_hello),
    MessageKind.WELCOME: KindEntry(Welcome, EMPTY_BODY, 2, 2, decode_welcome),
    MessageKind.OPEN: KindEntry(Open, OPEN_BODY, 1, 1, decode_open),
    MessageKind.PREFILL: KindEntry(Prefill, EMPTY_BODY, 3, 3, decode_prefill),
    MessageKind.PREFILL_ACK: KindEntry(PrefillAck, EMPTY_BODY, 1, 1, decode_ack),
    MessageKind.UPDATE: KindEntry(Update, UPDATE_BODY, 3, 3, decode_update),
    MessageKind.DRAFT: KindEntry(Draft, DRAFT_BODY, 2, 2, decode_draft),
    MessageKind.NEED_PREFILL: KindEntry(NeedPrefill, EMPTY_BODY, 1, 1, decode_need_prefill),
    MessageKind.BUSY: KindEntry(Busy, BUSY_BODY, 1, 1, decode_busy),
    MessageKind.PING: KindEntry(Ping, PING_BODY, 1, 2, decode_ping),
    MessageKind.PONG: KindEntry(Pong, PONG_BODY, 1, 1, decode_pong),
    MessageKind.REPORT: KindEntry(Report, EMPTY_BODY, 2, 2, decode_edge_report),
    MessageKind.CLOSE: KindEntry(Close, EMPTY_BODY, 1, 1, decode_close),
    MessageKind.GOAWAY: KindEntry(GoAway, GOAWAY_BODY, 1, 1, decode_goaway),
    MessageKind.ERROR: KindEntry(Error, ERROR_BODY, 2, 2, decode_error),
}
