"""int4: what searching brings over plain rounding, and that packing loses nothing."""

from __future__ import annotations

import numpy as np
import pytest

from starsd_jetson.graph.layer import protection
from starsd_jetson.graph.quantize import (
    Int4Blocks,
    Int4Symmetric,
    int4_block,
    int4_blocks,
    int4_error,
    int4_symmetric,
    spread,
)


def unpack(packed: np.ndarray) -> np.ndarray:
    return np.stack([packed & 15, packed >> 4], axis=-1).reshape(*packed.shape[:-1], -1)


def values_of(packed: Int4Blocks) -> np.ndarray:
    """float32 [out, in], as MatMulNBits reads it."""
    zeros = unpack(packed.zero_points)[:, : packed.scales.shape[1]].astype(np.float32)
    codes = unpack(packed.values).astype(np.float32)
    return ((codes - zeros[..., None]) * packed.scales[..., None]).reshape(len(codes), -1)


def values_of_symmetric(packed: Int4Symmetric, inputs: int) -> np.ndarray:
    """float32 [out, in], as DequantizeLinear reads it."""
    codes = unpack(packed.values).astype(np.int8).reshape(inputs, -1)
    codes = np.where(codes > 7, codes - 16, codes).astype(np.float32)
    return (codes * np.repeat(packed.scales, packed.block, axis=0)).T


def rounded(weight: np.ndarray, block: int) -> np.ndarray:
    """Plain rounding from the smallest to the largest weight of each block."""
    blocks = weight.reshape(len(weight), -1, block)
    scales, zeros = (part[..., None] for part in spread(blocks))
    return ((np.clip(np.rint(blocks / scales) + zeros, 0, 15) - zeros) * scales).reshape(weight.shape)


@pytest.fixture
def weight(rng: np.random.Generator) -> np.ndarray:
    """Heavy-tailed, as trained weights are."""
    return rng.standard_t(4, (24, 256)).astype(np.float32)


@pytest.mark.parametrize("block", [32, 64, 128])
def test_searched_scales_lose_less_than_rounding(
    block: int, weight: np.ndarray, rng: np.random.Generator
) -> None:
    importance = rng.exponential(1.0, 256).astype(np.float32)

    def loss(found: np.ndarray) -> float:
        return float((np.square(found - weight) * importance).sum())

    plain = loss(rounded(weight, block))
    assert loss(values_of(int4_blocks(weight, block, importance))) < 0.9 * plain
    symmetric = values_of_symmetric(int4_symmetric(weight, block, importance), 256)
    assert loss(symmetric) < 1.5 * plain  # it has no zero points


@pytest.mark.parametrize("fill", [0.0, 1.0, -2.0])
def test_a_constant_weight_is_kept(fill: float) -> None:
    weight = np.full((4, 64), fill, np.float32)
    np.testing.assert_allclose(values_of(int4_blocks(weight, 64)), weight, atol=1e-6)
    np.testing.assert_allclose(values_of_symmetric(int4_symmetric(weight, 64), 64), weight, atol=1e-6)


def test_busy_channels_are_protected(weight: np.ndarray) -> None:
    """Their weights grow before rounding, so the error of the product shrinks."""
    squares = np.ones(256, np.float32)
    squares[::16] = 400.0
    factors = protection("int4", squares, weight)
    assert factors[::16].min() > factors[1]
    plain = float((int4_error(weight, 128) * squares).sum())
    assert float((int4_error(weight * factors, 128) / factors**2 * squares).sum()) < plain


def test_the_largest_block_that_divides_is_taken() -> None:
    assert [int4_block(inputs) for inputs in (4096, 576, 96)] == [128, 64, 32]
    assert [int4_block(inputs, "int4-exact") for inputs in (4096, 576, 96)] == [32, 32, 32]
    with pytest.raises(ValueError, match="multiple of 32"):
        int4_block(100)
