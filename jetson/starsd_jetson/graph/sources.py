"""Where weights come from: a GGUF file or a Hugging Face folder, read one tensor at a time.

Both give the same thing: a ModelShape, and float32 tensors under Hugging Face's names and in its layout
(linear weights are [out, in], rotary halves are not interleaved).
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from starsd_edge.errors import BundleError
from starsd_edge.types import Float32Array
from starsd_jetson.graph.folder_source import FolderSource
from starsd_jetson.graph.gguf_source import GgufSource
from starsd_jetson.graph.shape import ModelShape

__all__ = ["WeightSource", "open_source"]


class WeightSource(Protocol):
    """A model's shape and its tensors."""

    @property
    def path(self) -> Path: ...

    @property
    def name(self) -> str: ...

    @property
    def shape(self) -> ModelShape: ...

    def has(self, name: str) -> bool: ...

    def check_whole(self) -> None:
        """Raises BundleError for a tensor that is not there; else that comes when its turn does, which for a
        large model is after minutes. (A draft head wants two of them only.)"""
        ...

    def tensor(self, name: str) -> Float32Array:
        """The tensor of this Hugging Face name, float32. Raises BundleError if there is none."""
        ...

    def sha256(self) -> str:
        """Hash over the files that hold weights: the identity of the model whatever it is exported to."""
        ...

    def tokenizer_sha256(self) -> str:
        """Hash over the file that holds the tokenizer, as it lies there: what is made of it for a bundle
        may change with the package that makes it. Raises BundleError if there is none."""
        ...


def open_source(path: Path, context: int | None = None) -> WeightSource:
    """A GGUF file or a Hugging Face folder, for `context` tokens where the model was made for more.

    Raises BundleError for anything else, naming what was found, UsageError for a context beyond the model's.
    """
    if path.is_dir():
        return FolderSource(path, context)
    if not path.exists():
        raise BundleError(f"{path}: no such file or folder; give a GGUF file or a Hugging Face folder")
    if not path.is_file():
        raise BundleError(f"{path}: not a regular file")
    with path.open("rb") as file:
        magic = file.read(4)
    if magic != b"GGUF":
        raise BundleError(
            f"{path}: neither a GGUF file nor a folder with config.json (it starts with {magic!r})"
        )
    return GgufSource(path, context)
