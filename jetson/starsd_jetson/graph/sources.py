"""Where weights come from: a GGUF file or a Hugging Face folder, read one tensor at a time.

Both give the same thing: a ModelShape, and float32 tensors under Hugging Face's names and in its layout
(linear weights are [out, in], rotary halves are not interleaved).
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from starsd_edge.errors import BundleError, MissingDependencyError, UsageError
from starsd_edge.extras import install_hint
from starsd_edge.types import Float32Array
from starsd_jetson.graph.plausible import check_shape, check_tensor
from starsd_jetson.graph.shape import ModelShape, RopeScaling

__all__ = [
    "UNUSABLE",
    "GgufSource",
    "HuggingFaceSource",
    "WeightSource",
    "open_safetensors",
    "open_source",
]

# What reading numbers from a damaged or odd file ends in.
UNUSABLE = (KeyError, TypeError, ValueError, ZeroDivisionError, OverflowError, AttributeError, IndexError)
READ_BLOCK_BYTES = 1 << 22  # large enough that hashing is bound by the disk


class WeightSource(Protocol):
    """A model's shape and its tensors."""

    @property
    def path(self) -> Path: ...

    @property
    def name(self) -> str: ...

    @property
    def shape(self) -> ModelShape: ...

    def has(self, name: str) -> bool: ...

    def tensor(self, name: str) -> Float32Array:
        """The tensor of this Hugging Face name, float32. Raises BundleError if there is none."""
        ...

    def sha256(self) -> str:
        """Hash over the files that hold weights: the identity of the model whatever it is exported to."""
        ...

    def tokenizer_sha256(self) -> str:
        """Hash over the file that holds the tokenizer, as it lies there: what is made of it for a bundle
        may change with the package that makes it. Raises BundleError if there is none."""
        ...


class _Checked:
    """What both kinds of source have in common: nothing of them is believed unseen."""

    path: Path
    shape: ModelShape

    def has(self, name: str) -> bool:
        raise NotImplementedError

    def read(self, name: str) -> Float32Array:
        raise NotImplementedError

    def tensor(self, name: str) -> Float32Array:
        try:
            values = self.read(name)
        except ValueError as error:  # rows that do not divide among the heads
            raise BundleError(f"{self.path}: tensor {name} does not fit the model ({error})") from error
        check_tensor(name, values, self.shape, self.path)
        return values

    def check(self) -> None:
        """Raises BundleError."""
        check_shape(self.shape, self.path)
        if self.has(f"model.layers.{self.shape.num_layers}.input_layernorm.weight"):
            raise BundleError(f"{self.path}: it holds more layers than the {self.shape.num_layers} it says")


def open_source(path: Path, context: int | None = None) -> WeightSource:
    """A GGUF file or a Hugging Face folder, for `context` tokens where the model was made for more.

    Raises BundleError for anything else, naming what was found, UsageError for a context beyond the model's.
    """
    if path.is_dir():
        return HuggingFaceSource(path, context)
    if not path.exists():
        raise BundleError(
            f"{path}: no such file or folder; give a GGUF file, a Hugging Face folder, or 'embedded'"
        )
    if not path.is_file():
        raise BundleError(f"{path}: not a regular file")
    with path.open("rb") as file:
        magic = file.read(4)
    if magic != b"GGUF":
        raise BundleError(
            f"{path}: neither a GGUF file nor a folder with config.json (it starts with {magic!r})"
        )
    return GgufSource(path, context)


def shortened(shape: ModelShape, context: int | None, path: Path) -> ModelShape:
    if context is None:
        return shape
    if context > shape.max_len:
        raise UsageError(f"{path} was made for {shape.max_len} tokens of context, not for {context}")
    return replace(shape, max_len=context)


def _reason(error: Exception) -> str:
    return f"no {error}" if isinstance(error, KeyError) else str(error)


def hash_files(paths: list[Path]) -> str:
    digest = hashlib.sha256()
    for path in paths:
        with path.open("rb") as file:
            while block := file.read(READ_BLOCK_BYTES):
                digest.update(block)
    return digest.hexdigest()


# GGUF ------------------------------------------------------------------------------------------------------

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


class GgufSource(_Checked):
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
            raise BundleError(f"{path}: its metadata cannot be used ({_reason(error)})") from error
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


# Hugging Face ----------------------------------------------------------------------------------------------

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model")  # the first that is there is the tokenizer
HF_ARCHITECTURES = {"llama": "llama", "mistral": "mistral", "qwen2": "qwen2", "qwen3": "qwen3"}


class HuggingFaceSource(_Checked):
    """A folder with config.json and (sharded) safetensors, or pytorch_model*.bin read through torch's
    weights_only loader. Raises BundleError for another architecture or a missing or damaged file."""

    def __init__(self, path: Path, context: int | None = None) -> None:
        self.path = path
        self.config = self.read_config()
        try:
            self.shape = shortened(self.read_shape(), context, path)
        except UNUSABLE as error:
            raise BundleError(f"{path / 'config.json'}: cannot be used ({_reason(error)})") from error
        self.readers = self.open_weights()
        self.check()

    @property
    def name(self) -> str:
        return self.path.resolve().name

    def read_config(self) -> dict[str, Any]:
        file = self.path / "config.json"
        if not file.exists():
            raise BundleError(f"{self.path}: no config.json; give a GGUF file or a Hugging Face model folder")
        try:
            config = json.loads(file.read_text("utf-8"))
        except (ValueError, RecursionError, OSError) as error:
            raise BundleError(f"{file}: not JSON ({error})") from error
        if not isinstance(config, dict):
            raise BundleError(f"{file}: not a JSON object")
        return config

    def read_shape(self) -> ModelShape:
        config = self.config
        kind = str(config.get("model_type", ""))
        if kind not in HF_ARCHITECTURES:
            known = ", ".join(sorted(HF_ARCHITECTURES))
            raise BundleError(f"{self.path}: architecture '{kind}' is not supported (supported: {known})")
        if config.get("hidden_act", "silu") != "silu":
            raise BundleError(
                f"{self.path}: activation '{config['hidden_act']}' is not supported (supported: silu)"
            )
        if config.get("mlp_bias") or (kind != "qwen2" and config.get("attention_bias")):
            raise BundleError(f"{self.path}: biases outside Qwen2's projections are not supported")
        num_heads = whole(config["num_attention_heads"])
        return ModelShape(
            architecture=HF_ARCHITECTURES[kind],
            num_layers=whole(config["num_hidden_layers"]),
            hidden_size=whole(config["hidden_size"]),
            ffn_size=whole(config["intermediate_size"]),
            num_heads=num_heads,
            num_kv_heads=whole(config.get("num_key_value_heads") or num_heads),
            head_dim=whole(config.get("head_dim") or config["hidden_size"] // num_heads),
            vocab_size=whole(config["vocab_size"]),
            max_len=read_max_len(config),
            norm_eps=float(config.get("rms_norm_eps", 1e-6)),
            rope_theta=read_rope_theta(config),
            rope_scaling=read_rope_scaling(config, self.path),
            tied_embedding=bool(config.get("tie_word_embeddings", False)),
            qkv_bias=kind == "qwen2",
            qk_norm=kind == "qwen3",
        )

    def open_weights(self) -> dict[str, Callable[[], Float32Array]]:
        files = sorted(self.path.glob("*.safetensors"))
        if files:
            return {name: read for file in files for name, read in open_safetensors(file).items()}
        files = sorted(self.path.glob("pytorch_model*.bin"))
        if files:
            return {name: read for file in files for name, read in open_torch_bin(file).items()}
        raise BundleError(f"{self.path}: no *.safetensors and no pytorch_model*.bin in it")

    def has(self, name: str) -> bool:
        return name in self.readers

    def read(self, name: str) -> Float32Array:
        read = self.readers.get(name)
        if read is None:
            raise BundleError(f"{self.path}: tensor {name} is missing")
        return read()

    def sha256(self) -> str:
        return self._sha256

    @functools.cached_property
    def _sha256(self) -> str:
        files = sorted(self.path.glob("*.safetensors")) or sorted(self.path.glob("pytorch_model*.bin"))
        return hash_files(files)

    @property
    def tokenizer_path(self) -> Path:
        """Raises BundleError."""
        for name in TOKENIZER_FILES:
            if (self.path / name).is_file():
                return self.path / name
        raise BundleError(f"{self.path}: no {' and no '.join(TOKENIZER_FILES)} in it")

    def tokenizer_sha256(self) -> str:
        return hash_files([self.tokenizer_path])


def whole(value: Any) -> int:
    """A whole number of a JSON file. Raises ValueError for 1.5, null or text."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError(f"{value!r} is no whole number")
    return value


def read_max_len(config: dict[str, Any]) -> int:
    """The context. Within a sliding window attention is the full one, so a model that slides ends there."""
    longest = int(config.get("max_position_embeddings", 2048))
    window = config.get("sliding_window")
    slides = config.get("use_sliding_window", True)
    return min(longest, int(window)) if window and slides else longest


def read_rope_theta(config: dict[str, Any]) -> float:
    parameters = config.get("rope_parameters") or {}
    return float(config.get("rope_theta") or parameters.get("rope_theta") or 10000.0)


def read_rope_scaling(config: dict[str, Any], path: Path) -> RopeScaling | None:
    scaling = config.get("rope_scaling") or config.get("rope_parameters")
    if not scaling:
        return None
    kind = str(scaling.get("rope_type") or scaling.get("type") or "default")
    if kind == "default":
        return None
    if kind == "linear":
        return RopeScaling("linear", factor=float(scaling["factor"]))
    if kind == "llama3":
        return RopeScaling(
            "llama3",
            factor=float(scaling["factor"]),
            low_freq_factor=float(scaling["low_freq_factor"]),
            high_freq_factor=float(scaling["high_freq_factor"]),
            original_max_len=int(scaling["original_max_position_embeddings"]),
        )
    raise BundleError(f"{path}: rope scaling '{kind}' is not supported (supported: linear, llama3)")


SAFETENSORS_DTYPES: dict[str, np.dtype[Any]] = {
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype("<u2"),
}


def open_safetensors(path: Path) -> dict[str, Callable[[], Float32Array]]:
    """Readers of the tensors of one file; each reads its own bytes when called. The format is 8 bytes of
    header length, a JSON header and raw little-endian data (read here because bfloat16 has no numpy type)."""
    try:
        return _open_safetensors(path)
    except OSError as error:
        raise BundleError(f"{path}: cannot be read ({error.strerror}); fetch it again") from error
    except (*UNUSABLE, RecursionError) as error:
        raise BundleError(f"{path}: damaged safetensors header ({_reason(error)})") from error


def _open_safetensors(path: Path) -> dict[str, Callable[[], Float32Array]]:
    size = path.stat().st_size
    if not path.is_file():  # a pipe would keep its reader waiting for ever
        raise BundleError(f"{path}: not a regular file")
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > size - 8:
            raise BundleError(f"{path}: cut short or not a safetensors file; fetch it again")
        header = json.loads(file.read(length))
    header.pop("__metadata__", None)
    start = 8 + length
    readers: dict[str, Callable[[], Float32Array]] = {}
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        shape = tuple(entry["shape"])
        dtype = SAFETENSORS_DTYPES.get(entry["dtype"])
        if start + end > size:
            raise BundleError(f"{path}: cut short, {size} of {start + end} bytes; fetch it again")
        if dtype is None:
            # integer buffers such as position_ids; a weight that is missed here is named when asked for
            continue
        if math.prod(shape) * dtype.itemsize != end - begin:
            raise BundleError(f"{path}: {name} has {end - begin} bytes for shape {shape}")
        readers[name] = safetensors_reader(path, start + begin, shape, dtype)
    return readers


def safetensors_reader(
    path: Path, offset: int, shape: tuple[int, ...], dtype: np.dtype[Any]
) -> Callable[[], Float32Array]:
    def read() -> Float32Array:
        values = np.fromfile(path, dtype, math.prod(shape), offset=offset).reshape(shape)
        if dtype == np.dtype("<u2"):
            return widen_bfloat16(values)
        return values.astype(np.float32)

    return read


def widen_bfloat16(bits: np.ndarray[Any, np.dtype[np.uint16]]) -> Float32Array:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def open_torch_bin(path: Path) -> dict[str, Callable[[], Float32Array]]:
    try:
        import torch
    except ImportError as error:
        raise MissingDependencyError(
            f"{path} is a PyTorch file: install torch to read it, or convert the folder to safetensors"
        ) from error
    try:
        tensors = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except Exception as error:  # torch raises a different class for every way a file can be damaged
        raise BundleError(f"{path}: torch cannot read it with weights_only ({error})") from error
    return {name: torch_reader(value) for name, value in tensors.items()}


def torch_reader(value: Any) -> Callable[[], Float32Array]:
    return lambda: np.asarray(value.float().numpy(), np.float32)
