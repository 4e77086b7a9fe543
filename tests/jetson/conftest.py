"""Small models with random weights, made by transformers, and their bundles."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from starsd_jetson.export import ExportSettings, export
from starsd_jetson.onnx_target import OnnxTarget

VOCAB = 160
SMALL: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
FAMILIES: dict[str, Any] = {
    "llama grouped": LlamaConfig(**SMALL),
    "llama ungrouped, tied": LlamaConfig(**{**SMALL, "num_key_value_heads": 4, "tie_word_embeddings": True}),
    # Rows of 256, as the blocks of GGUF's K-quants need them.
    "llama wide": LlamaConfig(
        **{**SMALL, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 1}
    ),
    # What tells the published families apart, in small.
    "llama 1": LlamaConfig(**{**SMALL, "num_key_value_heads": 4, "rms_norm_eps": 1e-6}),
    "llama 2": LlamaConfig(**{**SMALL, "num_key_value_heads": 4, "rms_norm_eps": 1e-5}),
    "llama 3": LlamaConfig(**SMALL, rope_parameters={"rope_type": "default", "rope_theta": 500000.0}),
    "llama 3.1": LlamaConfig(**SMALL, rope_parameters=LLAMA3_ROPE),
    "llama 3.2": LlamaConfig(
        **{**SMALL, "tie_word_embeddings": True, "head_dim": 32}, rope_parameters=LLAMA3_ROPE
    ),
    "vicuna 16k": LlamaConfig(
        **{**SMALL, "num_key_value_heads": 4},
        rope_parameters={"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    ),
    "tinyllama": LlamaConfig(**{**SMALL, "num_attention_heads": 8, "num_key_value_heads": 1}),
    "smollm2": LlamaConfig(
        **{**SMALL, "hidden_size": 96, "num_attention_heads": 6, "tie_word_embeddings": True},
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
    ),
    "mistral": MistralConfig(**SMALL, sliding_window=None),
    "qwen2": Qwen2Config(**SMALL),
    "qwen2.5": Qwen2Config(
        **{**SMALL, "tie_word_embeddings": True, "rms_norm_eps": 1e-6},
        rope_parameters={"rope_type": "default", "rope_theta": 1000000.0},
    ),
    "qwen3": Qwen3Config(**SMALL, head_dim=32),
    "qwen3, tied": Qwen3Config(
        **{**SMALL, "tie_word_embeddings": True},
        head_dim=32,
        rope_parameters={"rope_type": "default", "rope_theta": 1000000.0},
    ),
}


@dataclass(frozen=True)
class TinyModel:
    """A model of transformers and the folder it was saved to."""

    folder: Path
    reference: Any

    def export(self, out: Path, **settings: Any) -> OnnxTarget:
        return OnnxTarget.load(export(self.folder, out, ExportSettings(**settings)), threads=1)


def write_tokenizer(folder: Path) -> None:
    """One token a character, enough for texts of the self-test."""
    tokens = {"<unk>": 0, "<s>": 1, "</s>": 2} | {chr(code): code for code in range(32, 127)}
    tokenizer = Tokenizer(WordLevel(tokens, unk_token="<unk>"))
    tokenizer.decoder = ByteLevel()
    tokenizer.pre_tokenizer = Split("", "isolated")
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.save(str(folder / "tokenizer.json"))


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], TinyModel]:
    made: dict[str, TinyModel] = {}

    def make(family: str) -> TinyModel:
        if family not in made:
            torch.manual_seed(0)
            model = AutoModelForCausalLM.from_config(FAMILIES[family]).eval()
            for name, weight in model.named_parameters():  # gains and biases are born as ones and zeros
                if weight.ndim == 1:
                    torch.nn.init.normal_(weight, mean=0.0 if name.endswith("bias") else 1.0, std=0.3)
            folder = tmp_path_factory.mktemp("model")
            model.save_pretrained(folder)
            write_tokenizer(folder)
            (folder / "chat_template.jinja").write_text("{{ messages[-1]['content'] }}")
            made[family] = TinyModel(folder, model)
        return made[family]

    return make


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(7)
