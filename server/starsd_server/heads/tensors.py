"""Files of tensors: what may stand in one, and how one is written so that nobody ever reads a part of it."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from starsd_edge.errors import BundleError

__all__ = [
    "INDEX_DTYPES",
    "WEIGHT_DTYPES",
    "check_finite",
    "check_regular",
    "is_finite",
    "read_tensors",
    "write_tensors",
]

WEIGHT_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
INDEX_DTYPES = (torch.int32, torch.int64)


def check_regular(file: Path) -> None:
    """Raises BundleError for a pipe or a device, whose reader might wait for ever. A missing one passes."""
    if file.exists() and not file.is_file():
        raise BundleError(f"{file}: not a regular file")


def check_finite(file: Path, tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Raises BundleError: weights of another kind than WEIGHT_DTYPES, or NaN or infinity among them."""
    for name, tensor in tensors:
        if tensor.dtype not in WEIGHT_DTYPES:
            raise BundleError(f"{file}: {name} is {_words([tensor.dtype])}, not {_words(WEIGHT_DTYPES)}")
        if not is_finite(tensor):
            raise BundleError(f"{file}: {name} holds NaN or infinity")


def is_finite(tensor: Tensor) -> bool:
    """The extremes tell, for NaN is passed on to them; they come at the speed of memory, without a copy."""
    return not tensor.numel() or all(math.isfinite(extreme.item()) for extreme in tensor.aminmax())


def _words(dtypes: Iterable[torch.dtype]) -> str:
    return ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)


def read_tensors(file: Path) -> dict[str, Tensor]:
    """All of a safetensors file, mapped. Raises BundleError."""
    check_regular(file)
    try:
        return load_file(file)
    except (
        OSError,
        SafetensorError,
        ValueError,
        KeyError,
    ) as error:  # the last two: a dtype it does not know
        raise BundleError(f"{file}: cannot be read as safetensors ({error})") from error


def write_tensors(tensors: dict[str, Tensor], file: Path) -> None:
    """A reader sees the old file or the new one, never a part, after a loss of power, too. Raises OSError."""
    partial = file.with_name(f"{file.name}.{os.getpid()}.partial")
    try:
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, partial, {"format": "pt"})
        with partial.open("rb+") as written:
            os.fsync(written.fileno())
        os.replace(partial, file)
    except SafetensorError as error:  # as it calls a full disk
        raise OSError(str(error)) from error
    finally:
        partial.unlink(missing_ok=True)
