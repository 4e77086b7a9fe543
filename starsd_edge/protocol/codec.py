"""Messages to frames and back. docs/protocol.md is the specification; golden vectors hold both to it.

A message is one to three frames: a head (fixed little-endian fields), ids, features. The head's own length
byte lets a later minor version append fields that this one skips; everything else must fit to the byte. Sizes
are checked against the frame before anything is allocated, and only WireError leaves `decode`.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NoReturn, TypeAlias

import numpy as np

from starsd_edge.errors import LocalProtocolError, RemoteProtocolError
from starsd_edge.protocol.features import EncodedRows, FeatureDtype, row_bytes
from starsd_edge.protocol.greeting import HelloBody, WelcomeBody, decode_greeting, encode_greeting
from starsd_edge.protocol.limits import (
    MAX_CHUNK_BYTES,
    MAX_CONTEXT_TOKENS,
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
from starsd_edge.protocol.telemetry import decode_report, encode_report
from starsd_edge.types import TokenArray

__all__ = ["MAGIC", "MAJOR", "MINOR", "Buffer", "Frames", "Peek", "decode", "encode", "kind_of", "peek"]

MAGIC = b"SD"
MAJOR = 1  # another one is refused
MINOR = 0  # a higher one is welcome: it may only append to heads and add kinds

Buffer: TypeAlias = bytes | bytearray | memoryview
Frames: TypeAlias = list[bytes]

# magic, major, minor, kind, head_len, flags, dtype, session, boot_id, epoch, round_id, base_len, prefix_crc,
# count, width
COMMON = struct.Struct("<2sBBBBBBQQIIIIHH")
FLAG_WIDE_IDS = 1  # ids are u32, not u16

OPEN_BODY = struct.Struct("<I")  # first_token
UPDATE_BODY = struct.Struct("<HHHHIIII")  # Hints, in its order with a reserved u16 after verify_nodes
DRAFT_BODY = struct.Struct("<II")  # queue_us, draft_us
BUSY_BODY = struct.Struct("<IHH")  # retry_after_ms, reason, reserved
PING_BODY = struct.Struct("<Q")  # nonce
PONG_BODY = struct.Struct("<QI")  # nonce, queue_us
GOAWAY_BODY = struct.Struct("<I")  # remaining_ms
ERROR_BODY = struct.Struct("<HBB")  # code, kind of the refused message, reserved
EMPTY_BODY = struct.Struct("")

LARGEST_U32 = 0xFFFFFFFF
LARGEST_NARROW_ID = 0xFFFF
# parents[j] of node j + 1 must be at most j
LATEST_PARENT = np.arange(MAX_NODES, dtype=np.int32)


@dataclass(frozen=True, slots=True)
class Peek:
    """What can be said of a message by its first bytes alone, for routing and refusing it."""

    kind: int
    head: Head
    count: int
    width: int
    flags: int
    dtype: int
    body: memoryview  # the fixed part behind the common head


# ---------------------------------------------------------------------------------------------------- encode


def encode(message: Message) -> Frames:
    """Frames of `message`. Raises LocalProtocolError when a field does not fit its place."""
    try:
        return ENCODERS[type(message)](message)
    except (struct.error, OverflowError) as error:
        raise LocalProtocolError(f"{type(message).__name__} does not fit the wire: {error}") from error


def head_frame(
    kind: MessageKind,
    head: Head,
    body: bytes = b"",
    *,
    count: int = 0,
    width: int = 0,
    flags: int = 0,
    dtype: int = 0,
) -> bytes:
    return (
        COMMON.pack(
            MAGIC,
            MAJOR,
            MINOR,
            kind,
            COMMON.size + len(body),
            flags,
            dtype,
            head.session,
            head.boot_id,
            head.epoch,
            head.round_id,
            head.base_len,
            head.prefix_crc,
            count,
            width,
        )
        + body
    )


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
    return [head, ids, bytes(rows.data)]


def encode_prefill(m: Prefill) -> Frames:
    return encode_rows(MessageKind.PREFILL, m, b"")


def encode_update(m: Update) -> Frames:
    h = m.hints
    body = UPDATE_BODY.pack(
        h.max_nodes,
        h.num_accepted,
        h.verify_nodes,
        0,
        clip_u32(h.verify_us),
        clip_u32(h.plain_us),
        clip_u32(h.wait_us),
        clip_u32(h.link_us),
    )
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


def pack_ids(tokens: TokenArray) -> tuple[bytes, int]:
    """Two bytes each where all fit, else four."""
    if len(tokens) and (tokens.min() < 0 or tokens.max() > LARGEST_NARROW_ID):
        if tokens.min() < 0:
            raise LocalProtocolError("a token id below zero")
        return tokens.astype(np.dtype("<u4")).tobytes(), FLAG_WIDE_IDS
    return tokens.astype(np.dtype("<u2")).tobytes(), 0


def clip_u32(value: int) -> int:
    return min(max(value, 0), LARGEST_U32)


# ---------------------------------------------------------------------------------------------------- decode


def peek(first_frame: Buffer) -> Peek:
    """Read the common head. Raises WireError: not ours (MALFORMED), or another major version (VERSION)."""
    size = len(first_frame)
    if size < COMMON.size:
        raise WireError(ErrorCode.MALFORMED, f"a head of {size} bytes; the shortest has {COMMON.size}")
    (magic, major, _minor, kind, head_len, flags, dtype, *fields, count, width) = COMMON.unpack_from(
        first_frame
    )
    if magic != MAGIC:
        raise WireError(ErrorCode.MALFORMED, "the message does not start with SD")
    head = Head(*fields)
    if major != MAJOR:
        raise WireError(ErrorCode.VERSION, f"protocol version {major} there, {MAJOR} here", head)
    if head_len != size:
        raise WireError(ErrorCode.MALFORMED, f"a head that says {head_len} bytes and has {size}", head)
    if head.base_len > MAX_CONTEXT_TOKENS:
        raise WireError(
            ErrorCode.LIMIT, f"base_len {head.base_len}; at most {MAX_CONTEXT_TOKENS} tokens", head
        )
    return Peek(kind, head, count, width, flags, dtype, memoryview(first_frame)[COMMON.size :])


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
        if len(first.body) < entry.body.size or not entry.min_frames <= len(frames) <= entry.max_frames:
            malformed(
                f"{entry.name} with {len(frames)} frames and {len(first.body)} bytes behind the common head"
            )
        return entry.build(first, entry.body.unpack_from(first.body), frames)
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
    if first.count > MAX_ROWS or not 1 <= first.width <= MAX_FEATURE_SIZE:
        raise WireError(
            ErrorCode.LIMIT, f"{first.count} rows of width {first.width}; at most {MAX_ROWS} rows"
        )
    if first.head.base_len < first.count + 1:
        malformed(f"{first.count} rows cannot end at base_len {first.head.base_len}")
    dtype = FEATURE_DTYPES.get(first.dtype)
    if dtype is None:
        malformed(f"feature dtype {first.dtype}")
    size = first.count * row_bytes(dtype, first.width)
    if size > MAX_CHUNK_BYTES:
        raise WireError(
            ErrorCode.LIMIT, f"{size} bytes of features; at most {MAX_CHUNK_BYTES} in one message"
        )
    tokens = unpack_ids(frames[1], first.count, first.flags, extra_bytes=0)
    return tokens, EncodedRows(dtype, first.count, first.width, frames[2])


def decode_prefill(first: Peek, body: Body, frames: Sequence[Buffer]) -> Prefill:
    if first.count == 0:
        malformed("PREFILL without rows")
    return Prefill(first.head, *rows_of(first, frames))


def decode_update(first: Peek, body: Body, frames: Sequence[Buffer]) -> Update:
    max_nodes, num_accepted, verify_nodes, _, verify_us, plain_us, wait_us, link_us = body
    if not 1 <= max_nodes <= MAX_NODES:
        raise WireError(ErrorCode.LIMIT, f"{max_nodes} nodes wanted; 1 to {MAX_NODES} may be")
    hints = Hints(max_nodes, num_accepted, verify_nodes, verify_us, plain_us, wait_us, link_us)
    return Update(first.head, *rows_of(first, frames), hints)


def decode_ack(first: Peek, body: Body, frames: Sequence[Buffer]) -> PrefillAck:
    return PrefillAck(first.head)


def decode_draft(first: Peek, body: Body, frames: Sequence[Buffer]) -> Draft:
    n = first.count
    if n >= MAX_NODES:
        raise WireError(ErrorCode.LIMIT, f"a draft of {n + 1} nodes; at most {MAX_NODES}")
    if first.head.base_len < 1:
        malformed("DRAFT for an empty prefix")
    ids = frames[1]
    tokens = unpack_ids(ids, n, first.flags, extra_bytes=n)
    parents = np.frombuffer(ids, np.uint8, n, len(ids) - n).astype(np.int32)
    if (parents > LATEST_PARENT[:n]).any():
        malformed("a draft node whose parent does not come before it")
    return Draft(first.head, tokens, parents, *body)


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


def unpack_ids(frame: Buffer, count: int, flags: int, *, extra_bytes: int) -> TokenArray:
    wide = bool(flags & FLAG_WIDE_IDS)
    size = count * (4 if wide else 2)
    if len(frame) != size + extra_bytes:
        malformed(f"{count} ids take {size + extra_bytes} bytes, not {len(frame)}")
    if not wide:
        return np.frombuffer(frame, np.dtype("<u2"), count).astype(np.int32)
    ids = np.frombuffer(frame, np.dtype("<i4"), count).astype(np.int32)
    if len(ids) and ids.min() < 0:
        malformed("a token id beyond 2^31")
    return ids


def as_readable(frame: Buffer) -> bytes | memoryview:
    return bytes(frame) if isinstance(frame, bytearray) else frame


# ---------------------------------------------------------------------------------------------------- tables


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

KINDS: dict[type[Message], MessageKind] = {
    entry.message: MessageKind(kind) for kind, entry in DECODERS.items()
}

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


def kind_of(message: Message) -> MessageKind:
    return KINDS[type(message)]
