"""The operators a model is described with, in ONNX Runtime's dialect.

Everything here is row-invariant on a CPU (DESIGN 3, "Rounding"): the bits of a row do not depend on the rows
beside it, one row included. See docs/decisions/row-invariant-cpu.md for why each operator is what it is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np
from onnx import TensorProto

from starsd_edge.types import Float32Array
from starsd_jetson.graph.attention import AttentionInputs, attention, attention_inputs
from starsd_jetson.graph.builder import CONTRIB, GraphBuilder
from starsd_jetson.graph.quantize import INT4_BLOCKS, Int8Columns, int4_block, int4_blocks, int8_columns
from starsd_jetson.graph.shape import ModelShape

__all__ = ["LINEAR_KINDS", "Ops", "OnnxRuntimeOps"]

UINT8_MIDDLE = 128  # zero point of activations: x / absmax in [-1, 1] becomes 1..255
ROW_STEP = 1 / 127  # of activations divided by their row's largest magnitude
Importance = Float32Array | None


class Ops(Protocol):
    """What a model is described with; `shared` is whatever `attention_inputs` gave."""

    graph: GraphBuilder
    shape: ModelShape
    quant: str
    index: int  # element type of tokens and rows
    element: int  # element type of features

    def linear(
        self,
        x: str,
        name: str,
        weight: Float32Array,
        bias: Float32Array | None = None,
        importance: Float32Array | None = None,
    ) -> str: ...
    def float_linear(self, x: str, name: str, weight: Float32Array) -> str: ...
    def head(self, x: str, weight: Float32Array, importance: Float32Array | None = None) -> str: ...
    def embed(self, tokens: str, table: Float32Array) -> str: ...
    def gain(self, name: str, values: Float32Array) -> str: ...
    def norm(self, x: str, gain: str) -> str: ...
    def add_norm(self, x: str, delta: str, gain: str) -> tuple[str, str]: ...
    def gated(self, gate_up: str) -> str: ...
    def select(self, x: str, rows: str) -> str: ...
    def attention_inputs(self) -> Any: ...
    def attention(self, qkv: str, layer: int, shared: Any, gains: tuple[str, str] | None) -> str: ...


@dataclass
class OnnxRuntimeOps:
    """Adds nodes to `graph`. `n` is the rows of a pass; `kv_heads * rows` stacks are [n_kv, n * group,
    dim].
    """

    graph: GraphBuilder
    shape: ModelShape
    quant: str
    index: int = TensorProto.INT64
    element: int = TensorProto.FLOAT

    def head(self, x: str, weight: Float32Array, importance: Importance = None) -> str:
        """The LM head. Its rounding goes straight into the logits: int8 at least, but where it is the
        embedding too. That is so in small models, and there it is a quarter of what a step reads."""
        if self.quant == "fp32":
            return self.float_linear(x, "head", weight)
        if self.quant in INT4_BLOCKS and self.shape.tied_embedding:
            return self.int4_linear(x, "head", weight, importance)
        columns = int8_columns(weight)
        self.graph.weights.add("head.scale", columns.scales)  # for whoever reads the head's rows
        return self.int8_product(x, "head", columns)

    def linear(
        self,
        x: str,
        name: str,
        weight: Float32Array,
        bias: Float32Array | None = None,
        importance: Float32Array | None = None,
    ) -> str:
        """[n, in] -> [n, out] for weight [out, in]; importance as in graph/quantize.py."""
        y = LINEAR_KINDS[self.quant](self, x, name, weight, importance)
        if bias is not None:
            y = self.graph.op("Add", y, self.graph.weight(f"{name}.bias", bias))
        return y

    def float_linear(self, x: str, name: str, weight: Float32Array, importance: Importance = None) -> str:
        """Packed at load, every row summed in the same order whatever n is."""
        return self.graph.op("MatMul", x, self.graph.weight(name, np.ascontiguousarray(weight.T)))

    def int8_linear(self, x: str, name: str, weight: Float32Array, importance: Importance) -> str:
        return self.int8_product(x, name, int8_columns(weight))

    def int8_product(self, x: str, name: str, columns: Int8Columns) -> str:
        """Activations quantised row by row, then an exact integer product: nothing to round differently.

        The columns' factors are a node of their own. Given to the product they are multiplied with the rows'
        step in every pass, one by one, which takes an eighth of a plain step's products."""
        g = self.graph
        peak = g.op("ReduceMax", g.op("Abs", x), g.constant([-1]), keepdims=1)  # [n, 1]
        zero, unit = g.constant(np.array(UINT8_MIDDLE, np.uint8)), g.number(1.0)
        rows = g.op("QuantizeLinear", g.op("Div", x, peak), g.number(ROW_STEP), zero)  # uint8 [n, in]
        product = g.op(
            "MatMulIntegerToFloat", rows, g.weight(name, columns.values), unit, unit, zero, domain=CONTRIB
        )
        factors = g.weight(f"{name}.factors", columns.scales * np.float32(ROW_STEP))
        return g.op("Mul", g.op("Mul", product, factors), peak)

    def int4_linear(self, x: str, name: str, weight: Float32Array, importance: Importance) -> str:
        g = self.graph
        packed = int4_blocks(weight, int4_block(weight.shape[1], self.quant), importance)
        return g.op(
            "MatMulNBits",
            x,
            g.weight(name, packed.values),
            g.weight(f"{name}.scale", packed.scales.reshape(-1)),
            g.weight(f"{name}.zero", packed.zero_points.reshape(-1)),
            domain=CONTRIB,
            K=weight.shape[1],
            N=weight.shape[0],
            bits=4,
            block_size=packed.block,
            accuracy_level=4,  # int8 activations: several times faster than float on a CPU
        )

    def embed(self, tokens: str, table: Float32Array) -> str:
        """Rows of the token table, float32 [n, H]; kept in float16 unless everything is float32."""
        half = self.quant != "fp32"
        stored = self.graph.weight("embedding", table.astype(np.float16) if half else table)
        rows = self.graph.op("Gather", stored, tokens)
        return self.graph.op("Cast", rows, to=TensorProto.FLOAT) if half else rows

    def gain(self, name: str, values: Float32Array) -> str:
        return self.graph.weight(name, values)

    def select(self, x: str, rows: str) -> str:
        return self.graph.op("Gather", x, rows)

    def attention_inputs(self) -> AttentionInputs:
        return attention_inputs(self.graph, self.shape)

    def attention(self, qkv: str, layer: int, shared: AttentionInputs, gains: tuple[str, str] | None) -> str:
        heads = (
            None if gains is None else (partial(self.norm, gain=gains[0]), partial(self.norm, gain=gains[1]))
        )
        return attention(self.graph, self.shape, qkv, layer, shared, heads)

    def norm(self, x: str, gain: str) -> str:
        return self.graph.op("SimplifiedLayerNormalization", x, gain, axis=-1, epsilon=self.shape.norm_eps)

    def add_norm(self, x: str, delta: str, gain: str) -> tuple[str, str]:
        """(norm(x + delta), x + delta)."""
        names = self.graph.ops(
            "SkipSimplifiedLayerNormalization",
            x,
            delta,
            gain,
            outputs=4,
            domain=CONTRIB,
            epsilon=self.shape.norm_eps,
        )
        self.graph.nodes[-1].output[1] = self.graph.nodes[-1].output[2] = (
            ""  # mean and variance: not for inference
        )
        return names[0], names[3]

    def gated(self, gate_up: str) -> str:
        """silu(gate) * up of [n, 2 * ffn]."""
        gate, up = self.graph.ops("Split", gate_up, outputs=2, axis=-1, num_outputs=2)
        return self.graph.op("Mul", self.graph.op("QuickGelu", gate, domain=CONTRIB, alpha=1.0), up)


LinearKind = Callable[[OnnxRuntimeOps, str, str, Float32Array, Importance], str]
LINEAR_KINDS: dict[str, LinearKind] = {
    "fp32": OnnxRuntimeOps.float_linear,
    "int8": OnnxRuntimeOps.int8_linear,
    "int4": OnnxRuntimeOps.int4_linear,
    "int4-exact": OnnxRuntimeOps.int4_linear,
}
