"""The head of a message: frame 0, fixed little-endian fields that all types share, and a short body behind.

Its own length byte lets a later minor version append fields that this one skips.
"""

from __future__ import annotations

import struct
from typing import NamedTuple, TypeAlias

from starsd_edge.protocol.limits import MAX_CONTEXT_TOKENS
from starsd_edge.protocol.messages import ErrorCode, Head, MessageKind, WireError

__all__ = ["COMMON", "MAGIC", "MAJOR", "MINOR", "Buffer", "Frames", "Peek", "head_frame", "peek"]

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


class Peek(NamedTuple):
    """What can be said of a message by its first bytes alone, for routing and refusing it."""

    kind: int
    head: Head
    num_items: int  # rows, or nodes without the root
    width: int
    flags: int
    dtype: int
    body_bytes: int  # of the fixed part behind the common head


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
    return Peek(kind, head, count, width, flags, dtype, size - COMMON.size)
