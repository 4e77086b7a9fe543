"""One description of a Llama-architecture model, built node by node.

Inputs   tokens [n], logit_rows [m], and what the flavour's attention needs
Outputs  logits float32 [m, V] of the rows asked for, features [n, F] of every row

The flavour is an Ops (graph/ops.py for ONNX Runtime, graph/standard_ops.py for TensorRT).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from onnx import TensorProto

from starsd_edge.types import Float32Array
from starsd_jetson.graph.layer import (
    LayerActivations,
    LayerInputs,
    LayerWeights,
    Rescaled,
    protect,
    read_layer,
    smooth,
)
from starsd_jetson.graph.ops import Ops
from starsd_jetson.graph.reference import ReferenceRun
from starsd_jetson.graph.sources import WeightSource
from starsd_jetson.graph.taps import Taps

__all__ = ["build_llama"]

Progress = Callable[[int, int], None]
# Smallest number of float16: an all-zero token row would make 0 / 0 of its quantisation, this one makes ~0.
TINY = np.float32(6e-8)
# What prepares the weights of a layer.
RESCALED: dict[str, Callable[[LayerWeights, LayerActivations], Rescaled]] = {
    "int8": smooth,
    "int4": protect,
    "int4-exact": partial(protect, kind="int4-exact"),
}


def build_llama(
    ops: Ops,
    source: WeightSource,
    taps: Taps | None,
    reference: ReferenceRun | None,
    progress: Progress,
) -> Float32Array | None:
    """Add the whole model to `ops.graph`. The features are what `taps` makes of some layers' inputs; without
    them, the output of the final norm. `progress(done, total)` counts layers.

    With a `reference` quantised weights are smoothed by what it sees, and its logits [T, V] are returned.
    """
    g, shape = ops.graph, source.shape
    tokens = g.input("tokens", ops.index, ["n"])
    logit_rows = g.input("logit_rows", ops.index, ["m"])
    shared = ops.attention_inputs()

    table = source.tensor("model.embed_tokens.weight")
    if reference is not None:
        reference.start(table)
    x, pending = (
        embed(ops, tokens, table),
        "",
    )  # pending: what the last block adds to x; the next norm adds it
    if not shape.tied_embedding:
        table = np.empty((0, 0), np.float32)  # a gigabyte in large models
    tapped = []
    for index in range(shape.num_layers):
        weights = read_layer(source, index)
        importance: LayerInputs | None = None  # of the inputs: not known
        if reference is not None:
            seen = reference.layer(weights)
            if ops.quant in RESCALED:
                rescaled = RESCALED[ops.quant](weights, seen)
                weights, importance = rescaled.weights, rescaled.mean_square
        x, pending = layer(ops, x, pending, weights, importance, index, shared)
        if taps is not None and index in taps.layers:
            tapped.append(x)
        x, pending = mlp(ops, x, pending, weights, importance, index)
        progress(index + 1, shape.num_layers)

    gain = source.tensor("model.norm.weight")
    last, _ = next_norm(ops, x, pending, "norm", gain)
    rows, width = last, shape.hidden_size
    if taps is not None:
        rows = ops.float_linear(g.op("Concat", *tapped, axis=-1), "projection", taps.projection)
        width = len(taps.projection)
    g.op("Identity", rows, name="features")
    g.output("features", ops.element, ["n", width])
    head = table if shape.tied_embedding else source.tensor("lm_head.weight")
    ops.head(ops.select(last, logit_rows), head, None if reference is None else reference.head_inputs(gain))
    g.nodes[-1].output[0] = "logits"
    g.output("logits", TensorProto.FLOAT, ["m", shape.vocab_size])
    return None if reference is None else reference.finish(gain, head)


def embed(ops: Ops, tokens: str, table: Float32Array) -> str:
    return ops.embed(tokens, np.where(np.any(table, axis=1, keepdims=True), table, TINY))


def layer(
    ops: Ops,
    x: str,
    pending: str,
    weights: LayerWeights,
    importance: LayerInputs | None,
    index: int,
    shared: Any,
) -> tuple[str, str]:
    """The attention block: (input of the layer, what the block adds to it)."""
    h, x = next_norm(ops, x, pending, f"layers.{index}.input_norm", weights.input_norm)
    bias = fused_bias(ops, weights)
    qkv = ops.linear(
        h, f"layers.{index}.qkv", fused_qkv(ops, weights), bias, importance.qkv if importance else None
    )
    mixed = ops.attention(qkv, index, shared, head_gains(ops, weights, index))
    return x, ops.linear(
        mixed, f"layers.{index}.o", weights.o, importance=importance.o if importance else None
    )


def mlp(
    ops: Ops, x: str, pending: str, weights: LayerWeights, importance: LayerInputs | None, index: int
) -> tuple[str, str]:
    """The feed-forward block: (its input, what it adds to it)."""
    h, x = next_norm(ops, x, pending, f"layers.{index}.post_norm", weights.post_norm)
    both = np.concatenate([weights.gate, weights.up])
    gate_up = ops.linear(
        h, f"layers.{index}.gate_up", both, importance=importance.gate_up if importance else None
    )
    return x, ops.linear(
        ops.gated(gate_up),
        f"layers.{index}.down",
        weights.down,
        importance=importance.down if importance else None,
    )


def next_norm(ops: Ops, x: str, pending: str, name: str, gain: Float32Array) -> tuple[str, str]:
    """(norm of x + pending, x + pending)."""
    stored = ops.gain(name, gain)
    return ops.add_norm(x, pending, stored) if pending else (ops.norm(x, stored), x)


def fused_qkv(ops: Ops, weights: LayerWeights) -> Float32Array:
    """[n_kv * (group + 2) * dim, H]: each key/value head's queries, key and value side by side.

    Queries are divided by sqrt(dim) here rather than at run time (in Qwen3 the gain of their norm is)."""
    return fuse(ops, weights.q * query_factor(ops), weights.k, weights.v)


def fused_bias(ops: Ops, weights: LayerWeights) -> Float32Array | None:
    if weights.q_bias is None or weights.k_bias is None or weights.v_bias is None:
        return None
    return fuse(ops, weights.q_bias * query_factor(ops), weights.k_bias, weights.v_bias)


def fuse(ops: Ops, q: Float32Array, k: Float32Array, v: Float32Array) -> Float32Array:
    heads = ops.shape.num_kv_heads
    parts = [rows.reshape(heads, -1, *rows.shape[1:]) for rows in (q, k, v)]
    fused = np.concatenate(parts, axis=1)
    return np.ascontiguousarray(fused.reshape(-1, *fused.shape[2:]))


def query_factor(ops: Ops) -> float:
    return 1.0 if ops.shape.qk_norm else float(ops.shape.head_dim**-0.5)


def head_gains(ops: Ops, weights: LayerWeights, index: int) -> tuple[str, str] | None:
    if weights.q_norm is None or weights.k_norm is None:
        return None
    q = weights.q_norm * np.float32(ops.shape.head_dim**-0.5)
    return ops.gain(f"layers.{index}.q_norm", q), ops.gain(f"layers.{index}.k_norm", weights.k_norm)
