"""Features on the wire: float16, bfloat16, or int8 in groups of 64.

Row by row, so that any run of rows can be cut out of a history and sent:

    FP16   F little-endian float16
    BF16   F little-endian bfloat16 (upper half of a float32, rounded to nearest even)
    INT8   F int8, then ceil(F / 64) little-endian float16 scales; element i is q[i] * scale[i // 64]

Per-row scales are wrong here: a few elements of a middle layer are thousands of times larger than the rest,
and one scale for all would round those to zero. float16 overflows on such layers of bfloat16 models; that is
refused, and BF16 is the way out.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from starsd_edge.errors import RemoteProtocolError
from starsd_edge.protocol.largest import largest
from starsd_edge.types import FeatureArray, Float32Array

__all__ = ["EncodedRows", "FeatureDtype", "decode_rows", "encode_rows", "row_bytes"]

GROUP = 64
SMALLEST_SCALE = np.float32(2.0**-24)  # the smallest float16 above zero
LARGEST_INT8 = np.float32(127.0)
HALF = np.dtype("<f2")
# Exponents of all ones. Read as signed numbers, positive values that are not finite reach the first; read as
# unsigned ones, negative values reach the second; and nothing else does.
INFINITY, MINUS_INFINITY = 0x7C00, 0xFC00


class FeatureDtype(IntEnum):
    """Closed list; the number is the byte in the header."""

    FP16 = 1
    BF16 = 2
    INT8 = 3

    @property
    def wire_name(self) -> str:
        """As users and greetings spell it."""
        return self.name.lower()


INT8 = FeatureDtype.INT8


def row_bytes(dtype: FeatureDtype, width: int) -> int:
    """Bytes of one encoded row of `width` elements."""
    if dtype is INT8:
        return width + 2 * num_groups(width)
    return 2 * width


def num_groups(width: int) -> int:
    return -(-width // GROUP)


class EncodedRows(Struct, frozen=True):
    """Rows as they travel: `data` is exactly `rows * row_bytes(dtype, width)` bytes."""

    dtype: FeatureDtype
    rows: int
    width: int
    data: bytes | bytearray | memoryview

    def __post_init__(self) -> None:
        dtype, width = self.dtype, self.width
        expected = self.rows * (row_bytes(dtype, width) if dtype is INT8 else 2 * width)
        if len(self.data) != expected:
            raise RemoteProtocolError(
                f"{self.rows} {dtype.wire_name} rows of {width} are {expected} bytes, not {len(self.data)}"
            )

    def decode(self) -> FeatureArray:
        """float16 (FP16) or float32 [rows, width]; see `decode_rows`."""
        return decode_rows(self)


def encode_rows(features: FeatureArray, dtype: FeatureDtype) -> EncodedRows:
    """Encode `features` [n, F], float16 or float32.

    What is float16 already and owns its memory is not copied, and must not change afterwards: a fresh copy of
    32 KiB costs a round more than the rest of its message.

    Raises ValueError when a value is NaN or infinite, or does not fit float16 where that is asked for.
    """
    n, width = features.shape
    if dtype is FeatureDtype.FP16:
        half = to_half(features)
        if not half_is_finite(half):
            raise ValueError(
                f"a feature is NaN, infinite or beyond float16 ({describe_range(features)}); use bf16"
            )
        return EncodedRows(dtype, n, width, half.reshape(-1).view(np.uint8).data)
    single = np.ascontiguousarray(features, np.float32)
    if not np.isfinite(single).all():
        raise ValueError("a feature is NaN or infinite")
    if dtype is FeatureDtype.BF16:
        return EncodedRows(dtype, n, width, to_bfloat16(single).tobytes())
    return EncodedRows(dtype, n, width, quantise(single))


def decode_rows(rows: EncodedRows) -> FeatureArray:
    """float16 (a view of the bytes for FP16) or float32 [rows, width].

    Raises RemoteProtocolError when a value is NaN or infinite: one such row would poison a draft KV cache.
    """
    n, width = rows.rows, rows.width
    single: Float32Array
    if rows.dtype is FeatureDtype.FP16:
        half: FeatureArray = np.frombuffer(rows.data, HALF).reshape(n, width)
        if not half_is_finite(half):
            raise RemoteProtocolError("a feature is NaN or infinite")
        return half
    if rows.dtype is FeatureDtype.BF16:
        bits = np.frombuffer(rows.data, np.dtype("<u2")).astype(np.uint32) << np.uint32(16)
        single = bits.view(np.float32).reshape(n, width)
    else:
        single = dequantise(rows)
    if not np.isfinite(single).all():
        raise RemoteProtocolError("a feature is NaN or infinite")
    return single


def to_half(features: FeatureArray) -> FeatureArray:
    if features.dtype == HALF:
        # A view is copied: it would keep alive, and share, rows that are not asked for.
        return np.ascontiguousarray(features) if features.base is None else features.copy()
    with np.errstate(over="ignore"):  # what overflows is found and refused
        return np.ascontiguousarray(features, HALF)


def half_is_finite(half: FeatureArray) -> bool:
    # Two maxima over the bits: ten times faster than isfinite on float16, and without a copy of the rows: its
    # fresh pages would cost more than everything else that is done to a message.
    return not half.size or (
        largest(half.view(np.int16)) < INFINITY and largest(half.view(np.uint16)) < MINUS_INFINITY
    )


def describe_range(features: FeatureArray) -> str:
    finite = features[np.isfinite(features)]
    return f"largest finite magnitude {np.abs(finite).max():.0f}" if finite.size else "no finite value"


def to_bfloat16(single: Float32Array) -> NDArray[np.uint16]:
    bits = single.view(np.uint32)
    rounded = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    halves: NDArray[np.uint16] = (rounded >> np.uint32(16)).astype(np.uint16)
    # The largest float32 values round up to infinity: keep the largest bfloat16 instead.
    overflowed = (halves & np.uint16(0x7F80)) == np.uint16(0x7F80)
    if overflowed.any():
        halves[overflowed] -= np.uint16(1)
    return halves


def quantise(single: Float32Array) -> bytes:
    n, width = single.shape
    groups = num_groups(width)
    padded = np.zeros((n, groups * GROUP), np.float32)
    padded[:, :width] = single
    grouped = padded.reshape(n, groups, GROUP)
    peaks = np.abs(grouped).max(axis=2)  # [n, groups]
    with np.errstate(over="ignore"):
        scales = np.maximum(peaks / LARGEST_INT8, SMALLEST_SCALE).astype(np.dtype("<f2"))
    if not half_is_finite(scales):
        raise ValueError(f"a feature of magnitude {peaks.max():.3g} is too large for int8; use bf16")
    # Divide by the scale as the other end will see it; it may have been rounded down, hence the clip.
    levels = np.rint(grouped / scales.astype(np.float32)[:, :, None])
    quantised = np.clip(levels, -LARGEST_INT8, LARGEST_INT8).astype(np.int8)
    out = np.empty((n, width + 2 * groups), np.uint8)
    out[:, :width] = quantised.reshape(n, groups * GROUP)[:, :width].view(np.uint8)
    out[:, width:] = scales.view(np.uint8).reshape(n, 2 * groups)
    return out.tobytes()


def dequantise(rows: EncodedRows) -> Float32Array:
    n, width = rows.rows, rows.width
    groups = num_groups(width)
    records = np.frombuffer(rows.data, np.uint8).reshape(n, width + 2 * groups)
    scales = np.ascontiguousarray(records[:, width:]).view(np.dtype("<f2")).astype(np.float32)
    spread = np.repeat(scales, GROUP, axis=1)[:, :width]  # [n, F]
    out: Float32Array = records[:, :width].view(np.int8).astype(np.float32) * spread
    return out
