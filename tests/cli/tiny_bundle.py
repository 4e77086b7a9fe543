"""A real bundle of a tiny random Llama with a real tokenizer, exported in a second."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from starsd_jetson.export import ExportSettings, export
from tests.core.text.vocabularies import byte_level

HIDDEN, FFN, LAYERS, HEADS, KV_HEADS = 64, 96, 2, 4, 2
MAX_LEN = 512
SETTINGS = ExportSettings(quant="fp32", chat_template="chatml")


def make_bundle(folder: Path, settings: ExportSettings = SETTINGS) -> Path:
    """`folder`/tiny, a bundle."""
    source, bundle = folder / "source", folder / "tiny"
    source.mkdir()
    vocab_size = len(json.loads(byte_level())["model"]["vocab"]) + 1  # and the added token
    (source / "tokenizer.json").write_text(byte_level(), encoding="utf-8")
    (source / "config.json").write_text(
        json.dumps(
            {
                "architectures": ["LlamaForCausalLM"],
                "model_type": "llama",
                "vocab_size": vocab_size,
                "hidden_size": HIDDEN,
                "intermediate_size": FFN,
                "num_hidden_layers": LAYERS,
                "num_attention_heads": HEADS,
                "num_key_value_heads": KV_HEADS,
                "max_position_embeddings": MAX_LEN,
                "rms_norm_eps": 1e-5,
                "rope_theta": 10000.0,
                "hidden_act": "silu",
                "tie_word_embeddings": False,
                "bos_token_id": 1,
                "eos_token_id": 2,
            }
        )
    )
    (source / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    save_file(_weights(vocab_size), str(source / "model.safetensors"))
    export(source, bundle, settings)
    return bundle


def _weights(vocab_size: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(3)
    head_dim = HIDDEN // HEADS

    def matrix(rows: int, columns: int) -> np.ndarray:
        return (rng.standard_normal((rows, columns)) / np.sqrt(columns)).astype(np.float32)

    weights = {
        "model.embed_tokens.weight": matrix(vocab_size, HIDDEN),
        "lm_head.weight": 4 * matrix(vocab_size, HIDDEN),
        "model.norm.weight": np.ones(HIDDEN, np.float32),
    }
    for layer in range(LAYERS):
        name = f"model.layers.{layer}"
        weights |= {
            f"{name}.self_attn.q_proj.weight": matrix(HEADS * head_dim, HIDDEN),
            f"{name}.self_attn.k_proj.weight": matrix(KV_HEADS * head_dim, HIDDEN),
            f"{name}.self_attn.v_proj.weight": matrix(KV_HEADS * head_dim, HIDDEN),
            f"{name}.self_attn.o_proj.weight": matrix(HIDDEN, HEADS * head_dim),
            f"{name}.mlp.gate_proj.weight": matrix(FFN, HIDDEN),
            f"{name}.mlp.up_proj.weight": matrix(FFN, HIDDEN),
            f"{name}.mlp.down_proj.weight": matrix(HIDDEN, FFN),
            f"{name}.input_layernorm.weight": np.ones(HIDDEN, np.float32),
            f"{name}.post_attention_layernorm.weight": np.ones(HIDDEN, np.float32),
        }
    return weights
