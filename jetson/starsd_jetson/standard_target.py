"""The tensorrt flavour on ONNX Runtime: where TensorRT is not installed, and to try a bundle out at export.

Past rows are views of the front of preallocated buffers, and the graph writes new rows behind them: nothing
is copied but the rows of a kept path.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from starsd_edge.bundle import Bundle, Shapes
from starsd_edge.decoding.roles import Invariance, TargetOutput, TargetSpec
from starsd_edge.types import BoolArray, TokenArray
from starsd_jetson.calibrate import measure_invariance
from starsd_jetson.context import ContextTarget, granted_len
from starsd_jetson.device_cache import cache_names, value_type
from starsd_jetson.onnx_session import open_session, share

__all__ = ["FrontCache", "StandardTarget", "graph_inputs", "graph_outputs"]


class FrontCache:
    """Keys and values [max_len, n_kv, dim] of every layer; the first `length` rows are committed.

    moved_bytes  rows of kept paths that were moved up, in all
    """

    grown_bytes = 0  # it never grows: all of it is there from the beginning

    def __init__(self, num_layers: int, max_len: int, num_kv_heads: int, head_dim: int, dtype: Any) -> None:
        names = cache_names(num_layers)
        # Pages that no row was written to take no memory.
        self.buffers = {name: np.zeros((max_len, num_kv_heads, head_dim), dtype) for name in names}
        self.length = 0
        self.moved_bytes = 0

    def reserve(self, rows: int) -> bool:
        return False  # all of it is there

    def keep(self, path: list[int]) -> None:
        source = [self.length + node for node in path]
        if source != list(range(self.length, self.length + len(path))):
            for buffer in self.buffers.values():
                buffer[self.length : self.length + len(path)] = buffer[source]
                self.moved_bytes += buffer[source].nbytes
        self.length += len(path)

    def truncate(self, length: int) -> None:
        self.length = min(self.length, length)


class StandardTarget(ContextTarget):
    """A roles.Target over one context of one bundle of flavour tensorrt."""

    flavour = "tensorrt"

    def __init__(self, bundle: Bundle, session: Any, max_len: int | None = None) -> None:
        manifest, shapes = bundle.manifest, bundle.manifest.shapes
        self.bundle = bundle
        self.session = session
        self.dtype = value_type(manifest)
        length = granted_len(bundle, max_len)
        self.cache = FrontCache(shapes.num_layers, length, shapes.num_kv_heads, shapes.head_dim, self.dtype)
        spec = TargetSpec(shapes.vocab_size, shapes.feature_size, length, Invariance(bitwise=False))
        super().__init__(spec, self.cache)
        self.spec = replace(self.spec, invariance=measure_invariance(self))

    @classmethod
    def open(cls, bundle: Bundle, threads: int | None, max_len: int | None) -> StandardTarget:
        return cls(bundle, open_session(bundle.graph_path, threads), max_len)

    def run(
        self, tokens: TokenArray, positions: NDArray[Any], mask: BoolArray, logit_rows: NDArray[np.int64]
    ) -> TargetOutput:
        start, rows = self.cache.length, len(tokens)
        inputs = graph_inputs(tokens, positions, mask, logit_rows, start, self.dtype)
        outputs = graph_outputs(rows, len(logit_rows), self.bundle.manifest.shapes, self.dtype)
        for name, buffer in self.cache.buffers.items():
            inputs[name] = buffer[:start]
            outputs[f"{name}.new"] = buffer[start : start + rows]
        binding = self.session.io_binding()
        for name, array in inputs.items():
            binding.bind_ortvalue_input(name, share(array))
        for name, array in outputs.items():
            binding.bind_ortvalue_output(name, share(array))
        self.session.run_with_iobinding(binding)
        return TargetOutput(outputs["logits"], outputs["features"])


def graph_inputs(
    tokens: TokenArray,
    positions: NDArray[Any],
    mask: BoolArray,
    logit_rows: NDArray[np.int64],
    past: int,
    dtype: np.dtype[Any],
) -> dict[str, NDArray[Any]]:
    """What the standard graph reads besides the cache, of which `past` rows are given, by name."""
    lowest = np.finfo(dtype).min  # not -inf: a float16 softmax, TensorRT's among them, makes NaN of it
    return {
        "tokens": tokens.astype(np.int32),
        "positions": positions.astype(np.int32),
        "mask": np.where(mask, 0, lowest).astype(dtype),
        "past_mask": np.zeros(past, dtype),
        "logit_rows": logit_rows.astype(np.int32),
    }


def graph_outputs(
    num_rows: int, num_logits: int, shapes: Shapes, dtype: np.dtype[Any]
) -> dict[str, NDArray[Any]]:
    """Room for what the standard graph says besides the cache's new rows, by name."""
    return {
        "logits": np.empty((num_logits, shapes.vocab_size), np.float32),
        "features": np.empty((num_rows, shapes.feature_size), dtype),
    }
