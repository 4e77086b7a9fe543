"""What a GGUF file and a folder have in common as sources of weights: nothing of them is believed unseen."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path

from starsd_edge.errors import BundleError, UsageError
from starsd_edge.types import Float32Array
from starsd_jetson.graph.plausible import check_shape, check_tensor, tensor_names
from starsd_jetson.graph.shape import ModelShape

__all__ = ["UNUSABLE", "CheckedSource", "hash_files", "reason", "shortened"]

# What reading numbers from a damaged or odd file ends in.
UNUSABLE = (KeyError, TypeError, ValueError, ZeroDivisionError, OverflowError, AttributeError, IndexError)
READ_BLOCK_BYTES = 1 << 22  # large enough that hashing is bound by the disk


class CheckedSource:
    """A kind of source adds `has` and `read`."""

    path: Path
    shape: ModelShape

    def has(self, name: str) -> bool:
        raise NotImplementedError

    def read(self, name: str) -> Float32Array:
        raise NotImplementedError

    def tensor(self, name: str) -> Float32Array:
        try:
            values = self.read(name)
        except ValueError as error:  # rows that do not divide among the heads
            raise BundleError(f"{self.path}: tensor {name} does not fit the model ({error})") from error
        check_tensor(name, values, self.shape, self.path)
        return values

    def check(self) -> None:
        """Raises BundleError."""
        check_shape(self.shape, self.path)
        if self.has(f"model.layers.{self.shape.num_layers}.input_layernorm.weight"):
            raise BundleError(f"{self.path}: it holds more layers than the {self.shape.num_layers} it says")

    def check_whole(self) -> None:
        missing = [name for name in tensor_names(self.shape) if not self.has(name)]
        if missing:
            more = f", and {len(missing) - 1} more" if len(missing) > 1 else ""
            raise BundleError(f"{self.path}: tensor {missing[0]} is missing{more}; fetch it again")


def shortened(shape: ModelShape, context: int | None, path: Path) -> ModelShape:
    if context is None:
        return shape
    if context > shape.max_len:
        raise UsageError(f"{path} was made for {shape.max_len} tokens of context, not for {context}")
    return replace(shape, max_len=context)


def reason(error: Exception) -> str:
    return f"no {error}" if isinstance(error, KeyError) else str(error)


def hash_files(paths: list[Path]) -> str:
    digest = hashlib.sha256()
    for path in paths:
        with path.open("rb") as file:
            while block := file.read(READ_BLOCK_BYTES):
                digest.update(block)
    return digest.hexdigest()
