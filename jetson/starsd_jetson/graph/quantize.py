"""Weights in fewer bits. Every function takes one linear weight float32 [out, in]."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from starsd_edge.types import Float32Array

__all__ = ["INT4_BLOCK", "Int4Blocks", "Int8Columns", "int4_blocks", "int8_columns"]

CHUNK_WEIGHTS = 1 << 22
INT8_MAX = 127
INT4_MAX = 15  # unsigned, with a zero point a block
INT4_BLOCK = 32  # input features that share a scale: GGUF's block, the smallest that MatMulNBits knows fast


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


def row_chunks(weight: Float32Array) -> Iterator[slice]:
    """Slices of rows: the temporaries of a whole LM head would be gigabytes."""
    rows = max(1, CHUNK_WEIGHTS // weight.shape[1])
    for start in range(0, weight.shape[0], rows):
        yield slice(start, start + rows)


@dataclass(frozen=True, slots=True)
class Int4Blocks:
    """weight[o, block] ~ (values - zero_point) * scale, as MatMulNBits lays it out.

    values      uint8 [out, blocks, INT4_BLOCK / 2], low nibble first
    scales      float32 [out, blocks]
    zero_points uint8 [out, ceil(blocks / 2)], low nibble first
    """

    values: NDArray[np.uint8]
    scales: Float32Array
    zero_points: NDArray[np.uint8]


def int4_blocks(weight: Float32Array) -> Int4Blocks:
    """Asymmetric int4, one scale and zero point a block of INT4_BLOCK inputs; `in` divides by it."""
    parts = [int4_part(weight[rows]) for rows in row_chunks(weight)]
    return Int4Blocks(
        np.concatenate([part.values for part in parts]),
        np.concatenate([part.scales for part in parts]),
        np.concatenate([part.zero_points for part in parts]),
    )


def int4_part(weight: Float32Array) -> Int4Blocks:
    rows, columns = weight.shape
    blocks = weight.reshape(rows, columns // INT4_BLOCK, INT4_BLOCK)
    low = np.minimum(blocks.min(axis=2), 0)
    high = np.maximum(blocks.max(axis=2), 0)
    scales = np.where(high > low, (high - low) / INT4_MAX, 1.0).astype(np.float32)
    zeros = np.clip(np.rint(-low / scales), 0, INT4_MAX)
    values = np.clip(np.rint(blocks / scales[..., None]) + zeros[..., None], 0, INT4_MAX).astype(np.uint8)
    return Int4Blocks(pack_nibbles(values), scales, pack_nibbles(zeros.astype(np.uint8)))


@dataclass(frozen=True, slots=True)
class Int4Symmetric:
    """weight.T ~ values * scales, blocks along the inputs.

    values uint8 [in * out / 2]: signed nibbles of [in, out], low nibble first
    scales float32 [in / block, out]
    """

    values: NDArray[np.uint8]
    scales: Float32Array
    block: int


def int4_symmetric(weight: Float32Array, block: int) -> Int4Symmetric:
    """Signed int4 without zero points, as TensorRT's importer wants it; `out` is even."""
    rows, columns = weight.shape
    values = np.empty((columns, rows), np.int8)
    scales = np.empty((columns // block, rows), np.float32)
    for part in row_chunks(weight):
        blocks = weight[part].reshape(-1, columns // block, block)
        factor = signed_scales(blocks)
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
