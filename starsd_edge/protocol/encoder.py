"""Messages to frames: a head, ids, features. docs/protocol.md is the specification."""

from __future__ import annotations

import struct
from collections.abc import Callable

import numpy as np

from starsd_edge.errors import LocalProtocolError
from starsd_edge.protocol.greeting import encode_greeting
from starsd_edge.protocol.head import (
    BUSY_BODY,
    DRAFT_BODY,
    ERROR_BODY,
    FLAG_AHEAD,
    FLAG_WIDE_IDS,
    GOAWAY_BODY,
    NARROW_ID,
    OPEN_BODY,
    PING_BODY,
    PONG_BODY,
    UPDATE_BODY,
    WIDE_ID,
    Frames,
    head_frame,
)
from starsd_edge.protocol.largest import largest
from starsd_edge.protocol.limits import MAX_CHUNK_BYTES, MAX_NODES, MAX_ROWS, MAX_TEXT_BYTES
from starsd_edge.protocol.messages import (
    Busy,
    Close,
    Draft,
    Error,
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
)
from starsd_edge.protocol.telemetry import encode_report

__all__ = ["encode"]

LARGEST_U32, LARGEST_ID, LARGEST_NARROW_ID = 0xFFFFFFFF, 0x7FFFFFFF, 0xFFFF


def encode(message: Message) -> Frames:
    """Frames of `message`. Raises LocalProtocolError when a field does not fit its place."""
    try:
        return ENCODERS[type(message)](message)
    except (struct.error, OverflowError) as error:
        raise LocalProtocolError(f"{type(message).__name__} does not fit the wire: {error}") from error


def encode_hello(m: Hello) -> Frames:
    return [head_frame(MessageKind.HELLO, m.head), encode_greeting(m.body)]


def encode_welcome(m: Welcome) -> Frames:
    return [head_frame(MessageKind.WELCOME, m.head), encode_greeting(m.body)]


def encode_open(m: Open) -> Frames:
    return [head_frame(MessageKind.OPEN, m.head, OPEN_BODY.pack(m.first_token))]


def encode_rows(kind: MessageKind, m: Prefill | Update, body: bytes) -> Frames:
    rows = m.features
    if rows.rows != len(m.tokens) or rows.rows > MAX_ROWS or len(rows.data) > MAX_CHUNK_BYTES:
        raise LocalProtocolError(
            f"{rows.rows} rows ({len(rows.data)} bytes) for {len(m.tokens)} tokens; at most {MAX_ROWS} rows, "
            f"{MAX_CHUNK_BYTES} bytes, and as many of one as of the other"
        )
    ids, flags = pack_ids(m.tokens)
    head = head_frame(kind, m.head, body, count=rows.rows, width=rows.width, flags=flags, dtype=rows.dtype)
    return [head, ids, rows.data]


def encode_prefill(m: Prefill) -> Frames:
    return encode_rows(MessageKind.PREFILL, m, b"")


def encode_update(m: Update) -> Frames:
    try:
        body = UPDATE_BODY.pack(*m.hints)
    except struct.error:
        body = UPDATE_BODY.pack(*m.hints[:4], *map(clip_u32, m.hints[4:]))
    return encode_rows(MessageKind.UPDATE, m, body)


def encode_ack(m: PrefillAck) -> Frames:
    return [head_frame(MessageKind.PREFILL_ACK, m.head)]


def encode_draft(m: Draft) -> Frames:
    if len(m.tokens) != len(m.parents) or len(m.tokens) >= MAX_NODES:
        raise LocalProtocolError(
            f"a draft of {len(m.tokens)} tokens and {len(m.parents)} parents; at most {MAX_NODES - 1} of each"
        )
    ids, flags = pack_ids(m.tokens)
    body = DRAFT_BODY.pack(clip_u32(m.queue_us), clip_u32(m.draft_us))
    flags |= FLAG_AHEAD if m.ahead else 0
    head = head_frame(MessageKind.DRAFT, m.head, body, count=len(m.tokens), flags=flags)
    return [head, ids + m.parents.astype(np.uint8).tobytes()]


def encode_need_prefill(m: NeedPrefill) -> Frames:
    return [head_frame(MessageKind.NEED_PREFILL, m.head)]


def encode_busy(m: Busy) -> Frames:
    return [head_frame(MessageKind.BUSY, m.head, BUSY_BODY.pack(clip_u32(m.retry_after_ms), m.reason, 0))]


def encode_ping(m: Ping) -> Frames:
    head = head_frame(MessageKind.PING, m.head, PING_BODY.pack(m.nonce))
    return [head, m.padding] if m.padding else [head]


def encode_pong(m: Pong) -> Frames:
    return [head_frame(MessageKind.PONG, m.head, PONG_BODY.pack(m.nonce, clip_u32(m.queue_us)))]


def encode_edge_report(m: Report) -> Frames:
    return [head_frame(MessageKind.REPORT, m.head), encode_report(m.body)]


def encode_close(m: Close) -> Frames:
    return [head_frame(MessageKind.CLOSE, m.head)]


def encode_goaway(m: GoAway) -> Frames:
    return [head_frame(MessageKind.GOAWAY, m.head, GOAWAY_BODY.pack(clip_u32(m.remaining_ms)))]


def encode_error(m: Error) -> Frames:
    text = m.text.encode("utf-8", "replace")[:MAX_TEXT_BYTES]
    return [head_frame(MessageKind.ERROR, m.head, ERROR_BODY.pack(m.code, m.kind & 0xFF, 0)), text]


def pack_ids(tokens: Integers) -> tuple[bytes, int]:
    """Two bytes each where all fit, else four."""
    if not len(tokens):
        return b"", 0
    top = largest(tokens.astype(np.uint32))  # one below zero is beyond every id
    if top <= LARGEST_NARROW_ID:
        return tokens.astype(NARROW_ID).tobytes(), 0
    if top > LARGEST_ID:
        raise LocalProtocolError(f"token {tokens.min()}")
    return tokens.astype(WIDE_ID).tobytes(), FLAG_WIDE_IDS


def clip_u32(value: int) -> int:
    return min(max(value, 0), LARGEST_U32)


ENCODERS: dict[type[Message], Callable[..., Frames]] = {
    Hello: encode_hello,
    Welcome: encode_welcome,
    Open: encode_open,
    Prefill: encode_prefill,
    PrefillAck: encode_ack,
    Update: encode_update,
    Draft: encode_draft,
    NeedPrefill: encode_need_prefill,
    Busy: encode_busy,
    Ping: encode_ping,
    Pong: encode_pong,
    Report: encode_edge_report,
    Close: encode_close,
    GoAway: encode_goaway,
    Error: encode_error,
}
