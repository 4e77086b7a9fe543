"""A Hugging Face folder of random float16 weights in any Llama shape, in shards as published ones come.

    python tests/jetson/random_model.py FOLDER [layers]      a Vicuna-7B shape; 32 layers are 13.5 GB

To see how much memory an export takes without downloading a model.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split

VICUNA_7B = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "num_hidden_layers": 32,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 2,
}


SHARD_BYTES = 2_000_000_000
Entry = tuple[str, tuple[int, ...]]


def tensors(config: dict[str, int]) -> Iterator[Entry]:
    hidden, ffn = config["hidden_size"], config["intermediate_size"]
    kv = hidden * config["num_key_value_heads"] // config["num_attention_heads"]
    yield "model.embed_tokens.weight", (config["vocab_size"], hidden)
    for layer in range(config["num_hidden_layers"]):
        name = f"model.layers.{layer}."
        yield name + "input_layernorm.weight", (hidden,)
        yield name + "post_attention_layernorm.weight", (hidden,)
        for letter, rows in (("q", hidden), ("k", kv), ("v", kv), ("o", hidden)):
            yield f"{name}self_attn.{letter}_proj.weight", (rows, hidden)
        yield name + "mlp.gate_proj.weight", (ffn, hidden)
        yield name + "mlp.up_proj.weight", (ffn, hidden)
        yield name + "mlp.down_proj.weight", (hidden, ffn)
    yield "model.norm.weight", (hidden,)
    yield "lm_head.weight", (config["vocab_size"], hidden)


def write_random_model(folder: Path, config: dict[str, int]) -> None:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").write_text("{{ messages[-1]['content'] }}")
    tokens = {"<unk>": 0} | {chr(code): code for code in range(32, 127)}
    tokenizer = Tokenizer(WordLevel(tokens, unk_token="<unk>"))
    tokenizer.decoder = ByteLevel()
    tokenizer.pre_tokenizer = Split("", "isolated")
    tokenizer.save(str(folder / "tokenizer.json"))
    rng = np.random.default_rng(0)
    pool = (rng.standard_normal(1 << 22, np.float32) * 0.02).astype(np.float16)
    shards = split_into_shards(list(tensors(config)))
    for number, shard in enumerate(shards, 1):
        write_shard(folder / f"model-{number:05}-of-{len(shards):05}.safetensors", shard, rng, pool)


def split_into_shards(entries: list[Entry]) -> list[list[Entry]]:
    shards: list[list[Entry]] = [[]]
    size = 0
    for name, shape in entries:
        if size > SHARD_BYTES:
            shards.append([])
            size = 0
        shards[-1].append((name, shape))
        size += 2 * int(np.prod(shape))
    return shards


def write_shard(path: Path, entries: list[Entry], rng: np.random.Generator, pool: np.ndarray) -> None:
    header, offset = {}, 0
    for name, shape in entries:
        size = 2 * int(np.prod(shape))
        header[name] = {"dtype": "F16", "shape": shape, "data_offsets": [offset, offset + size]}
        offset += size
    encoded = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        for _, shape in entries:
            if len(shape) == 1:
                file.write(np.ones(shape, np.float16).tobytes())
                continue
            left = int(np.prod(shape))
            while left:
                part = pool[int(rng.integers(0, 64)) : min(len(pool), left)]
                file.write(part.tobytes())
                left -= len(part)


if __name__ == "__main__":
    layers = int(sys.argv[2]) if len(sys.argv) > 2 else VICUNA_7B["num_hidden_layers"]
    write_random_model(Path(sys.argv[1]), VICUNA_7B | {"num_hidden_layers": layers})
