"""Weights from a Hugging Face folder."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from starsd_edge.errors import BundleError
from starsd_edge.types import Float32Array
from starsd_jetson.graph.checked_source import UNUSABLE, CheckedSource, hash_files, reason, shortened
from starsd_jetson.graph.shape import ModelShape, RopeScaling
from starsd_jetson.graph.tensor_files import open_safetensors, open_torch_bin

__all__ = ["FolderSource"]

SAFETENSORS, PICKLES = ".safetensors", "pytorch_model*.bin"
SAFETENSORS_INDEX, PICKLES_INDEX = "model.safetensors.index.json", "pytorch_model.bin.index.json"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model")  # the first that is there is the tokenizer
HF_ARCHITECTURES = {"llama": "llama", "mistral": "mistral", "qwen2": "qwen2", "qwen3": "qwen3"}


class FolderSource(CheckedSource):
    """A folder with config.json and (sharded) safetensors, or pytorch_model*.bin read through torch's
    weights_only loader. Raises BundleError for another architecture or a missing or damaged file."""

    def __init__(self, path: Path, context: int | None = None) -> None:
        self.path = path
        self.config = self.read_config()
        try:
            self.shape = shortened(self.read_shape(), context, path)
        except UNUSABLE as error:
            raise BundleError(f"{path / 'config.json'}: cannot be used ({reason(error)})") from error
        self.readers = self.open_weights()
        self.check()

    @property
    def name(self) -> str:
        return self.path.resolve().name

    def read_config(self) -> dict[str, Any]:
        file = self.path / "config.json"
        if not file.exists():
            raise BundleError(f"{self.path}: no config.json; give a GGUF file or a Hugging Face model folder")
        return read_object(file)

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
        readers: dict[str, Callable[[], Float32Array]] = {}
        for file in self.weight_files:
            readers |= open_safetensors(file) if file.suffix == SAFETENSORS else open_torch_bin(file)
        return readers

    @functools.cached_property
    def weight_files(self) -> list[Path]:
        """Those that an index names, where there is one: beside them may lie the same weights in their
        author's own layout."""
        for pattern, index in ((f"*{SAFETENSORS}", SAFETENSORS_INDEX), (PICKLES, PICKLES_INDEX)):
            files = sorted(self.path.glob(pattern))
            if (self.path / index).is_file():
                files = self.read_index(self.path / index)
            if files:
                return files
        raise BundleError(f"{self.path}: no *{SAFETENSORS} and no {PICKLES} in it")

    def read_index(self, file: Path) -> list[Path]:
        index = read_object(file)
        table = index.get("weight_map")
        if not isinstance(table, dict) or not all(is_file_name(name) for name in table.values()):
            raise BundleError(f"{file}: names no files of weights")
        files = [self.path / name for name in sorted(set(table.values()))]
        for shard in files:
            if not shard.exists():
                raise BundleError(f"{shard} is missing, which {file.name} names; fetch it again")
        return files

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
        return hash_files(self.weight_files)

    @property
    def tokenizer_path(self) -> Path:
        """Raises BundleError."""
        for name in TOKENIZER_FILES:
            if (self.path / name).is_file():
                return self.path / name
        raise BundleError(f"{self.path}: no {' and no '.join(TOKENIZER_FILES)} in it")

    def tokenizer_sha256(self) -> str:
        return hash_files([self.tokenizer_path])


def read_object(file: Path) -> dict[str, Any]:
    """A JSON object. Raises BundleError."""
    try:
        value = json.loads(file.read_text("utf-8"))
    except (ValueError, RecursionError, OSError) as error:
        raise BundleError(f"{file}: not JSON ({error})") from error
    if not isinstance(value, dict):
        raise BundleError(f"{file}: not a JSON object")
    return value


def is_file_name(name: Any) -> bool:
    """Of a file in the folder itself, of a kind that is read here."""
    return isinstance(name, str) and Path(name).name == name and name.endswith((SAFETENSORS, ".bin"))


def whole(value: Any) -> int:
    """A whole number of a JSON file. Raises ValueError for 1.5, null or text."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError(f"{value!r} is no whole number")
    return value


def read_max_len(config: dict[str, Any]) -> int:
    """The context. Within a sliding window attention is the full one, so a model that slides ends there;
    Vicuna's 16k models give the length before their frequencies were stretched, and the whole beside it."""
    longest = int(config.get("max_position_embeddings", 2048))
    longest = max(longest, int(config.get("max_sequence_length") or 0))
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
