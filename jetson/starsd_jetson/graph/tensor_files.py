"""Files of named tensors: safetensors, and PyTorch's own through torch."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from starsd_edge.errors import BundleError, MissingDependencyError
from starsd_edge.types import Float32Array
from starsd_jetson.graph.checked_source import UNUSABLE, reason

__all__ = ["open_safetensors", "open_torch_bin"]

SAFETENSORS_DTYPES: dict[str, np.dtype[Any]] = {
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype("<u2"),
}


def open_safetensors(path: Path) -> dict[str, Callable[[], Float32Array]]:
    """Readers of the tensors of one file; each reads its own bytes when called. The format is 8 bytes of
    header length, a JSON header and raw little-endian data (read here because bfloat16 has no numpy type)."""
    try:
        return _open_safetensors(path)
    except OSError as error:
        raise BundleError(f"{path}: cannot be read ({error.strerror}); fetch it again") from error
    except (*UNUSABLE, RecursionError) as error:
        raise BundleError(f"{path}: damaged safetensors header ({reason(error)})") from error


def _open_safetensors(path: Path) -> dict[str, Callable[[], Float32Array]]:
    size = path.stat().st_size
    if not path.is_file():  # a pipe would keep its reader waiting for ever
        raise BundleError(f"{path}: not a regular file")
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > size - 8:
            raise BundleError(f"{path}: cut short or not a safetensors file; fetch it again")
        header = json.loads(file.read(length))
    header.pop("__metadata__", None)
    start = 8 + length
    readers: dict[str, Callable[[], Float32Array]] = {}
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        shape = tuple(entry["shape"])
        dtype = SAFETENSORS_DTYPES.get(entry["dtype"])
        if start + end > size:
            raise BundleError(f"{path}: cut short, {size} of {start + end} bytes; fetch it again")
        if dtype is None:
            # integer buffers such as position_ids; a weight that is missed here is named when asked for
            continue
        if math.prod(shape) * dtype.itemsize != end - begin:
            raise BundleError(f"{path}: {name} has {end - begin} bytes for shape {shape}")
        readers[name] = safetensors_reader(path, start + begin, shape, dtype)
    return readers


def safetensors_reader(
    path: Path, offset: int, shape: tuple[int, ...], dtype: np.dtype[Any]
) -> Callable[[], Float32Array]:
    def read() -> Float32Array:
        values = np.fromfile(path, dtype, math.prod(shape), offset=offset).reshape(shape)
        if dtype == np.dtype("<u2"):
            return widen_bfloat16(values)
        return values.astype(np.float32)

    return read


def widen_bfloat16(bits: np.ndarray[Any, np.dtype[np.uint16]]) -> Float32Array:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def open_torch_bin(path: Path) -> dict[str, Callable[[], Float32Array]]:
    try:
        import torch
    except ImportError as error:
        raise MissingDependencyError(
            f"{path} is a PyTorch file: install torch to read it, or convert the folder to safetensors"
        ) from error
    try:
        tensors = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except Exception as error:  # torch raises a different class for every way a file can be damaged
        raise BundleError(f"{path}: torch cannot read it with weights_only ({error})") from error
    return {name: torch_reader(value) for name, value in tensors.items()}


def torch_reader(value: Any) -> Callable[[], Float32Array]:
    return lambda: np.asarray(value.float().numpy(), np.float32)
