"""What every target runtime does alike: check, chunk the prompt, count the rows of its cache."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection
from typing import Any, ClassVar, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from starsd_edge.bundle import Bundle
from starsd_edge.decoding.roles import TargetOutput, TargetSpec
from starsd_edge.decoding.tree import DraftTree
from starsd_edge.errors import BundleError, UsageError
from starsd_edge.types import BoolArray, TokenArray
from starsd_jetson.self_test import run_self_test

__all__ = ["MAX_TREE_SIZE", "ContextTarget", "RowCache", "granted_len"]

LOAD_TEST_TOKENS = 3  # of the self-test at every load; 'starsd bundle verify' runs all of it
MAX_TREE_SIZE = 64  # nodes; larger trees pay nowhere that we know (facts: 60 on an accelerator)

AnyTarget = TypeVar("AnyTarget", bound="ContextTarget")


def granted_len(bundle: Bundle, max_len: int | None) -> int:
    """Tokens of context where `max_len` are granted; None: as many as the bundle was made for."""
    longest = bundle.manifest.max_len
    return longest if max_len is None else min(longest, max_len)


class RowCache(Protocol):
    """Keys and values of one context: `length` committed rows, and those of the last pass behind them.

    moved_bytes  rows of kept paths that were moved up, in all
    grown_bytes  rows that were copied into larger buffers, in all
    """

    length: int
    moved_bytes: int

    @property
    def grown_bytes(self) -> int: ...

    def reserve(self, rows: int) -> bool: ...
    def keep(self, path: list[int]) -> None: ...
    def truncate(self, length: int) -> None: ...


class ContextTarget(ABC):
    """A roles.Target; a runtime adds `open` and `run`, and may lower `max_tree_size`."""

    flavour: ClassVar[str]  # of the bundles it runs
    uses_threads: ClassVar[bool] = True  # of a CPU, as many as it is told
    prefill_chunk: ClassVar[int] = 128  # rows a pass: bound by arithmetic, yet few enough to stay in cache

    def __init__(self, spec: TargetSpec, cache: RowCache) -> None:
        self.spec = spec
        self.rows = cache
        self.pending = 0  # rows of the last forward, waiting for keep

    @classmethod
    def load(
        cls: type[AnyTarget], bundle: Bundle, threads: int | None = None, max_len: int | None = None
    ) -> AnyTarget:
        """The bundle's target, proven by the first tokens of its self-test.

        threads  None: the runtime decides
        max_len  tokens of context, no more than the bundle's; None: the bundle's

        Raises BundleError for a bundle of another flavour, a graph that does not load, or one that says
        something else than its self-test."""
        if bundle.manifest.flavour != cls.flavour:
            raise BundleError(f"{bundle.path}: made for {bundle.manifest.flavour}, not for {cls.flavour}")
        target = cls.open(bundle, threads, max_len)
        run_self_test(target, bundle.manifest.self_test, LOAD_TEST_TOKENS)
        return target

    @classmethod
    @abstractmethod
    def open(cls: type[AnyTarget], bundle: Bundle, threads: int | None, max_len: int | None) -> AnyTarget:
        """The target as `load` gives it, before it was tested."""

    @classmethod
    def files_read(cls, bundle: Bundle) -> Collection[str]:
        """Those of the bundle that loading it reads: whole they must be."""
        return bundle.manifest.files

    def device_bytes(self) -> int:
        """Memory of a GPU that it takes beside the process's own; 0 without one."""
        return 0

    @abstractmethod
    def run(
        self, tokens: TokenArray, positions: NDArray[Any], mask: BoolArray, logit_rows: NDArray[np.int64]
    ) -> TargetOutput:
        """One pass over n rows behind the committed ones; mask bool [n, n], logits of `logit_rows` only. The
        arrays returned are the caller's."""

    @property
    def kv_len(self) -> int:
        return self.rows.length

    def forward(self, tree: DraftTree) -> TargetOutput:
        size, start = len(tree), self.rows.length
        if tree.base_len - 1 != start:
            raise UsageError(
                f"the tree continues {tree.base_len} tokens, the cache holds {start} and the root"
            )
        if size > MAX_TREE_SIZE or start + size > self.spec.max_len:
            raise UsageError(f"{size} nodes are more than the {self.max_tree_size()} that fit here")
        out = self.run(tree.tokens, tree.positions, tree.mask, np.arange(size))
        self.pending = size
        return out

    def prefill(self, tokens: TokenArray) -> TargetOutput:
        start = self.rows.length
        if len(tokens) == 0 or start + len(tokens) > self.spec.max_len:
            raise UsageError(f"{len(tokens)} tokens do not fit: {start} of {self.spec.max_len} are taken")
        self.rows.reserve(start + len(tokens))
        features = []
        for begin in range(0, len(tokens), self.prefill_chunk):
            chunk = tokens[begin : begin + self.prefill_chunk]
            count, first = len(chunk), start + begin
            positions = np.arange(first, first + count)
            out = self.run(chunk, positions, np.tri(count, dtype=np.bool_), np.array([count - 1]))
            features.append(out.features)
            self.rows.length += count
        self.pending = 0
        return TargetOutput(out.logits, np.concatenate(features))

    def keep(self, path: list[int]) -> None:
        if not path or path[0] != 0 or path[-1] >= self.pending:
            raise UsageError(
                f"path {path} is not one of the last forward's {self.pending} nodes from its root"
            )
        self.rows.keep(path)
        self.pending = 0

    def truncate(self, kv_len: int) -> None:
        self.rows.truncate(kv_len)
        self.pending = 0

    def max_tree_size(self) -> int:
        return min(MAX_TREE_SIZE, self.spec.max_len - self.rows.length)
