"""The head of a message: frame 0, fixed little-endian fields that all types share, and a short body behind.

Its own length byte lets a later minor version append fields that this one skips.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple, TypeAlias

import numpy as np

from starsd_edge.protocol.limits import MAX_CONTEXT_TOKENS
from starsd_edge.protocol.messages import ErrorCode, Head, MessageKind, WireError, make_head

__all__ = ["COMMON", "MAGIC", "MAJOR", "MINOR", "Buffer", "Frames", "Peek", "head_frame", "peek"]

MAGIC = b"SD"
MAJOR = 1  # another one is refused
MINOR = 0  # a higher one is welcome: it may only append to heads and add kinds

Buffer: TypeAlias = bytes | bytearray | memoryview
Frames: TypeAlias = Sequence[Buffer]

# magic, major, minor, kind, head_len, flags, dtype, session, boot_id, epoch, round_id, base_len, prefix_crc,
# count, width
COMMON = struct.Struct("<2sBBBBBBQQIIIIHH")
FLAG_WIDE_IDS = 1  # ids are u32, not u16
FLAG_AHEAD = 2  # of a DRAFT: drafted ahead
NARROW_ID, WIDE_ID = np.dtype("<u2"), np.dtype("<i4")

OPEN_BODY = struct.Struct("<I")  # first_token
UPDATE_BODY = struct.Struct("<HHHHIIII")  # Hints, in its order
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


make_peek: partial[Peek] = partial(tuple.__new__, Peek)


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
    size = COMMON.size + len(body)
    return COMMON.pack(MAGIC, MAJOR, MINOR, kind, size, flags, dtype, *head, count, width) + body


def peek(first_frame: Buffer) -> Peek:
    """Read the common head. Raises WireError: not ours (MALFORMED), or another major version (VERSION)."""
    size = len(first_frame)
    if size < COMMON.size:
        raise WireError(ErrorCode.MALFORMED, f"a head of {size} bytes; the shortest has {COMMON.size}")
    fields = COMMON.unpack_from(first_frame)
    magic, major, _minor, kind, head_len, flags, dtype = fields[:7]
    if magic != MAGIC:
        raise WireError(ErrorCode.MALFORMED, "the message does not start with SD")
    head = make_head(fields[7:13])
    if major != MAJOR:
        raise WireError(ErrorCode.VERSION, f"protocol version {major} there, {MAJOR} here", head)
    if head_len != size:
        raise WireError(ErrorCode.MALFORMED, f"a head that says {head_len} bytes and has {size}", head)
    if fields[11] > MAX_CONTEXT_TOKENS:
        raise WireError(
            ErrorCode.LIMIT, f"base_len {head.base_len}; at most {MAX_CONTEXT_TOKENS} tokens", head
        )
    return make_peek((kind, head, fields[13], fields[14], flags, dtype, size - COMMON.size))
