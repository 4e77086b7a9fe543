"""Packers of GGUF's K-quants: the `gguf` package reads them but does not write them.

Plain rounding, no search; layouts as ggml-common.h declares them (block_q4_K, block_q5_K, block_q6_K).
"""

from __future__ import annotations

from collections.abc import Callable

import gguf
import numpy as np

__all__ = ["K_QUANTS"]

BLOCK = 256  # weights that share one or two half-precision factors
HALF = np.dtype("<f2")
TINY = 1e-12


def q4_k(weight: np.ndarray) -> np.ndarray:
    """d, dmin, twelve bytes of 6-bit scales and minima of eight groups, 128 bytes of nibbles."""
    head, codes = affine_groups(weight, 15)
    pairs = codes.reshape(-1, 4, 2, 32)  # 64 weights share 32 bytes: the first half in the low nibbles
    nibbles = pairs[:, :, 0] | pairs[:, :, 1] << 4
    return rows_of(weight, head, nibbles)


def q5_k(weight: np.ndarray) -> np.ndarray:
    """As Q4_K, with 32 bytes between that hold the fifth bits: bit g of byte i belongs to group g."""
    head, codes = affine_groups(weight, 31)
    bits = (codes >> 4) << np.arange(8, dtype=np.uint8)[None, :, None]
    fifth = np.bitwise_or.reduce(bits, axis=1)
    pairs = (codes & 15).reshape(-1, 4, 2, 32)
    return rows_of(weight, head, fifth, pairs[:, :, 0] | pairs[:, :, 1] << 4)


def q6_k(weight: np.ndarray) -> np.ndarray:
    """128 bytes of low nibbles, 64 of upper bit pairs, sixteen int8 scales, d."""
    groups = weight.reshape(-1, 16, 16)
    wanted = np.abs(groups).max(axis=2) / 31
    d = (wanted.max(axis=1) / 127 + TINY).astype(HALF)
    scales = np.rint(wanted / d.astype(np.float32)[:, None]).astype(np.int8)
    step = d.astype(np.float32)[:, None] * scales + TINY
    codes = np.clip(np.rint(groups / step[..., None]) + 32, 0, 63).astype(np.uint8)
    # Two halves of 128; in each, weights l, l + 32, l + 64 and l + 96 share bytes.
    quarters = codes.reshape(-1, 2, 4, 32)
    low = quarters & 15
    nibbles = np.stack([low[:, :, 0] | low[:, :, 2] << 4, low[:, :, 1] | low[:, :, 3] << 4], axis=2)
    high = np.bitwise_or.reduce((quarters >> 4) << (2 * np.arange(4, dtype=np.uint8))[:, None], axis=2)
    return rows_of(weight, nibbles, high, scales, d)


def affine_groups(weight: np.ndarray, largest: int) -> tuple[np.ndarray, np.ndarray]:
    """(d, dmin and packed group factors uint8 [blocks, 16], codes uint8 [blocks, 8, 32])."""
    groups = weight.reshape(-1, 8, 32)
    low = np.minimum(groups.min(axis=2), 0)
    scale, depth = (groups.max(axis=2) - low) / largest, -low
    d = (scale.max(axis=1) / 63 + TINY).astype(HALF)
    dmin = (depth.max(axis=1) / 63 + TINY).astype(HALF)
    scales = np.rint(scale / d.astype(np.float32)[:, None]).astype(np.uint8)
    depths = np.rint(depth / dmin.astype(np.float32)[:, None]).astype(np.uint8)
    step = d.astype(np.float32)[:, None] * scales + TINY
    start = dmin.astype(np.float32)[:, None] * depths
    codes = np.clip(np.rint((groups + start[..., None]) / step[..., None]), 0, largest).astype(np.uint8)
    factors = np.stack([d, dmin], axis=1).view(np.uint8)
    return np.concatenate([factors, pack_sixes(scales, depths)], axis=1), codes


def pack_sixes(scales: np.ndarray, depths: np.ndarray) -> np.ndarray:
    """Eight and eight 6-bit numbers in twelve bytes: groups 4 to 7 put their upper bits above 0 to 3's."""
    first = scales[:, :4] | (scales[:, 4:] >> 4) << 6
    second = depths[:, :4] | (depths[:, 4:] >> 4) << 6
    third = (scales[:, 4:] & 15) | (depths[:, 4:] & 15) << 4
    return np.concatenate([first, second, third], axis=1)


def rows_of(weight: np.ndarray, *parts: np.ndarray) -> np.ndarray:
    """The parts of each block side by side, the blocks of each row of the weight in a row: uint8."""
    blocks = weight.size // BLOCK
    flat = [np.ascontiguousarray(part).reshape(blocks, -1).view(np.uint8) for part in parts]
    return np.concatenate(flat, axis=1).reshape(weight.shape[0], -1)


Kind = gguf.GGMLQuantizationType
K_QUANTS: dict[Kind, Callable[[np.ndarray], np.ndarray]] = {Kind.Q4_K: q4_k, Kind.Q5_K: q5_k, Kind.Q6_K: q6_k}
