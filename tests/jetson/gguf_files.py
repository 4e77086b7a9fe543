"""GGUF files of small models, as llama.cpp's converter writes them, and SentencePiece's model files."""

from __future__ import annotations

import struct
from pathlib import Path

import gguf
import numpy as np

from starsd_jetson.graph.gguf_source import GGUF_LAYER_NAMES, GGUF_MODEL_NAMES
from starsd_jetson.graph.sources import open_source
from starsd_jetson.sentencepiece import Piece
from tests.jetson.k_quants import K_QUANTS

Kind = gguf.GGMLQuantizationType
LETTERS = [chr(code) for code in range(33, 127)]


def permute(weight: np.ndarray, heads: int) -> np.ndarray:
    """What llama.cpp's converter does to q and k of Llama models."""
    rows = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return rows.swapaxes(1, 2).reshape(weight.shape)


def write_gguf(
    folder: Path,
    path: Path,
    kind: Kind = Kind.F32,
    architecture: str = "llama",
    pieces: list[Piece] | None = None,
    name: str | None = None,
    prepend: bool = True,
    rope_factors: np.ndarray | None = None,
) -> Path:
    """The Hugging Face model in `folder` as a GGUF file, matrices stored as `kind`; with `pieces` its
    tokenizer is SentencePiece's, else a byte-level one of few tokens. `rope_factors` float32 [dim / 2]: what
    every frequency is divided by."""
    source = open_source(folder)
    shape = source.shape
    writer = gguf.GGUFWriter(path, architecture)
    if name is not None:
        writer.add_name(name)
    writer.add_context_length(shape.max_len)
    writer.add_embedding_length(shape.hidden_size)
    writer.add_block_count(shape.num_layers)
    writer.add_feed_forward_length(shape.ffn_size)
    writer.add_head_count(shape.num_heads)
    writer.add_head_count_kv(shape.num_kv_heads)
    writer.add_key_length(shape.head_dim)
    writer.add_layer_norm_rms_eps(shape.norm_eps)
    writer.add_rope_freq_base(shape.rope_theta)
    add_byte_level(writer) if pieces is None else add_sentencepiece(writer, pieces, prepend)
    if rope_factors is not None:
        writer.add_tensor("rope_freqs.weight", rope_factors)
    names = dict(GGUF_MODEL_NAMES)
    for layer in range(shape.num_layers):
        for name, short in GGUF_LAYER_NAMES.items():
            names[f"model.layers.{layer}.{name}"] = f"blk.{layer}.{short}"
    for name, short in names.items():
        if not source.has(name):
            continue
        weight = source.tensor(name)
        if architecture == "llama" and ("q_proj" in name or "k_proj" in name):
            weight = permute(weight, shape.num_heads if "q_proj" in name else shape.num_kv_heads)
        if weight.ndim == 1:
            writer.add_tensor(short, weight)
        else:
            packed = K_QUANTS[kind](weight) if kind in K_QUANTS else gguf.quants.quantize(weight, kind)
            writer.add_tensor(short, packed, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add_byte_level(writer: gguf.GGUFWriter) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "Ġ", *LETTERS]
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3, 3, *[1] * (len(tokens) - 3)])
    writer.add_token_merges(["t h", "th e"])
    writer.add_eos_token_id(2)


def add_sentencepiece(writer: gguf.GGUFWriter, pieces: list[Piece], prepend: bool) -> None:
    writer.add_tokenizer_model("llama")
    writer.add_token_list([piece.text for piece in pieces])
    writer.add_token_scores([piece.score for piece in pieces])
    writer.add_token_types([piece.kind for piece in pieces])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    if not prepend:
        writer.add_add_space_prefix(False)


def sentencepiece_model(pieces: list[Piece]) -> bytes:
    """A tokenizer.model (a protocol-buffer message)."""
    return b"".join(_message(b"\x0a", _piece(piece)) for piece in pieces)


def _piece(piece: Piece) -> bytes:
    score, kind = struct.pack("<f", piece.score), bytes([piece.kind])
    return _message(b"\x0a", piece.text.encode()) + b"\x15" + score + b"\x18" + kind


def _message(tag: bytes, body: bytes) -> bytes:
    return tag + bytes([len(body)]) + body
