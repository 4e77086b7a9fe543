"""What a Llama-architecture model looks like: the numbers, none of the weights."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from starsd_edge.types import Float32Array, Float64Array

__all__ = ["ModelShape", "RopeScaling"]


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """How the rotary frequencies are stretched; `kind` is `linear`, `llama3` or `factors`.

    linear   every frequency divided by `factor`
    llama3   Llama 3.1's smooth step between unscaled short waves and divided long waves
    factors  one divisor a frequency, as GGUF's `rope_freqs.weight` gives them
    """

    kind: str
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_len: int = 8192
    factors: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Dimensions of one model.

    qkv_bias  Qwen2: biases on the query, key and value projections
    qk_norm   Qwen3: RMSNorm with a gain over every query and key head
    """

    architecture: str
    num_layers: int
    hidden_size: int
    ffn_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_len: int
    norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None = None
    tied_embedding: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False

    @property
    def group(self) -> int:
        """Query heads that share one key/value head."""
        return self.num_heads // self.num_kv_heads

    def rope_frequencies(self) -> Float64Array:
        """float64 [head_dim / 2], radians a position."""
        half = np.arange(0, self.head_dim, 2, dtype=np.float64) / self.head_dim
        frequencies: Float64Array = 1.0 / self.rope_theta**half
        scaling = self.rope_scaling
        if scaling is None:
            return frequencies
        if scaling.kind == "linear":
            return frequencies / scaling.factor
        if scaling.kind == "factors":
            return frequencies / np.asarray(scaling.factors, np.float64)
        # Llama 3.1: waves shorter than original_max_len / high stay, longer than / low are divided, between
        # blended.
        turns = scaling.original_max_len * frequencies / (2 * np.pi)
        blend = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
        blend = np.clip(blend, 0.0, 1.0)
        return np.asarray(frequencies * (blend + (1 - blend) / scaling.factor), np.float64)

    def rope_table(self) -> tuple[Float32Array, Float32Array]:
        """cos and sin, each float32 [max_len, head_dim / 2]."""
        angles = np.outer(np.arange(self.max_len, dtype=np.float64), self.rope_frequencies())
        return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
