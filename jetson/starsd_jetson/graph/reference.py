"""The source itself, run over a text in float32 with numpy, one layer at a time.

The exporter holds one layer's weights at a time and passes each through here before it quantises it: that
gives the ranges of the activations, and at the end the logits that the bundle is compared with.
"""

from __future__ import annotations

import numpy as np

from starsd_edge.types import Float32Array, TokenArray
from starsd_jetson.graph.layer import LayerActivations, LayerInputs, LayerWeights
from starsd_jetson.graph.shape import ModelShape

__all__ = ["ReferenceRun"]


class ReferenceRun:
    """One causal pass over two texts at once: `start`, then `layer` for every layer, then `finish`.

    `calibration` sets the ranges, `judged` is what quality is judged by; neither sees the other, so that a
    bundle is tried out on as many tokens as are judged and no more.
    """

    def __init__(self, shape: ModelShape, calibration: TokenArray, judged: TokenArray) -> None:
        self.shape = shape
        self.judged = judged
        self.num_calibration = len(calibration)
        self.tokens = np.concatenate([calibration, judged])  # int32 [T]
        positions = np.concatenate([np.arange(len(calibration)), np.arange(len(judged))])
        cos, sin = shape.rope_table()
        self.cos, self.sin = cos[positions, None], sin[positions, None]  # [T, 1, dim / 2]
        self.mask = np.triu(np.full((len(positions), len(positions)), -np.inf, np.float32), 1)
        self.mask[len(calibration) :, : len(calibration)] = -np.inf
        self.x: Float32Array = np.zeros((len(positions), shape.hidden_size), np.float32)

    def start(self, table: Float32Array) -> None:
        self.x = table[self.tokens]

    def layer(self, weights: LayerWeights) -> LayerActivations:
        """Advance by one layer; what its products saw."""
        h = self.norm(self.x, weights.input_norm)
        mixed = self.attention(h, weights)
        self.x = self.x + mixed @ weights.o.T
        m = self.norm(self.x, weights.post_norm)
        gate = m @ weights.gate.T
        gated = gate / (1 + np.exp(-np.maximum(gate, -80))) * (m @ weights.up.T)
        self.x = self.x + gated @ weights.down.T
        seen = [x[: self.num_calibration] for x in (h, mixed, m, gated)]
        return LayerActivations(
            peak=LayerInputs(*(np.asarray(np.abs(x).max(axis=0), np.float32) for x in seen)),
            mean_square=LayerInputs(*(np.asarray(np.square(x).mean(axis=0), np.float32) for x in seen)),
        )

    def head_inputs(self, gain: Float32Array) -> Float32Array:
        """float32 [H]: mean square of each channel that the LM head reads, after the last layer."""
        seen = self.norm(self.x[: self.num_calibration], gain)
        return np.asarray(np.square(seen).mean(axis=0), np.float32)

    def finish(self, gain: Float32Array, head: Float32Array) -> Float32Array:
        """Logits float32 [judged, V]."""
        return np.asarray(self.norm(self.x[self.num_calibration :], gain) @ head.T, np.float32)

    def norm(self, x: Float32Array, gain: Float32Array) -> Float32Array:
        scale = np.sqrt(np.mean(np.square(x), axis=-1, keepdims=True) + self.shape.norm_eps)
        return np.asarray(x / scale * gain, np.float32)

    def attention(self, h: Float32Array, weights: LayerWeights) -> Float32Array:
        shape = self.shape
        q = self.project(h, weights.q, weights.q_bias, shape.num_heads)
        k = self.project(h, weights.k, weights.k_bias, shape.num_kv_heads)
        v = self.project(h, weights.v, weights.v_bias, shape.num_kv_heads)
        if weights.q_norm is not None and weights.k_norm is not None:
            q, k = self.norm(q, weights.q_norm), self.norm(k, weights.k_norm)
        q, k = self.rotate(q), self.rotate(k)
        out = np.empty((len(h), shape.num_heads, shape.head_dim), np.float32)
        for head in range(shape.num_heads):
            kv = head // shape.group
            scores = q[:, head] @ k[:, kv].T * np.float32(shape.head_dim**-0.5) + self.mask
            scores = np.exp(scores - scores.max(axis=-1, keepdims=True))
            out[:, head] = scores / scores.sum(axis=-1, keepdims=True) @ v[:, kv]
        return out.reshape(len(h), -1)

    def project(
        self, h: Float32Array, weight: Float32Array, bias: Float32Array | None, heads: int
    ) -> Float32Array:
        rows = h @ weight.T
        if bias is not None:
            rows = rows + bias
        return np.asarray(rows.reshape(len(h), heads, self.shape.head_dim), np.float32)

    def rotate(self, x: Float32Array) -> Float32Array:
        half = self.shape.head_dim // 2
        low, high = x[..., :half], x[..., half:]
        turned = (low * self.cos - high * self.sin, high * self.cos + low * self.sin)
        return np.concatenate(turned, axis=-1)
