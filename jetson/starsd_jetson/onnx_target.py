"""The target on ONNX Runtime: one forward over a tree, its KV cache in place.

A pass binds preallocated arrays once per number of rows and cache capacity; after that a step only fills
tokens, positions, slots and mask, and runs.
"""

from __future__ import annotations

import importlib.metadata
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from starsd_edge.bundle import Bundle
from starsd_edge.decoding.roles import Invariance, TargetOutput, TargetSpec
from starsd_edge.decoding.tree import DraftTree
from starsd_edge.errors import BundleError, MissingDependencyError, UsageError
from starsd_edge.types import BoolArray, Float32Array, TokenArray
from starsd_jetson.calibrate import measure_invariance
from starsd_jetson.kv_cache import KV_BLOCK, KvCache
from starsd_jetson.self_test import run_self_test

__all__ = ["OnnxTarget"]

MAX_TREE_SIZE = 64  # nodes; larger trees pay nowhere that we know (facts: 60 on an accelerator)
PREFILL_CHUNK = 128  # rows a pass: enough to be bound by arithmetic, few enough to stay in cache
LOAD_TEST_TOKENS = 3  # of the self-test at every load; 'starsd bundle verify' runs all of it
MAX_PASSES = 16  # bindings kept; a session uses few tree sizes


@dataclass(frozen=True, slots=True)
class Pass:
    """Bound arrays of a forward over n rows that asks for m rows of logits."""

    binding: Any
    tokens: NDArray[np.int64]  # [n]
    positions: NDArray[np.int64]  # [n_kv, n]
    slots: NDArray[np.int64]  # [n_kv, n, 2]
    mask: Float32Array  # [queries, C]
    logit_rows: NDArray[np.int64]  # [m]
    logits: Float32Array  # [m, V]
    features: Float32Array  # [n, F]


class OnnxTarget:
    """A roles.Target over one context of one bundle."""

    def __init__(self, bundle: Bundle, session: Any) -> None:
        manifest = bundle.manifest
        shapes = manifest.shapes
        self.bundle = bundle
        self.session = session
        self.shapes = shapes
        self.group = shapes.num_heads // shapes.num_kv_heads
        self.spec = TargetSpec(
            vocab_size=shapes.vocab_size,
            feature_size=shapes.feature_size,
            max_len=manifest.max_len,
            invariance=Invariance(bitwise=True),
        )
        self.cache = KvCache(shapes.num_layers, shapes.num_kv_heads, shapes.head_dim)
        self.passes: dict[tuple[int, int], Pass] = {}
        self.pending = 0  # rows of the last forward, waiting for keep
        if manifest.quantisation not in EXACT_BY_CONSTRUCTION:
            self.spec = replace(self.spec, invariance=measure_invariance(self))

    @classmethod
    def load(cls, bundle: Bundle, threads: int | None = None) -> OnnxTarget:
        """Raises BundleError for a bundle of another flavour, a graph that does not load, or one that says
        something else than its self-test."""
        if bundle.manifest.flavour != "onnxruntime":
            raise BundleError(f"{bundle.path}: made for {bundle.manifest.flavour}, not for onnxruntime")
        target = cls(bundle, open_session(bundle.graph_path, threads))
        run_self_test(target, bundle.manifest.self_test, LOAD_TEST_TOKENS)
        return target

    @property
    def kv_len(self) -> int:
        return self.cache.length

    def forward(self, tree: DraftTree) -> TargetOutput:
        size, start = len(tree), self.cache.length
        if tree.base_len - 1 != start:
            raise UsageError(
                f"the tree continues {tree.base_len} tokens, the cache holds {start} and the root"
            )
        if size > MAX_TREE_SIZE or start + size > self.spec.max_len:
            raise UsageError(f"{size} nodes are more than the {self.max_tree_size()} that fit here")
        step = self.prepare(size, size)
        step.logit_rows[:] = np.arange(size)
        self.fill(step, tree.tokens, tree.positions, tree.mask)
        self.session.run_with_iobinding(step.binding)
        self.pending = size
        return TargetOutput(step.logits.copy(), step.features.copy())

    def prefill(self, tokens: TokenArray) -> TargetOutput:
        start = self.cache.length
        if len(tokens) == 0 or start + len(tokens) > self.spec.max_len:
            raise UsageError(f"{len(tokens)} tokens do not fit: {start} of {self.spec.max_len} are taken")
        features = np.empty((len(tokens), self.spec.feature_size), np.float32)
        self.reserve(start + len(tokens))
        for begin in range(0, len(tokens), PREFILL_CHUNK):
            chunk = tokens[begin : begin + PREFILL_CHUNK]
            step = self.prepare(len(chunk), 1)
            step.logit_rows[:] = len(chunk) - 1
            positions = np.arange(start + begin, start + begin + len(chunk))
            self.fill(step, chunk, positions, np.tri(len(chunk), dtype=np.bool_))
            self.session.run_with_iobinding(step.binding)
            features[begin : begin + len(chunk)] = step.features
            self.cache.length += len(chunk)
        self.pending = 0
        return TargetOutput(step.logits.copy(), features)

    def keep(self, path: list[int]) -> None:
        if not path or path[0] != 0 or path[-1] >= self.pending:
            raise UsageError(
                f"path {path} is not one of the last forward's {self.pending} nodes from its root"
            )
        self.cache.keep(path)
        self.pending = 0

    def truncate(self, kv_len: int) -> None:
        self.cache.truncate(kv_len)
        self.pending = 0

    def max_tree_size(self) -> int:
        """A path that straddles an edge of attention's summing blocks in a tree, but not in a chain, would be
        summed differently: the tree ends at the block it begins in."""
        to_edge = KV_BLOCK - self.cache.length % KV_BLOCK
        return min(MAX_TREE_SIZE, to_edge, self.spec.max_len - self.cache.length)

    def prepare(self, rows: int, logit_rows: int) -> Pass:
        self.reserve(self.cache.length + rows)
        step = self.passes.get((rows, logit_rows))
        if step is None:
            if len(self.passes) >= MAX_PASSES:
                self.passes.pop(next(iter(self.passes)))
            step = self.passes[rows, logit_rows] = self.bind(rows, logit_rows)
        return step

    def reserve(self, rows: int) -> None:
        if self.cache.reserve(rows):
            self.passes.clear()  # they bind the old buffers

    def bind(self, rows: int, logit_rows: int) -> Pass:
        heads = self.shapes.num_kv_heads
        queries = rows * self.group + (self.group == 1)
        step = Pass(
            binding=self.session.io_binding(),
            tokens=np.zeros(rows, np.int64),
            positions=np.zeros((heads, rows), np.int64),
            slots=np.zeros((heads, rows, 2), np.int64),
            mask=np.zeros((queries, self.cache.capacity), np.float32),
            logit_rows=np.zeros(logit_rows, np.int64),
            logits=np.empty((logit_rows, self.shapes.vocab_size), np.float32),
            features=np.empty((rows, self.shapes.feature_size), np.float32),
        )
        step.slots[:, :, 0] = np.arange(heads)[:, None]
        for name in ("tokens", "positions", "slots", "mask", "logit_rows"):
            step.binding.bind_ortvalue_input(name, share(getattr(step, name)))
        for name in ("logits", "features"):
            step.binding.bind_ortvalue_output(name, share(getattr(step, name)))
        for name, buffer in self.cache.buffers.items():
            value = share(buffer)
            step.binding.bind_ortvalue_input(name, value)
            step.binding.bind_ortvalue_output(f"{name}.new", value)
        return step

    def fill(self, step: Pass, tokens: TokenArray, positions: NDArray[Any], mask: BoolArray) -> None:
        start, rows = self.cache.length, len(tokens)
        step.tokens[:] = tokens
        step.positions[:] = positions
        step.slots[:, :, 1] = np.arange(start, start + rows)
        step.mask[:, :start] = 0.0
        step.mask[:, start:] = -np.inf
        own = np.where(mask, np.float32(0), np.float32(-np.inf))
        step.mask[: rows * self.group, start : start + rows] = np.repeat(own, self.group, axis=0)


# fp32 and int8 are exact by construction (graph/ops.py, graph/attention.py) and tests hold it, bit for bit.
# MatMulNBits (int4) chooses its kernel by the number of rows and sums floats, on some machines differently
# for one row: measured at load.
EXACT_BY_CONSTRUCTION = ("fp32", "fp16", "int8")


def share(array: NDArray[Any]) -> Any:
    """The array as ONNX Runtime's value, over the same memory."""
    import onnxruntime

    return onnxruntime.OrtValue.ortvalue_from_numpy(array)


def open_session(graph: Path, threads: int | None) -> Any:
    ort = import_onnxruntime()
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads or 0
    options.inter_op_num_threads = 1
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 3
    # A masked key's weight is exp(-inf), which the vector kernel gives as the smallest denormal: zero is
    # meant, and arithmetic with denormals is a hundred times slower.
    options.add_session_config_entry("session.set_denormal_as_zero", "1")
    try:
        return ort.InferenceSession(str(graph), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # its exceptions share no public base class
        raise BundleError(
            f"{graph}: ONNX Runtime {ort.__version__} cannot load it: {first_line(error)}"
        ) from error


def first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or ["no reason given"])[0]


def import_onnxruntime() -> Any:
    """Raises MissingDependencyError when it is missing, or installed twice: both wheels unpack into one
    folder.
    """
    installed = [name for name in ("onnxruntime", "onnxruntime-gpu") if is_installed(name)]
    if len(installed) > 1:
        raise MissingDependencyError(
            "onnxruntime and onnxruntime-gpu are both installed and overwrite each other; "
            "uninstall both, then install one: pip install 'starsd-edge[onnx]' or 'starsd-edge[gpu]'"
        )
    try:
        import onnxruntime
    except ImportError as error:
        raise MissingDependencyError(
            f"onnxruntime does not load ({first_line(error)}); pip install 'starsd-edge[onnx]'"
        ) from error
    return onnxruntime


def is_installed(distribution: str) -> bool:
    try:
        importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True
