"""The target on ONNX Runtime: one forward over a tree, its KV cache in place.

A pass binds preallocated arrays once per number of rows and cache capacity; after that a step only fills
tokens, positions, slots and mask, and runs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from starsd_edge.bundle import Bundle
from starsd_edge.decoding.roles import Invariance, TargetOutput, TargetSpec
from starsd_edge.types import BoolArray, Float32Array, TokenArray
from starsd_jetson.calibrate import measure_invariance
from starsd_jetson.context import ContextTarget, granted_len
from starsd_jetson.kv_cache import KV_BLOCK, KvCache
from starsd_jetson.onnx_session import open_session, share

__all__ = ["EXACT_BY_CONSTRUCTION", "OnnxTarget"]

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


class OnnxTarget(ContextTarget):
    """A roles.Target over one context of one bundle."""

    flavour = "onnxruntime"

    def __init__(self, bundle: Bundle, session: Any, max_len: int | None = None) -> None:
        manifest = bundle.manifest
        shapes = manifest.shapes
        self.bundle = bundle
        self.session = session
        self.shapes = shapes
        self.group = shapes.num_heads // shapes.num_kv_heads
        self.passes: dict[tuple[int, int], Pass] = {}
        self.cache = KvCache(shapes.num_layers, shapes.num_kv_heads, shapes.head_dim, self.passes.clear)
        length = granted_len(bundle, max_len)
        spec = TargetSpec(shapes.vocab_size, shapes.feature_size, length, Invariance(bitwise=True))
        super().__init__(spec, self.cache)
        if manifest.quantisation not in EXACT_BY_CONSTRUCTION:
            self.spec = replace(self.spec, invariance=measure_invariance(self))

    @classmethod
    def open(cls, bundle: Bundle, threads: int | None, max_len: int | None) -> OnnxTarget:
        return cls(bundle, open_session(bundle.graph_path, threads), max_len)

    def run(
        self, tokens: TokenArray, positions: NDArray[Any], mask: BoolArray, logit_rows: NDArray[np.int64]
    ) -> TargetOutput:
        step = self.prepare(len(tokens), len(logit_rows))
        step.logit_rows[:] = logit_rows
        self.fill(step, tokens, positions, mask)
        self.session.run_with_iobinding(step.binding)
        return TargetOutput(step.logits.copy(), step.features.copy())

    def max_tree_size(self) -> int:
        """A path that straddles an edge of attention's summing blocks in a tree, but not in a chain, would be
        summed differently: the tree ends at the block it begins in."""
        to_edge = KV_BLOCK - self.cache.length % KV_BLOCK
        return min(super().max_tree_size(), to_edge)

    def prepare(self, rows: int, logit_rows: int) -> Pass:
        self.cache.reserve(self.cache.length + rows)
        step = self.passes.get((rows, logit_rows))
        if step is None:
            if len(self.passes) >= MAX_PASSES:
                self.passes.pop(next(iter(self.passes)))
            step = self.passes[rows, logit_rows] = self.bind(rows, logit_rows)
        return step

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
# MatMulNBits chooses its kernel by the number of rows and sums floats: one row as several in blocks of 32
# (int4-exact), otherwise in the larger ones of int4. Which it is on this CPU is measured at load.
EXACT_BY_CONSTRUCTION = ("fp32", "fp16", "int8")
