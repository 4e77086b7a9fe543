"""One description of a Llama-architecture model, built node by node.

Inputs   tokens int64 [n], logit_rows int64 [m], attention's (graph/attention.py)
Outputs  logits float32 [m, V] of the rows asked for, features float32 [n, F] of every row
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from onnx import TensorProto

from starsd_edge.types import Float32Array
from starsd_jetson.graph.attention import attention, attention_inputs
from starsd_jetson.graph.ops import OnnxRuntimeOps
from starsd_jetson.graph.sources import WeightSource

__all__ = ["build_llama"]

Progress = Callable[[int, int], None]
# Smallest number of float16: an all-zero token row would make 0 / 0 of its quantisation, this one makes ~0.
TINY = np.float32(6e-8)


def build_llama(
    ops: OnnxRuntimeOps, source: WeightSource, feature_layers: tuple[int, ...], progress: Progress
) -> None:
    """Add the whole model to `ops.graph`. `feature_layers` are layers whose inputs are the features; none
    means the output of the final norm. `progress(done, total)` counts layers."""
    g, shape = ops.graph, source.shape
    tokens = g.input("tokens", TensorProto.INT64, ["n"])
    logit_rows = g.input("logit_rows", TensorProto.INT64, ["m"])
    shared = attention_inputs(ops)

    embedding = source.tensor("model.embed_tokens.weight")
    x = embed(ops, tokens, embedding)
    pending = ""  # what the last block adds to x: the next norm adds it on its way
    taps = []
    for layer in range(shape.num_layers):
        names = f"model.layers.{layer}."
        h, x = next_norm(ops, x, pending, source, names + "input_layernorm.weight")
        if layer in feature_layers:
            taps.append(x)
        qkv = ops.linear(h, f"layers.{layer}.qkv", *fused_qkv(source, names))
        mixed = attention(ops, qkv, layer, shared, head_gains(ops, source, names))
        pending = ops.linear(mixed, f"layers.{layer}.o", source.tensor(names + "self_attn.o_proj.weight"))
        h, x = next_norm(ops, x, pending, source, names + "post_attention_layernorm.weight")
        gate, up = source.tensor(names + "mlp.gate_proj.weight"), source.tensor(names + "mlp.up_proj.weight")
        gated = ops.gated(ops.linear(h, f"layers.{layer}.gate_up", np.concatenate([gate, up])))
        pending = ops.linear(gated, f"layers.{layer}.down", source.tensor(names + "mlp.down_proj.weight"))
        progress(layer + 1, shape.num_layers)
    last, x = next_norm(ops, x, pending, source, "model.norm.weight")

    if taps:
        g.op("Concat", *taps, name="features", axis=-1)
    else:
        g.op("Identity", last, name="features")
    g.output("features", TensorProto.FLOAT, ["n", shape.hidden_size * max(1, len(taps))])
    head = embedding if shape.tied_embedding else source.tensor("lm_head.weight")
    ops.head(g.op("Gather", last, logit_rows), head)
    g.nodes[-1].output[0] = "logits"
    g.output("logits", TensorProto.FLOAT, ["m", shape.vocab_size])


def embed(ops: OnnxRuntimeOps, tokens: str, table: Float32Array) -> str:
    table = np.where(np.any(table, axis=1, keepdims=True), table, TINY)
    half = ops.quant != "fp32"
    return ops.embed(
        tokens, ops.graph.weight("embedding", table.astype(np.float16) if half else table), half=half
    )


def next_norm(ops: OnnxRuntimeOps, x: str, pending: str, source: WeightSource, name: str) -> tuple[str, str]:
    """(norm of x + pending, x + pending)."""
    gain = ops.graph.weight(name, source.tensor(name))
    return ops.add_norm(x, pending, gain) if pending else (ops.norm(x, gain), x)


def fused_qkv(source: WeightSource, names: str) -> tuple[Float32Array, Float32Array | None]:
    """Weight [n_kv * (group + 2) * dim, H] and bias: each key/value head's queries, key and value side by
    side.

    Queries are divided by sqrt(dim) here rather than at run time (in Qwen3 the gain of their norm is)."""
    shape = source.shape
    scale = 1.0 if shape.qk_norm else np.float32(shape.head_dim**-0.5)

    def fuse(kind: str) -> Float32Array:
        parts = []
        for letter, heads, factor in (("q", shape.group, scale), ("k", 1, 1.0), ("v", 1, 1.0)):
            rows = source.tensor(f"{names}self_attn.{letter}_proj.{kind}") * np.float32(factor)
            parts.append(rows.reshape(shape.num_kv_heads, heads * shape.head_dim, *rows.shape[1:]))
        fused = np.concatenate(parts, axis=1)
        return np.ascontiguousarray(fused.reshape(-1, *fused.shape[2:]))

    return fuse("weight"), fuse("bias") if shape.qkv_bias else None


def head_gains(ops: OnnxRuntimeOps, source: WeightSource, names: str) -> tuple[str, str] | None:
    if not source.shape.qk_norm:
        return None
    q = source.tensor(names + "self_attn.q_norm.weight") * np.float32(source.shape.head_dim**-0.5)
    k = source.tensor(names + "self_attn.k_norm.weight")
    return ops.graph.weight(names + "q_norm", q), ops.graph.weight(names + "k_norm", k)
