"""The codec: what goes in comes out, and nothing but WireError comes out of foreign bytes."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import fields, replace

from starsd_edge.errors import LocalProtocolError
from starsd_edge.protocol.codec import decode, encode, kind_of
from starsd_edge.protocol.features import EncodedRows, FeatureDtype, encode_rows
from starsd_edge.protocol.head import COMMON, MAJOR, peek
from starsd_edge.protocol.limits import MAX_CHUNK_BYTES, MAX_CONTEXT_TOKENS
from starsd_edge.protocol.messages import (
    Busy,
    BusyReason,
    Close,
    Draft,
    Error,
    ErrorCode,
    Head,
    Hello,
    Hints,
    Message,
    Open,
    Ping,
    Prefill,
    Update,
    WireError,
)
from tests.core.protocol import strategies, wire_samples

HEAD = Head(session=7, boot_id=8, epoch=1, round_id=3, base_len=40, prefix_crc=99)


def same(left: Message, right: Message) -> bool:
    def plain(value: object) -> object:
        if isinstance(value, np.ndarray):
            return value.tolist()
        if isinstance(value, EncodedRows):
            return (value.dtype, value.rows, value.width, bytes(value.data))
        return value

    return type(left) is type(right) and all(
        plain(getattr(left, f.name)) == plain(getattr(right, f.name)) for f in fields(left)
    )


def small_update(tokens: int = 5, width: int = 8) -> Update:
    rows = encode_rows(np.ones((tokens, width), np.float32), FeatureDtype.FP16)
    return Update(HEAD, np.arange(tokens, dtype=np.int32), rows, Hints())


@pytest.mark.parametrize("size", [0, MAX_CONTEXT_TOKENS + 1, 10**400], ids=["none", "too many", "no float"])
def test_a_cost_curve_over_a_size_that_no_forward_has_is_refused(size: int) -> None:
    """An integer has no end in JSON, and a float has: the service's engine ended with it."""
    frames = encode(Hello(HEAD, replace(wire_samples.HELLO, cost_sizes=[1, size])))
    with pytest.raises(WireError):
        decode(frames)


@given(strategies.messages())
def test_every_message_survives_the_wire(message: Message) -> None:
    assert same(message, decode(encode(message)))


@given(strategies.messages(), st.data())
def test_a_damaged_message_is_decoded_or_refused_and_nothing_else(
    message: Message, data: st.DataObject
) -> None:
    """One byte changed, a frame cut, doubled or dropped: WireError or a message, never another exception."""
    frames = [bytearray(frame) for frame in encode(message)]
    which = data.draw(st.integers(0, len(frames) - 1))
    match data.draw(st.sampled_from(["flip", "cut", "grow", "drop", "double"])):
        case "flip" if frames[which]:
            frames[which][data.draw(st.integers(0, len(frames[which]) - 1))] ^= data.draw(st.integers(1, 255))
        case "cut":
            del frames[which][data.draw(st.integers(0, len(frames[which]))) :]
        case "grow":
            frames[which] += data.draw(st.binary(min_size=1, max_size=9))
        case "drop":
            del frames[which]
        case "double":
            frames.insert(which, frames[which])
    with contextlib.suppress(WireError):
        decode([bytes(frame) for frame in frames])


@given(st.lists(st.binary(max_size=120), max_size=4))
def test_random_bytes_are_refused(frames: list[bytes]) -> None:
    with pytest.raises(WireError):
        decode(frames)


def test_a_draft_of_60_nodes_stays_under_240_bytes() -> None:
    tokens = np.full(60, 65_535, np.int32)
    draft = Draft(HEAD, tokens, np.arange(60, dtype=np.int32), 4_000_000_000, 4_000_000_000)
    assert sum(len(frame) for frame in encode(draft)) <= 240


def test_fields_appended_by_a_later_minor_version_are_skipped() -> None:
    head, *rest = encode(Ping(HEAD, nonce=5, padding=b"x"))
    longer = bytearray(head + b"\xaa\xbb\xcc")
    longer[3], longer[5] = 7, len(longer)  # minor version, head_len
    assert decode([bytes(longer), *rest]) == Ping(HEAD, nonce=5, padding=b"x")


def test_another_major_version_is_refused_with_both_numbers_and_the_session() -> None:
    frame = bytearray(encode(Close(HEAD))[0])
    frame[2] = MAJOR + 1
    with pytest.raises(WireError, match=f"version {MAJOR + 1} there, {MAJOR} here") as refused:
        decode([bytes(frame)])
    assert (refused.value.code, refused.value.head) == (ErrorCode.VERSION, HEAD)


def test_an_unknown_type_is_told_apart_so_that_it_can_be_answered() -> None:
    frame = bytearray(encode(Close(HEAD))[0])
    frame[4] = 200
    with pytest.raises(WireError, match="type 200") as refused:
        decode([bytes(frame)])
    assert (refused.value.code, refused.value.head) == (ErrorCode.UNKNOWN_KIND, HEAD)


@pytest.mark.parametrize(
    ("frames", "why"),
    [
        ([], "0 frames"),
        ([b"GET / HTTP/1.1\r\n" * 4], "does not start with SD"),
        ([b"SD"], "a head of 2 bytes"),
        ([encode(Close(HEAD))[0] + b"\0"], "says 44 bytes and has 45"),
        ([*encode(Close(HEAD)), b""], "Close with 2 frames"),
        (encode(Open(HEAD, 5)), "base_len 40, not 1"),
    ],
)
def test_a_message_that_does_not_fit_to_the_byte_is_refused(frames: list[bytes], why: str) -> None:
    with pytest.raises(WireError, match=why):
        decode(frames)


def test_declared_sizes_are_checked_before_anything_is_allocated() -> None:
    """A short message that declares gigabytes costs an exception, not memory."""
    update = small_update()
    head, ids, rows = encode(replace(update, head=HEAD._replace(base_len=5000)))
    huge = bytearray(head)
    COMMON.pack_into(huge, 0, *COMMON.unpack_from(head)[:-2], 4096, 65535)
    with pytest.raises(WireError, match=str(MAX_CHUNK_BYTES)):
        decode([bytes(huge), ids, rows])


def test_a_length_no_context_has_is_refused() -> None:
    frame = encode(Close(Head(1, base_len=MAX_CONTEXT_TOKENS + 1)))
    with pytest.raises(WireError, match="base_len"):
        decode(frame)


def test_a_parent_after_its_child_is_refused() -> None:
    head, body = encode(Draft(HEAD, np.array([4, 5], np.int32), np.array([0, 1], np.int32)))
    with pytest.raises(WireError, match="parent"):
        decode([head, body[:-1] + b"\x02"])


def test_a_token_beyond_every_vocabulary_is_refused() -> None:
    head, body = encode(Draft(HEAD, np.array([4, 70_000], np.int32), np.array([0, 1], np.int32)))
    with pytest.raises(WireError, match="beyond 2\\^31"):
        decode([head, body[:7] + b"\x80" + body[8:]])


@pytest.mark.parametrize("tokens", [[5, 65_535], [5, 65_536]], ids=["narrow", "wide"])
def test_a_draft_that_came_leaves_as_it_came(tokens: list[int]) -> None:
    """Its ids are still as wide as on the wire, not int32."""
    frames = encode(Draft(HEAD, np.array(tokens, np.int32), np.array([0, 1], np.int32)))
    assert encode(decode(frames)) == frames


def test_reasons_and_codes_of_a_later_version_read_as_the_general_one() -> None:
    busy = bytearray(encode(Busy(HEAD, 10, BusyReason.MEMORY))[0])
    busy[COMMON.size + 4] = 99
    assert decode([bytes(busy)]) == Busy(HEAD, 10, BusyReason.OTHER)
    head, text = encode(Error(HEAD, ErrorCode.LIMIT, "no"))
    later = bytearray(head)
    later[COMMON.size] = 99
    assert decode([bytes(later), text]) == Error(HEAD, ErrorCode.INTERNAL, "no")


def test_an_error_text_cannot_steer_a_terminal() -> None:
    received = decode(encode(Error(HEAD, ErrorCode.LIMIT, "a\x1b[2Jb\nc")))
    assert isinstance(received, Error)
    assert received.text == "a [2Jb c"


def test_a_value_that_does_not_fit_is_our_own_mistake() -> None:
    with pytest.raises(LocalProtocolError, match="does not fit"):
        encode(Close(Head(session=-1)))
    with pytest.raises(LocalProtocolError, match="rows"):
        encode(Prefill(HEAD, np.zeros(2, np.int32), small_update(3).features))


def test_the_head_alone_tells_where_a_message_belongs() -> None:
    update = small_update()
    first = peek(encode(update)[0])
    assert (first.kind, first.head, first.num_items, first.width) == (kind_of(update), HEAD, 5, 8)
