"""The prefix: what it holds, its running checksum, what two contexts share."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from starsd_edge.decoding.prefix import Prefix, common_length, prefix_crc

token_lists = st.lists(st.integers(0, 2**31 - 1), max_size=40)


@given(st.lists(st.tuples(st.booleans(), token_lists), max_size=12))
def test_a_prefix_is_a_list_with_a_checksum_that_runs_along(steps: list[tuple[bool, list[int]]]) -> None:
    prefix, model = Prefix(), list[int]()
    for cut, tokens in steps:
        if cut:
            keep = len(tokens) % (len(model) + 1)
            prefix.truncate(keep)
            del model[keep:]
        else:
            prefix.append(tokens)
            model += tokens
        assert model == prefix.tokens.tolist()
        assert prefix_crc(np.array(model, np.int32)) == prefix.crc


def test_the_checksum_is_crc32_of_little_endian_int32() -> None:
    """Part of the protocol. The value is CRC-32 of the eight bytes 12345678."""
    tokens = np.frombuffer(b"12345678", "<i4")
    assert prefix_crc(tokens) == 0x9AE0DAAF
    assert prefix_crc(tokens[1:], prefix_crc(tokens[:1])) == 0x9AE0DAAF
    assert prefix_crc(np.array([], np.int32)) == 0


def test_a_prefix_grows_past_its_first_buffer() -> None:
    prefix = Prefix()
    prefix.append(range(1000))
    prefix.append(range(5000))
    assert [*range(1000), *range(5000)] == prefix.tokens.tolist()


def test_tokens_cannot_be_changed_from_outside() -> None:
    prefix = Prefix()
    prefix.append([1, 2, 3])
    with pytest.raises(ValueError, match="read-only"):
        prefix.tokens[0] = 9


@pytest.mark.parametrize("length", [-1, 4])
def test_a_cut_outside_the_prefix_is_refused(length: int) -> None:
    prefix = Prefix()
    prefix.append([1, 2, 3])
    with pytest.raises(ValueError, match="3 tokens"):
        prefix.truncate(length)


@given(token_lists, token_lists, token_lists)
def test_common_length_counts_the_shared_beginning(shared: list[int], a: list[int], b: list[int]) -> None:
    expected = len(shared)
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        expected += 1
    assert expected == common_length(np.array(shared + a, np.int32), np.array(shared + b, np.int32))
