"""Weights from a GGUF file."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np

from starsd_edge.errors import BundleError, MissingDependencyError
from starsd_edge.extras import install_hint
from starsd_edge.types import Float32Array
from starsd_jetson.graph.checked_source import UNUSABLE, CheckedSource, hash_files, reason, shortened
from starsd_jetson.graph.shape import ModelShape, RopeScaling

__all__ = ["GgufSource"]

GGUF_ARCHITECTURES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "mistral": "mistral"}
# llama.cpp's converter interleaves the rotary halves of q and k for these; the others keep Hugging Face's
# order.
GGUF_PERMUTED = ("llama", "mistral")
NO_WINDOW = 1 << 31  # longer than any context
GGUF_LAYER_NAMES = {
    "input_layernorm.weight": "attn_norm.weight",
    "self_attn.q_proj.weight": "attn_q.weight",
    "self_attn.k_proj.weight": "attn_k.weight",
    "self_attn.v_proj.weight": "attn_v.weight",
    "self_attn.q_proj.bias": "attn_q.bias",
    "self_attn.k_proj.bias": "attn_k.bias",
    "self_attn.v_proj.bias": "attn_v.bias",
    "self_attn.q_norm.weight": "attn_q_norm.weight",
    "self_attn.k_norm.weight": "attn_k_norm.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "mlp.gate_proj.weight": "ffn_gate.weight",
    "mlp.up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight",
}
GGUF_MODEL_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}


class GgufSource(CheckedSource):
    """A GGUF file of a Llama-architecture model. Raises BundleError for another architecture or a cut
    file.
    """

    def __init__(self, path: Path, context: int | None = None) -> None:
        try:
            from gguf import GGUFReader
        except ImportError as error:
            raise MissingDependencyError(
                f"reading GGUF needs the gguf package: {install_hint('export')}"
            ) from error
        self.path = path
        try:
            self.reader = GGUFReader(path)
        except (ValueError, KeyError, IndexError, UnicodeDecodeError, OverflowError) as error:
            raise BundleError(f"{path}: damaged or cut short GGUF file ({error}); fetch it again") from error
        self.fields: dict[str, Any] = {key: field.contents for key, field in self.reader.fields.items()}
        self.tensors = {tensor.name: tensor for tensor in self.reader.tensors}
        self.check_complete()
        try:
            self.shape = shortened(self.read_shape(), context, path)
        except UNUSABLE as error:
            raise BundleError(f"{path}: its metadata cannot be used ({reason(error)})") from error
        self.check()

    @property
    def name(self) -> str:
        return str(self.field("general.name", self.path.stem))

    def field(self, key: str, default: Any = None) -> Any:
        contents = self.fields.get(key)
        return default if contents is None else contents()

    def check_complete(self) -> None:
        size = self.path.stat().st_size
        needed = max((int(t.data_offset) + int(t.n_bytes) for t in self.reader.tensors), default=0)
        if size < needed or not self.tensors:
            raise BundleError(f"{self.path}: cut short, {size} of {needed} bytes; fetch it again")

    def read_shape(self) -> ModelShape:
        architecture = str(self.field("general.architecture", ""))
        if architecture not in GGUF_ARCHITECTURES:
            known = ", ".join(sorted(GGUF_ARCHITECTURES))
            raise BundleError(
                f"{self.path}: architecture '{architecture}' is not supported (supported: {known})"
            )

        def number(key: str, default: Any = None) -> Any:
            value = self.field(f"{architecture}.{key}", default)
            if value is None:
                raise BundleError(f"{self.path}: no '{architecture}.{key}' in its metadata")
            return value

        hidden_size = int(number("embedding_length"))
        num_heads = int(number("attention.head_count"))
        head_dim = int(number("attention.key_length", hidden_size // num_heads))
        return ModelShape(
            architecture=GGUF_ARCHITECTURES[architecture],
            num_layers=int(number("block_count")),
            hidden_size=hidden_size,
            ffn_size=int(number("feed_forward_length")),
            num_heads=num_heads,
            num_kv_heads=int(number("attention.head_count_kv", num_heads)),
            head_dim=head_dim,
            vocab_size=int(self.tensors["token_embd.weight"].shape[1]),
            max_len=min(
                int(number("context_length")), int(number("attention.sliding_window", 0)) or NO_WINDOW
            ),
            norm_eps=float(
                f"{number('attention.layer_norm_rms_epsilon'):.6g}"
            ),  # a float32: 1e-05, not 9.99999974e-06
            rope_theta=float(number("rope.freq_base", 10000.0)),
            rope_scaling=self.read_rope_scaling(architecture),
            tied_embedding="output.weight" not in self.tensors,
            qkv_bias="blk.0.attn_q.bias" in self.tensors,
            qk_norm="blk.0.attn_q_norm.weight" in self.tensors,
        )

    def read_rope_scaling(self, architecture: str) -> RopeScaling | None:
        if "rope_freqs.weight" in self.tensors:
            factors = tuple(float(value) for value in self.raw_tensor("rope_freqs.weight"))
            return RopeScaling("factors", factors=factors)
        kind = self.field(f"{architecture}.rope.scaling.type", "none")
        if kind in ("none", ""):
            return None
        if kind == "linear":
            return RopeScaling("linear", factor=float(self.field(f"{architecture}.rope.scaling.factor", 1.0)))
        raise BundleError(f"{self.path}: rope scaling '{kind}' is not supported (supported: linear, llama3)")

    def gguf_name(self, name: str) -> str:
        if name in GGUF_MODEL_NAMES:
            return GGUF_MODEL_NAMES[name]
        _, _, layer, rest = name.split(".", 3)
        return f"blk.{layer}.{GGUF_LAYER_NAMES[rest]}"

    def has(self, name: str) -> bool:
        return self.gguf_name(name) in self.tensors

    def raw_tensor(self, name: str) -> Float32Array:
        from gguf.quants import dequantize

        tensor = self.tensors.get(name)
        if tensor is None:
            raise BundleError(f"{self.path}: tensor {name} is missing")
        try:
            return np.asarray(dequantize(tensor.data, tensor.tensor_type), np.float32)
        except NotImplementedError as error:
            kind = tensor.tensor_type.name
            raise BundleError(f"{self.path}: {name} is stored as {kind}, which cannot be read") from error

    def read(self, name: str) -> Float32Array:
        weight = self.raw_tensor(self.gguf_name(name))
        permuted = str(self.field("general.architecture")) in GGUF_PERMUTED
        if permuted and ".self_attn.q_proj." in name:
            return unpermute(weight, self.shape.num_heads)
        if permuted and ".self_attn.k_proj." in name:
            return unpermute(weight, self.shape.num_kv_heads)
        return weight

    def sha256(self) -> str:
        return self._sha256

    def tokenizer_sha256(self) -> str:
        return self._sha256

    @functools.cached_property
    def _sha256(self) -> str:
        return hash_files([self.path])


def unpermute(weight: Float32Array, num_heads: int) -> Float32Array:
    """Undo llama.cpp's interleaving of rotary pairs: rows [heads, half, 2] back to [heads, 2, half]."""
    rows = weight.reshape(num_heads, weight.shape[0] // num_heads // 2, 2, *weight.shape[1:])
    return np.ascontiguousarray(rows.swapaxes(1, 2)).reshape(weight.shape)
