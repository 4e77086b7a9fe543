"""What a draft head borrows from its target: the token embedding and rows of the LM head, never the body."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from starsd_edge.bundle import MANIFEST_NAME, Bundle
from starsd_edge.errors import BundleError
from starsd_edge.types import Float32Array

__all__ = ["TargetRows", "open_source", "open_target_rows"]


class TargetRows(Protocol):
    """The two matrices of a target, and what it is."""

    @property
    def name(self) -> str: ...

    @property
    def hash(self) -> str:
        """sha256 over the target's weights before quantisation."""
        ...

    @property
    def tokenizer_hash(self) -> str:
        """sha256 of the file that holds the tokenizer. Raises BundleError where there is none."""
        ...

    def embedding(self) -> Float32Array:
        """[V, H], the caller's to change"""
        ...

    def lm_head(self, tokens: NDArray[np.int64]) -> Float32Array:
        """[n, H], the rows of these tokens."""
        ...


def open_target_rows(target: Path) -> TargetRows:
    """A bundle, a GGUF file or a Hugging Face folder. Raises BundleError for anything else."""
    if (target / MANIFEST_NAME).is_file():
        return _BundleRows(Bundle.open(target))
    return _SourceRows(open_source(target))


def open_source(target: Path) -> Any:
    """The reader of GGUF files and Hugging Face folders that `starsd export` uses. It needs only numpy and is
    part of every installation, but belongs to another product, hence by name."""
    return importlib.import_module("starsd_jetson.graph.sources").open_source(target)


class _BundleRows:
    def __init__(self, bundle: Bundle) -> None:
        self._bundle = bundle
        identity = bundle.manifest.identity
        self.name, self.hash, self.tokenizer_hash = (
            identity.name,
            identity.source_sha256,
            identity.tokenizer_sha256,
        )

    def embedding(self) -> Float32Array:
        return np.array(self._bundle.embedding())  # a view of the file until here

    def lm_head(self, tokens: NDArray[np.int64]) -> Float32Array:
        return np.array(self._bundle.lm_head(tokens))


class _SourceRows:
    def __init__(self, source: Any) -> None:
        self._source = source
        self.name: str = source.name
        self.hash: str = source.sha256()

    @property
    def tokenizer_hash(self) -> str:
        return str(self._source.tokenizer_sha256())

    def embedding(self) -> Float32Array:
        # a file's float32 rows come as a view of it
        return np.require(self._source.tensor("model.embed_tokens.weight"), np.float32, ["C", "W"])

    def lm_head(self, tokens: NDArray[np.int64]) -> Float32Array:
        name = "lm_head.weight"
        if self._source.shape.tied_embedding or not self._source.has(name):
            name = "model.embed_tokens.weight"
        weight = self._source.tensor(name)
        if tokens.max(initial=0) >= len(weight):
            raise BundleError(
                f"{self._source.path}: {name} has {len(weight)} rows, token {tokens.max()} is wanted"
            )
        return np.ascontiguousarray(weight[tokens], np.float32)
