"""Attention over a cache that stays in place, exact whatever else is in the pass.

Keys are [n_kv, C, dim] and values [n_kv, C, dim + 1] with a last column of ones: capacity C is a multiple
of 128, both are inputs *and* outputs of the graph bound to the same memory, and ScatterND writes only the
new rows.

Why not GroupQueryAttention: its softmax sums in vector lanes, so where a key lies decides in which order it
is added, and a tree's masked siblings move keys. Here the denominator is one more column of the product
with the values: keys are added one after the other, and a masked key adds an exact zero. The product is
summed in blocks of at least 128 keys, so a path may not straddle a block edge in a tree when it would not
in a chain: `OnnxTarget.max_tree_size` sees to that. A product of one row would take another kernel, so a
model without grouped heads pads the rows of queries with one of zeros.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from onnx import TensorProto

from starsd_jetson.graph.builder import CONTRIB, GraphBuilder
from starsd_jetson.graph.shape import ModelShape

__all__ = ["AttentionInputs", "attention", "attention_inputs"]

HeadNorm = Callable[[str], str]


@dataclass(frozen=True, slots=True)
class AttentionInputs:
    """Values that every layer shares.

    positions int64 [n_kv, n], equal rows
    slots     int64 [n_kv, n, 2]: (head, cache row) of each new row
    mask      float32 [n * group (+ 1 when group is 1), C]: 0 or -inf
    """

    positions: str
    slots: str
    mask: str
    cos: str
    sin: str


def attention_inputs(g: GraphBuilder, shape: ModelShape) -> AttentionInputs:
    heads = shape.num_kv_heads
    cos, sin = shape.rope_table()
    return AttentionInputs(
        positions=g.input("positions", TensorProto.INT64, [heads, "n"]),
        slots=g.input("slots", TensorProto.INT64, [heads, "n", 2]),
        mask=g.input("mask", TensorProto.FLOAT, ["queries", "capacity"]),
        cos=g.weight("rope.cos", cos),
        sin=g.weight("rope.sin", sin),
    )


def attention(
    g: GraphBuilder,
    shape: ModelShape,
    qkv: str,
    layer: int,
    shared: AttentionInputs,
    norms: tuple[HeadNorm, HeadNorm] | None,
) -> str:
    """[n, n_kv * (group + 2) * dim], a key/value head's queries, key and value side by side -> [n, heads *
    dim].

    The queries arrive already divided by sqrt(dim). `norms` are Qwen3's norms of queries and keys.
    """
    heads, dim, group = shape.num_kv_heads, shape.head_dim, shape.group

    by_head = g.op("Transpose", g.op("Reshape", qkv, g.constant([0, heads, -1])), perm=[1, 0, 2])
    if norms is None:
        qk, new_v = g.ops("Split", by_head, g.constant([(group + 1) * dim, dim]), outputs=2, axis=2)
    else:
        q, k, new_v = g.ops("Split", by_head, g.constant([group * dim, dim, dim]), outputs=3, axis=2)
        q = g.op("Reshape", q, g.constant([heads, -1, group, dim]))
        q = g.op("Reshape", norms[0](q), g.constant([heads, -1, group * dim]))
        qk = g.op("Concat", q, norms[1](k), axis=2)
    turned = g.op("RotaryEmbedding", qk, shared.positions, shared.cos, shared.sin, domain=CONTRIB)
    q, new_k = g.ops("Split", turned, g.constant([group * dim, dim]), outputs=2, axis=2)

    keys = store(g, heads, f"k.{layer}", new_k, shared, dim)
    ones = g.op("Pad", new_v, g.constant([0, 0, 0, 0, 0, 1]), g.number(1.0))
    values = store(g, heads, f"v.{layer}", ones, shared, dim + 1)

    queries = g.op("Reshape", q, g.constant([heads, -1, dim]))  # [n_kv, n * group, dim]
    if group == 1:
        queries = g.op("Pad", queries, g.constant([0, 0, 0, 0, 1, 0]))
    scores = g.op("FusedMatMul", queries, keys, domain=CONTRIB, transB=1)  # [n_kv, n * group, C]
    scores = g.op("Add", scores, shared.mask)
    peak = g.op("ReduceMax", scores, g.constant([-1]), keepdims=1)
    weights = g.op("Exp", g.op("Sub", scores, peak))
    total, weight = g.ops("Split", g.op("MatMul", weights, values), g.constant([dim, 1]), outputs=2, axis=2)
    mixed = g.op("Div", total, weight)
    if group == 1:
        mixed = g.op("Slice", mixed, g.constant([0]), g.constant([-1]), g.constant([1]))
    rows = g.op("Transpose", g.op("Reshape", mixed, g.constant([heads, -1, group * dim])), perm=[1, 0, 2])
    return g.op("Reshape", rows, g.constant([0, heads * group * dim]))


def store(g: GraphBuilder, heads: int, name: str, rows: str, shared: AttentionInputs, width: int) -> str:
    """Write the new rows into the cache `name`; returns the whole cache."""
    past = g.input(name, TensorProto.FLOAT, [heads, "capacity", width])
    present = g.op("ScatterND", past, shared.slots, rows, name=f"{name}.new")
    g.output(present, TensorProto.FLOAT, [heads, "capacity", width])
    return present
