"""Whether what a source says of itself can be true: its numbers, its tensors' shapes, and no NaN among them.

A model that is wrong in one of these exports without complaint and then talks nonsense, or ends in an error
that names a graph instead of the file it came from.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from starsd_edge.errors import BundleError
from starsd_edge.types import Float32Array
from starsd_jetson.graph.shape import ModelShape, RopeScaling

__all__ = ["check_shape", "check_tensor", "expected_shape", "tensor_names"]

# Far above any model of these families, far below what would be allocated before anyone noticed.
LARGEST_SIZE = 1 << 18
MOST_LAYERS = 1 << 10
LARGEST_VOCABULARY = 1 << 24
CONTEXTS = (16, 1 << 20)
LAYER_TENSORS = (
    "input_layernorm.weight",
    "self_attn.q_proj.weight",
    "self_attn.k_proj.weight",
    "self_attn.v_proj.weight",
    "self_attn.o_proj.weight",
    "post_attention_layernorm.weight",
    "mlp.gate_proj.weight",
    "mlp.up_proj.weight",
    "mlp.down_proj.weight",
)
BIASES = ("self_attn.q_proj.bias", "self_attn.k_proj.bias", "self_attn.v_proj.bias")
HEAD_NORMS = ("self_attn.q_norm.weight", "self_attn.k_norm.weight")


def check_shape(shape: ModelShape, where: Path) -> None:
    """Raises BundleError: a number in `where` that no model has."""
    for what, value, least, most in (
        ("number of layers", shape.num_layers, 1, MOST_LAYERS),
        ("hidden size", shape.hidden_size, 1, LARGEST_SIZE),
        ("feed-forward size", shape.ffn_size, 1, LARGEST_SIZE),
        ("number of heads", shape.num_heads, 1, LARGEST_SIZE),
        ("number of key/value heads", shape.num_kv_heads, 1, shape.num_heads),
        ("head size", shape.head_dim, 2, LARGEST_SIZE),
        ("vocabulary", shape.vocab_size, 2, LARGEST_VOCABULARY),
        ("context", shape.max_len, *CONTEXTS),
    ):
        if not least <= value <= most:
            raise BundleError(f"{where}: a {what} of {value}; it must be {least} to {most}")
    if shape.num_heads % shape.num_kv_heads or shape.head_dim % 2:
        raise BundleError(
            f"{where}: {shape.num_heads} heads of {shape.head_dim} over {shape.num_kv_heads} "
            "key/value heads do not divide"
        )
    if not 0.0 < shape.norm_eps < 1.0:
        raise BundleError(f"{where}: a norm epsilon of {shape.norm_eps}; it must be between 0 and 1")
    if not 1.0 <= shape.rope_theta < math.inf:
        raise BundleError(f"{where}: a rotary base of {shape.rope_theta}; it must be 1 or more")
    if shape.rope_scaling is not None and not _is_plausible(shape.rope_scaling):
        raise BundleError(f"{where}: rotary scaling {shape.rope_scaling} has a factor that is not above 0")


def _is_plausible(scaling: RopeScaling) -> bool:
    factors = (scaling.factor, scaling.high_freq_factor, scaling.low_freq_factor, *scaling.factors)
    return all(0.0 < factor < math.inf for factor in factors) and scaling.original_max_len > 0


def check_tensor(name: str, values: Float32Array, shape: ModelShape, where: Path) -> None:
    """Raises BundleError: the tensor has another shape than its model wants, or holds NaN or infinity."""
    expected = expected_shape(name, shape)
    if values.shape != expected:
        raise BundleError(f"{where}: tensor {name} is {list(values.shape)}; this model's is {list(expected)}")
    if not np.isfinite(values).all():
        raise BundleError(f"{where}: tensor {name} holds NaN or infinity; fetch or convert it again")


def expected_shape(name: str, shape: ModelShape) -> tuple[int, ...]:
    """By the tensor's Hugging Face name; linear weights are [out, in]."""
    queries, keys = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    hidden, ffn = shape.hidden_size, shape.ffn_size
    if name in ("model.embed_tokens.weight", "lm_head.weight"):
        return (shape.vocab_size, hidden)
    by_part = {
        "q_proj.weight": (queries, hidden),
        "k_proj.weight": (keys, hidden),
        "v_proj.weight": (keys, hidden),
        "o_proj.weight": (hidden, queries),
        "q_proj.bias": (queries,),
        "k_proj.bias": (keys,),
        "v_proj.bias": (keys,),
        "q_norm.weight": (shape.head_dim,),
        "k_norm.weight": (shape.head_dim,),
        "gate_proj.weight": (ffn, hidden),
        "up_proj.weight": (ffn, hidden),
        "down_proj.weight": (hidden, ffn),
    }
    return by_part.get(".".join(name.split(".")[-2:]), (hidden,))  # the rest are norms


def tensor_names(shape: ModelShape) -> Iterator[str]:
    """Hugging Face's names of all tensors of such a model, in the order in which they are read."""
    parts = LAYER_TENSORS + (BIASES if shape.qkv_bias else ()) + (HEAD_NORMS if shape.qk_norm else ())
    yield "model.embed_tokens.weight"
    for layer in range(shape.num_layers):
        for part in parts:
            yield f"model.layers.{layer}.{part}"
    yield "model.norm.weight"
    if not shape.tied_embedding:
        yield "lm_head.weight"
