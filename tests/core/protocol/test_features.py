"""Features on the wire: how near they come back, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from starsd_edge.errors import RemoteProtocolError
from starsd_edge.protocol.features import EncodedRows, FeatureDtype, decode_rows, encode_rows, row_bytes

WIDTHS = st.integers(1, 200)
SEEDS = st.integers(0, 2**32 - 1)


def spread(seed: int, rows: int, width: int) -> np.ndarray:
    """Normal values with a few massive activations, as middle layers have them."""
    rng = np.random.default_rng(seed)
    values = rng.standard_normal((rows, width)) * 4
    values[:, rng.integers(0, width)] *= 2000  # six sigma of it still fit float16
    return values.astype(np.float32)


@given(SEEDS, st.integers(0, 6), WIDTHS, st.sampled_from(FeatureDtype))
def test_rows_take_the_bytes_the_specification_says(
    seed: int, rows: int, width: int, dtype: FeatureDtype
) -> None:
    assert len(encode_rows(spread(seed, rows, width), dtype).data) == rows * row_bytes(dtype, width)


@given(SEEDS, WIDTHS)
def test_float16_comes_back_exactly(seed: int, width: int) -> None:
    features = spread(seed, 3, width).astype(np.float16)
    assert np.array_equal(decode_rows(encode_rows(features, FeatureDtype.FP16)), features)


@given(SEEDS, WIDTHS)
def test_bfloat16_is_within_half_a_step(seed: int, width: int) -> None:
    features = spread(seed, 3, width)
    back = decode_rows(encode_rows(features, FeatureDtype.BF16))
    assert np.all(np.abs(back - features) <= np.abs(features) * 2.0**-8)


@given(SEEDS, WIDTHS)
def test_int8_errs_by_less_than_a_step_of_its_own_group(seed: int, width: int) -> None:
    """A massive activation costs precision only to the 63 values beside it, never to the row."""
    features = spread(seed, 3, width)
    back = decode_rows(encode_rows(features, FeatureDtype.INT8))
    for start in range(0, width, 64):
        group = features[:, start : start + 64]
        step = np.abs(group).max(axis=1, keepdims=True) / 127
        # half a step of rounding, and up to 127 times the scale's own float16 rounding
        assert np.all(np.abs(back[:, start : start + 64] - group) <= step * (0.5 + 127 * 2.0**-11) + 1e-5)


@given(SEEDS, st.integers(2, 6), WIDTHS, st.sampled_from(FeatureDtype), st.data())
def test_any_run_of_rows_can_be_cut_out(
    seed: int, rows: int, width: int, dtype: FeatureDtype, data: st.DataObject
) -> None:
    """A history of encoded rows is sent again from any row on: rows don't depend on their neighbours."""
    features = spread(seed, rows, width)
    first = data.draw(st.integers(0, rows - 1))
    size = row_bytes(dtype, width)
    assert encode_rows(features, dtype).data[first * size :] == encode_rows(features[first:], dtype).data


@pytest.mark.parametrize("dtype", FeatureDtype)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_value_that_is_no_number_is_refused_on_this_side(dtype: FeatureDtype, value: float) -> None:
    with pytest.raises(ValueError, match="NaN"):
        encode_rows(np.array([[1.0, value]], np.float32), dtype)


@pytest.mark.parametrize(
    ("dtype", "data"),
    [
        (FeatureDtype.FP16, b"\x00\x3c\x00\x7c"),
        (FeatureDtype.FP16, b"\x00\x3c\x01\xfe"),
        (FeatureDtype.BF16, b"\x80\x3f\x80\x7f"),
        (FeatureDtype.INT8, b"\x01\x02\x00\x7e"),
    ],
)
def test_a_value_that_is_no_number_is_refused_from_the_other_side(dtype: FeatureDtype, data: bytes) -> None:
    """One such row would poison a draft KV cache for the rest of the session."""
    with pytest.raises(RemoteProtocolError, match="NaN or infinite"):
        decode_rows(EncodedRows(dtype, 1, 2, data))


def test_a_value_beyond_float16_names_the_way_out() -> None:
    with pytest.raises(ValueError, match="use bf16"):
        encode_rows(np.array([[70_000.0]], np.float32), FeatureDtype.FP16)
    assert decode_rows(encode_rows(np.array([[70_000.0]], np.float32), FeatureDtype.BF16))[0, 0] == 70_144


def test_rows_of_its_own_are_not_copied_and_a_piece_of_others_is() -> None:
    """A copy costs a round more than its message; a view would keep a whole forward's rows alive."""
    own = np.ones((3, 8), np.float16)
    assert np.shares_memory(np.frombuffer(encode_rows(own, FeatureDtype.FP16).data, np.uint8), own)
    piece = encode_rows(own[1:], FeatureDtype.FP16)
    own[:] = 2
    assert decode_rows(piece).tolist() == [[1.0] * 8] * 2


def test_a_block_of_another_size_is_refused() -> None:
    with pytest.raises(RemoteProtocolError, match="are 16 bytes, not 15"):
        EncodedRows(FeatureDtype.FP16, 2, 4, bytes(15))
