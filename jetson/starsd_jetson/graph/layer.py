"""The weights of one layer, and how they are rescaled so that activations quantise well."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from starsd_edge.types import Float32Array
from starsd_jetson.graph.quantize import int4_block, int4_error
from starsd_jetson.graph.shape import ModelShape
from starsd_jetson.graph.sources import WeightSource

__all__ = ["LayerActivations", "LayerInputs", "LayerWeights", "Rescaled", "protect", "read_layer", "smooth"]

# SmoothQuant's alpha: how much of the activations' range moves into the weights. Measured on the embedded
# model's own chats, KL to float32 with int8: none 0.054, 0.4 0.023, 0.5 0.017, 0.6 0.020, 0.7 0.023.
SMOOTHING = 0.5
SMALLEST_PEAK = np.float32(1e-5)
PROTECTING_POWERS = (0.0, 0.15, 0.3, 0.45, 0.6, 0.75)
PROBED_ROWS = 512  # of each weight: all of them would take longer than the quantisation itself


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """Float32, linear weights [out, in]; biases and head gains are None where the family has none."""

    input_norm: Float32Array
    q: Float32Array
    k: Float32Array
    v: Float32Array
    q_bias: Float32Array | None
    k_bias: Float32Array | None
    v_bias: Float32Array | None
    q_norm: Float32Array | None
    k_norm: Float32Array | None
    o: Float32Array
    post_norm: Float32Array
    gate: Float32Array
    up: Float32Array
    down: Float32Array


@dataclass(frozen=True, slots=True)
class LayerInputs:
    """One number an input channel of each of the layer's products, seen on the calibration text.

    qkv and gate_up float32 [H], o [heads * dim], down [ffn]
    """

    qkv: Float32Array
    o: Float32Array
    gate_up: Float32Array
    down: Float32Array


@dataclass(frozen=True, slots=True)
class LayerActivations:
    """Largest magnitudes and mean squares."""

    peak: LayerInputs
    mean_square: LayerInputs


def read_layer(source: WeightSource, layer: int) -> LayerWeights:
    prefix = f"model.layers.{layer}."
    shape: ModelShape = source.shape

    def bias(letter: str) -> Float32Array | None:
        return source.tensor(f"{prefix}self_attn.{letter}_proj.bias") if shape.qkv_bias else None

    def head_norm(letter: str) -> Float32Array | None:
        return source.tensor(f"{prefix}self_attn.{letter}_norm.weight") if shape.qk_norm else None

    return LayerWeights(
        input_norm=source.tensor(prefix + "input_layernorm.weight"),
        q=source.tensor(prefix + "self_attn.q_proj.weight"),
        k=source.tensor(prefix + "self_attn.k_proj.weight"),
        v=source.tensor(prefix + "self_attn.v_proj.weight"),
        q_bias=bias("q"),
        k_bias=bias("k"),
        v_bias=bias("v"),
        q_norm=head_norm("q"),
        k_norm=head_norm("k"),
        o=source.tensor(prefix + "self_attn.o_proj.weight"),
        post_norm=source.tensor(prefix + "post_attention_layernorm.weight"),
        gate=source.tensor(prefix + "mlp.gate_proj.weight"),
        up=source.tensor(prefix + "mlp.up_proj.weight"),
        down=source.tensor(prefix + "mlp.down_proj.weight"),
    )


@dataclass(frozen=True, slots=True)
class Rescaled:
    """Rescaled weights, and the mean squares of the inputs that they now get."""

    weights: LayerWeights
    mean_square: LayerInputs


def smooth(weights: LayerWeights, seen: LayerActivations) -> Rescaled:
    """The same function with flatter activations, for int8 ones (SmoothQuant, arXiv 2211.10438)."""
    peak = seen.peak
    return rescale(
        weights,
        seen.mean_square,
        qkv=flattening(peak.qkv, weights.q, weights.k, weights.v),
        gate_up=flattening(peak.gate_up, weights.gate, weights.up),
        down=flattening(peak.down, weights.down),
    )


def protect(weights: LayerWeights, seen: LayerActivations, kind: str = "int4") -> Rescaled:
    """The same function with the weights of busy channels enlarged, so that rounding to int4 hurts them less:
    how much is searched, channel by channel of each product (AWQ, arXiv 2306.00978)."""
    squares = seen.mean_square
    return rescale(
        weights,
        squares,
        qkv=protection(kind, squares.qkv, weights.q, weights.k, weights.v),
        gate_up=protection(kind, squares.gate_up, weights.gate, weights.up),
        down=protection(kind, squares.down, weights.down),
    )


def rescale(
    weights: LayerWeights,
    squares: LayerInputs,
    *,
    qkv: Float32Array,
    gate_up: Float32Array,
    down: Float32Array,
) -> Rescaled:
    """What a norm's gain or the up projection gives up, the weights behind it take over. Costs nothing at run
    time. The factors are float32 [in]."""
    smoothed = replace(
        weights,
        input_norm=weights.input_norm / qkv,
        q=weights.q * qkv,
        k=weights.k * qkv,
        v=weights.v * qkv,
        post_norm=weights.post_norm / gate_up,
        gate=weights.gate * gate_up,
        up=weights.up * gate_up / down[:, None],
        down=weights.down * down,
    )
    after = LayerInputs(
        qkv=squares.qkv / qkv**2,
        o=squares.o,
        gate_up=squares.gate_up / gate_up**2,
        down=squares.down / down**2,
    )
    return Rescaled(smoothed, after)


def flattening(peaks: Float32Array, *weights: Float32Array) -> Float32Array:
    """float32 [in]: by how much each channel's activations shrink."""
    reach = np.max([np.abs(weight).max(axis=0) for weight in weights], axis=0)
    activations = np.maximum(peaks, SMALLEST_PEAK)
    factors = activations**SMOOTHING / np.maximum(reach, SMALLEST_PEAK) ** (1 - SMOOTHING)
    return np.asarray(factors / np.median(factors), np.float32)


def protection(kind: str, squares: Float32Array, *weights: Float32Array) -> Float32Array:
    """float32 [in]: by how much each channel's weights grow. Of several powers of the activations' size, the
    one with the least error of the products, judged on some rows."""
    rows = np.concatenate([weight[:: -(-len(weight) // PROBED_ROWS)] for weight in weights])
    size = np.sqrt(np.maximum(squares, SMALLEST_PEAK**2))
    block = int4_block(len(squares), kind)
    best, least = np.ones_like(size), np.inf
    for power in PROTECTING_POWERS:
        factors = size**power
        factors = np.asarray(factors / np.sqrt(factors.max() * factors.min()), np.float32)
        error = float((int4_error(rows * factors, block) / factors**2 * squares).sum())
        if error < least:
            best, least = factors, error
    return np.asarray(best, np.float32)
