"""The same operators in standard ONNX, as TensorRT 10.3's parser accepts them (facts: no ScatterND, no fused
norms, no rotary operator), strongly typed: the precision of every value is written down in the graph.

Past keys and values are inputs [past, n_kv, dim] that view the front of a preallocated buffer; only the new
rows come back. Scores over past and new rows are concatenated, the caches never are, so nothing copies the
past and the tree mask is [n, n].
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from onnx import TensorProto

from starsd_edge.types import Float32Array
from starsd_jetson.graph.builder import GraphBuilder
from starsd_jetson.graph.quantize import int4_block, int4_symmetric
from starsd_jetson.graph.shape import ModelShape

__all__ = ["STANDARD_OPERATORS", "StandardOps"]

# Everything a graph of this flavour may contain; a test holds it.
STANDARD_OPERATORS = frozenset(
    [
        *("Add", "Cast", "Concat", "DequantizeLinear", "Div", "Gather", "Identity", "MatMul", "Mul"),
        *("ReduceMean", "Reshape", "Shape", "Sigmoid", "Slice", "Softmax", "Split", "Sqrt", "Sub"),
        *("Transpose", "Unsqueeze"),
    ]
)


@dataclass(frozen=True, slots=True)
class SharedInputs:
    """Values that every layer shares: cos and sin [n, 1, dim / 2] of the rows, and what is added to scores:
    mask [n, n] over the new rows, past_mask [past] over those before, so that a pass may be given more of the
    buffer than is filled (trt_graphs.py).
    """

    cos: str
    sin: str
    mask: str
    past_mask: str


class StandardOps:
    """graph/ops.py's interface; `quant` is fp32 (for tests), fp16 or int4 (int4 weights, float16
    arithmetic).
    """

    def __init__(self, graph: GraphBuilder, shape: ModelShape, quant: str) -> None:
        self.graph = graph
        self.shape = shape
        self.quant = quant
        self.half = quant != "fp32"
        self.element: int = TensorProto.FLOAT16 if self.half else TensorProto.FLOAT
        self.index: int = TensorProto.INT32

    def linear(
        self,
        x: str,
        name: str,
        weight: Float32Array,
        bias: Float32Array | None = None,
        importance: Float32Array | None = None,
    ) -> str:
        """[n, in] -> [n, out] for weight [out, in]."""
        if self.quant == "int4":
            y = self.graph.op("MatMul", x, self.int4_weight(name, weight, importance))
        else:
            y = self.float_linear(x, name, weight)
        if bias is not None:
            y = self.graph.op("Add", y, self.stored(f"{name}.bias", bias))
        return y

    def head(self, x: str, weight: Float32Array, importance: Float32Array | None = None) -> str:
        """Logits in float32; the weights stay in float16 for int4."""
        return self.graph.op("Cast", self.float_linear(x, "head", weight), to=TensorProto.FLOAT)

    def float_linear(self, x: str, name: str, weight: Float32Array) -> str:
        return self.graph.op("MatMul", x, self.stored(name, np.ascontiguousarray(weight.T)))

    def int4_weight(self, name: str, weight: Float32Array, importance: Float32Array | None) -> str:
        g = self.graph
        packed = int4_symmetric(weight, int4_block(weight.shape[1]), importance)
        values = g.int4_weight(name, packed.values, (weight.shape[1], weight.shape[0]))
        scales = g.weight(f"{name}.scale", packed.scales.astype(np.float16))
        return g.op("DequantizeLinear", values, scales, axis=0, block_size=packed.block)

    def stored(self, name: str, values: Float32Array) -> str:
        return self.graph.weight(name, values.astype(np.float16) if self.half else values)

    def embed(self, tokens: str, table: Float32Array) -> str:
        return self.graph.op("Gather", self.stored("embedding", table), tokens)

    def gain(self, name: str, values: Float32Array) -> str:
        """Norms are computed in float32 whatever the precision of the rest."""
        return self.graph.weight(name, values)

    def norm(self, x: str, gain: str) -> str:
        g = self.graph
        wide = g.op("Cast", x, to=TensorProto.FLOAT)
        mean = g.reduce_mean(g.op("Mul", wide, wide))
        root = g.op("Sqrt", g.op("Add", mean, g.number(self.shape.norm_eps)))
        scaled = g.op("Mul", g.op("Div", wide, root), gain)
        return g.op("Cast", scaled, to=self.element)

    def add_norm(self, x: str, delta: str, gain: str) -> tuple[str, str]:
        total = self.graph.op("Add", x, delta)
        return self.norm(total, gain), total

    def gated(self, gate_up: str) -> str:
        g, ffn = self.graph, self.shape.ffn_size
        gate, up = g.ops("Split", gate_up, g.constant([ffn, ffn]), outputs=2, axis=1)
        return g.op("Mul", g.op("Mul", gate, g.op("Sigmoid", gate)), up)

    def select(self, x: str, rows: str) -> str:
        return self.graph.op("Gather", x, rows)

    def attention_inputs(self) -> SharedInputs:
        g = self.graph
        positions = g.input("positions", self.index, ["n"])
        mask = g.input("mask", self.element, ["n", "n"])
        past_mask = g.input("past_mask", self.element, ["past"])
        cos, sin = self.shape.rope_table()

        def rows(name: str, table: Float32Array) -> str:
            return g.op("Unsqueeze", g.op("Gather", self.stored(name, table), positions), g.constant([1]))

        return SharedInputs(rows("rope.cos", cos), rows("rope.sin", sin), mask, past_mask)

    def attention(self, qkv: str, layer: int, shared: SharedInputs, gains: tuple[str, str] | None) -> str:
        """[n, n_kv * (group + 2) * dim], as graph/llama.py fuses it -> [n, heads * dim]."""
        g, shape = self.graph, self.shape
        heads, dim, group = shape.num_kv_heads, shape.head_dim, shape.group
        by_head = g.op("Reshape", qkv, g.constant([0, heads, (group + 2) * dim]))
        q, k, new_v = g.ops("Split", by_head, g.constant([group * dim, dim, dim]), outputs=3, axis=2)
        q = g.op("Reshape", q, g.constant([0, heads * group, dim]))
        if gains is not None:
            q, k = self.norm(q, gains[0]), self.norm(k, gains[1])
        q, new_k = self.turn(q, shared), self.turn(k, shared)
        past_k, past_v = (g.input(f"{kind}.{layer}", self.element, ["past", heads, dim]) for kind in "kv")
        for kind, rows in (("k", new_k), ("v", new_v)):
            g.op("Identity", rows, name=f"{kind}.{layer}.new")
            g.output(f"{kind}.{layer}.new", self.element, ["n", heads, dim])

        queries = g.op("Reshape", q, g.constant([0, heads, group, dim]))
        queries = g.op("Transpose", queries, perm=[1, 2, 0, 3])  # [n_kv, group, n, dim]
        over_past = g.op("MatMul", queries, self.columns(past_k))  # [n_kv, group, n, past]
        over_past = g.op("Add", over_past, shared.past_mask)
        over_new = g.op("Add", g.op("MatMul", queries, self.columns(new_k)), shared.mask)
        scores = g.op("Cast", g.op("Concat", over_past, over_new, axis=3), to=TensorProto.FLOAT)
        weights = g.op("Cast", g.op("Softmax", scores, axis=3), to=self.element)
        edge = g.op("Slice", g.op("Shape", past_k), g.constant([0]), g.constant([1]), g.constant([0]))
        far = g.constant([np.iinfo(np.int32).max])
        on_past = g.op("Slice", weights, g.constant([0]), edge, g.constant([3]))
        on_new = g.op("Slice", weights, edge, far, g.constant([3]))
        mixed = g.op(
            "Add", g.op("MatMul", on_past, self.rows(past_v)), g.op("MatMul", on_new, self.rows(new_v))
        )
        return g.op(
            "Reshape", g.op("Transpose", mixed, perm=[2, 0, 1, 3]), g.constant([0, heads * group * dim])
        )

    def columns(self, keys: str) -> str:
        """[rows, n_kv, dim] -> [n_kv, 1, dim, rows]."""
        turned = self.graph.op("Transpose", keys, perm=[1, 2, 0])
        return self.graph.op("Unsqueeze", turned, self.graph.constant([1]))

    def rows(self, values: str) -> str:
        """[rows, n_kv, dim] -> [n_kv, 1, rows, dim]."""
        turned = self.graph.op("Transpose", values, perm=[1, 0, 2])
        return self.graph.op("Unsqueeze", turned, self.graph.constant([1]))

    def turn(self, x: str, shared: SharedInputs) -> str:
        """Rotary positions on [n, heads, dim]."""
        g, half = self.graph, self.shape.head_dim // 2
        low, high = g.ops("Split", x, g.constant([half, half]), outputs=2, axis=2)
        first = g.op("Sub", g.op("Mul", low, shared.cos), g.op("Mul", high, shared.sin))
        second = g.op("Add", g.op("Mul", high, shared.cos), g.op("Mul", low, shared.sin))
        return g.op("Concat", first, second, axis=2)
