"""Published models and heads in small: the recordings' random weights in the files that Vicuna and EAGLE's
authors publish.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file

from starsd_jetson.sentencepiece import Piece, sentencepiece_json
from tests.jetson.gguf_files import sentencepiece_model, write_gguf

__all__ = ["EAGLE1", "EAGLE3", "GOLDEN", "SOURCES", "vicuna_folder"]

GOLDEN = Path(__file__).parents[1] / "server" / "golden" / "eagle"
EAGLE1 = GOLDEN / "heads" / "eagle1-bias"
EAGLE3 = GOLDEN / "heads" / "eagle3-small-vocab"
TARGET = GOLDEN / "targets" / "mha-8"  # of both; safetensors and tokenizer.json
VOCAB = 512
UNKNOWN, CONTROL, NORMAL, BYTE = 2, 3, 1, 6  # kinds of pieces


def pieces() -> list[Piece]:
    """A vocabulary as Llama's: special tokens, bytes, and words of one and two letters."""
    letters = ["▁", *(chr(code) for code in range(33, 127))]
    words = [f"▁{first}" for first in letters[1:]] + [f"{first}e" for first in letters[1:]]
    said = [Piece(text, -float(rank), NORMAL) for rank, text in enumerate(words + letters)]
    special = [Piece("<unk>", 0.0, UNKNOWN), Piece("<s>", 0.0, CONTROL), Piece("</s>", 0.0, CONTROL)]
    raw = [Piece(f"<0x{byte:02X}>", 0.0, BYTE) for byte in range(256)]
    return [*special, *raw, *said][:VOCAB]


def vicuna_folder(folder: Path) -> Path:
    """lmsys/vicuna-7b-v1.3's files: config.json, pytorch_model.bin, tokenizer.model; no chat template."""
    made = folder / "vicuna-tiny-v1.3"
    made.mkdir()
    shutil.copy(TARGET / "config.json", made)
    torch.save(load_file(TARGET / "model.safetensors"), made / "pytorch_model.bin")
    (made / "tokenizer.model").write_bytes(sentencepiece_model(pieces()))
    return made


def llama_folder(folder: Path) -> Path:
    """The layout of newer models: safetensors and tokenizer.json."""
    made = Path(shutil.copytree(TARGET, folder / "llama-tiny"))
    (made / "tokenizer.json").write_text(sentencepiece_json(pieces(), prepend=True), "utf-8")
    return made


def gguf_file(folder: Path) -> Path:
    """As llama.cpp's converter makes one of Vicuna: it names the model, and carries no chat template."""
    return write_gguf(TARGET, folder / "tiny.f32.gguf", pieces=pieces(), name="Vicuna Tiny v1.3")


SOURCES = {"tokenizer.model": vicuna_folder, "tokenizer.json": llama_folder, "GGUF": gguf_file}
