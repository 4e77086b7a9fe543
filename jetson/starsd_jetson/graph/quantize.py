"""Weights in fewer bits. Every function takes one linear weight float32 [out, in]."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from starsd_edge.types import Float32Array

__all__ = [
    "INT4_BLOCKS",
    "Int4Blocks",
    "Int4Symmetric",
    "Int8Columns",
    "int4_block",
    "int4_blocks",
    "int4_error",
    "int4_symmetric",
    "int8_columns",
]

CHUNK_WEIGHTS = 1 << 22
INT8_MAX = 127
INT4_MAX = 15  # unsigned, with a zero point a block
# Input features that share a scale, by kind of int4. The larger, the faster (one row times 576 x 3072 weights
# on a Zen 4 core: 83, 62 and 52 us for 32, 64 and 128). TensorRT documents 64 and 128; 32 is for sizes that
# do not divide, and where ONNX Runtime must sum one row as it sums several.
INT4_BLOCKS = {"int4": (128, 64, 32), "int4-exact": (32,)}
SEARCH_WEIGHTS = 1 << 18  # a chunk and its temporaries stay in the processor's cache
SEARCH_SHARES = (1.0, 0.92, 0.84, 0.76, 0.68)


@dataclass(frozen=True, slots=True)
class Int8Columns:
    """weight.T ~ values * scales.

    values int8 [in, out]
    scales float32 [out]
    """

    values: NDArray[np.int8]
    scales: Float32Array


def int8_columns(weight: Float32Array) -> Int8Columns:
    """Symmetric int8 with one scale an output feature."""
    values = np.empty((weight.shape[1], weight.shape[0]), np.int8)
    scales = np.empty(weight.shape[0], np.float32)
    for rows in row_chunks(weight):
        part = weight[rows]
        peak = np.abs(part).max(axis=1)
        scales[rows] = np.where(peak > 0, peak / INT8_MAX, 1.0)
        values[:, rows] = np.rint(part / scales[rows, None]).T
    return Int8Columns(values, scales)


def row_chunks(weight: Float32Array, weights: int = CHUNK_WEIGHTS) -> Iterator[slice]:
    """Slices of rows: the temporaries of a whole LM head would be gigabytes."""
    rows = max(1, weights // weight.shape[1])
    for start in range(0, weight.shape[0], rows):
        yield slice(start, start + rows)


@dataclass(frozen=True, slots=True)
class Int4Blocks:
    """weight[o, block] ~ (values - zero_point) * scale, as MatMulNBits lays it out.

    values      uint8 [out, blocks, block / 2], low nibble first
    scales      float32 [out, blocks]
    zero_points uint8 [out, ceil(blocks / 2)], low nibble first
    """

    values: NDArray[np.uint8]
    scales: Float32Array
    zero_points: NDArray[np.uint8]
    block: int


def int4_block(inputs: int, kind: str = "int4") -> int:
    """The largest block of a kind that divides a weight's inputs. Raises ValueError when none does."""
    for block in INT4_BLOCKS[kind]:
        if inputs % block == 0:
            return block
    raise ValueError(f"int4 needs a multiple of {INT4_BLOCKS[kind][-1]} inputs, not {inputs}")


def int4_blocks(weight: Float32Array, block: int, importance: Float32Array | None = None) -> Int4Blocks:
    """Asymmetric int4, one scale and zero point a block of inputs, searched (`search`).

    importance  float32 [in]: mean square of each input, None for equal ones
    """
    parts = [int4_part(weight[rows], block, importance) for rows in row_chunks(weight, SEARCH_WEIGHTS)]
    return Int4Blocks(
        np.concatenate([part.values for part in parts]),
        np.concatenate([part.scales for part in parts]),
        np.concatenate([part.zero_points for part in parts]),
        block,
    )


def int4_part(weight: Float32Array, block: int, importance: Float32Array | None) -> Int4Blocks:
    rows, columns = weight.shape
    blocks = weight.reshape(rows, columns // block, block)
    widest, zeros = spread(blocks)
    scales = search(blocks, widest, (-zeros, INT4_MAX - zeros), importance)
    values = np.clip(np.rint(blocks / scales[..., None]) + zeros[..., None], 0, INT4_MAX).astype(np.uint8)
    return Int4Blocks(pack_nibbles(values), scales, pack_nibbles(zeros.astype(np.uint8)), block)


def int4_error(weight: Float32Array, block: int) -> Float32Array:
    """float32 [in]: squared error of each input's weights after plain rounding to int4."""
    total = np.zeros(weight.shape[1], np.float32)
    for rows in row_chunks(weight, SEARCH_WEIGHTS):
        blocks = weight[rows].reshape(len(weight[rows]), -1, block)
        scales, zeros = spread(blocks)
        codes = np.clip(np.rint(blocks / scales[..., None]), -zeros[..., None], INT4_MAX - zeros[..., None])
        total += np.square(codes * scales[..., None] - blocks).sum(axis=0).reshape(-1)
    return total


def spread(blocks: Float32Array) -> tuple[Float32Array, Float32Array]:
    """Scale and zero point [out, blocks] that reach from the smallest to the largest weight of each block."""
    low = np.minimum(blocks.min(axis=2), 0)
    high = np.maximum(blocks.max(axis=2), 0)
    scales = np.where(high > low, (high - low) / INT4_MAX, 1.0).astype(np.float32)
    return scales, np.clip(np.rint(-low / scales), 0, INT4_MAX).astype(np.float32)


def search(
    blocks: Float32Array,
    widest: Float32Array,
    bounds: tuple[Any, Any],
    importance: Float32Array | None,
) -> Float32Array:
    """float32 [out, blocks]: of `widest` and narrower scales, each fitted to the codes it leads to, the one
    with the least squared error, weighted by how large each input is (a diagonal Hessian). Outliers are cut
    where that helps the rest.

    blocks [out, blocks, block]; bounds: the smallest and largest code of every block
    """
    low, high = (np.asarray(bound, np.float32)[..., None] for bound in bounds)
    weights = 1.0 if importance is None else importance.reshape(1, -1, blocks.shape[2])
    weighted = blocks * weights
    best = widest
    least = np.full(widest.shape, np.inf, np.float32)
    for share in SEARCH_SHARES:
        codes = np.clip(np.rint(blocks / (widest * share)[..., None]), low, high)
        # With x the weights and q the codes, sum w (x - s q)^2 is least at s = xq / qq, where it is
        # sum w x^2 - xq^2 / qq: the first term is the same for every candidate.
        xq = np.einsum("obi,obi->ob", weighted, codes)
        qq = np.einsum("obi,obi->ob", codes * weights, codes)
        error = -np.divide(xq * xq, qq, out=np.zeros_like(xq), where=qq > 0)
        fitted = np.divide(xq, qq, out=np.zeros_like(xq), where=qq > 0)
        better = (error < least) & (np.abs(fitted) > 0) & (np.sign(fitted) == np.sign(widest))
        best = np.where(better, fitted, best)
        least = np.where(better, error, least)
    return np.asarray(best, np.float32)


@dataclass(frozen=True, slots=True)
class Int4Symmetric:
    """weight.T ~ values * scales, blocks along the inputs.

    values uint8 [in * out / 2]: signed nibbles of [in, out], low nibble first
    scales float32 [in / block, out]
    """

    values: NDArray[np.uint8]
    scales: Float32Array
    block: int


def int4_symmetric(weight: Float32Array, block: int, importance: Float32Array | None = None) -> Int4Symmetric:
    """Signed int4 without zero points, as TensorRT's importer wants it; `out` is even."""
    rows, columns = weight.shape
    values = np.empty((columns, rows), np.int8)
    scales = np.empty((columns // block, rows), np.float32)
    for part in row_chunks(weight, SEARCH_WEIGHTS):
        blocks = weight[part].reshape(-1, columns // block, block)
        factor = search(blocks, signed_scales(blocks), (-8, 7), importance)
        scales[:, part] = factor.T
        rounded = np.clip(np.rint(blocks / factor[..., None]), -8, 7)
        values[:, part] = rounded.reshape(-1, columns).T
    return Int4Symmetric(pack_nibbles((values & 0xF).view(np.uint8)).reshape(-1), scales, block)


def signed_scales(blocks: Float32Array) -> Float32Array:
    """The magnitude that reaches furthest maps to -8, the one value more that two's complement has."""
    peak = np.take_along_axis(blocks, np.abs(blocks).argmax(axis=2)[..., None], axis=2)[..., 0]
    return np.asarray(np.where(peak != 0, peak / -8, 1.0), np.float32)


def pack_nibbles(values: NDArray[np.uint8]) -> NDArray[np.uint8]:
    if values.shape[-1] % 2:
        padding: list[Any] = [(0, 0)] * (values.ndim - 1) + [(0, 1)]
        values = np.pad(values, padding)
    return np.asarray(values[..., 0::2] | values[..., 1::2] << 4, np.uint8)
