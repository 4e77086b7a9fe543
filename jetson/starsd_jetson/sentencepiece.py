"""SentencePiece BPE vocabularies as tokenizer.json: Llama 1 and 2, Vicuna, TinyLlama, Mistral.

The model file is a protocol-buffer message of which a few fields matter (sentencepiece_model.proto:
ModelProto has the pieces in field 1; a piece has text 1, score 2, type 3), so it is read here without the
library.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from starsd_edge.errors import BundleError

__all__ = ["Piece", "read_pieces", "sentencepiece_json"]

NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4
VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5  # protocol-buffer wire types
SPACE = "\u2581"


@dataclass(frozen=True, slots=True)
class Piece:
    """One entry of the vocabulary; its id is its place."""

    text: str
    score: float
    kind: int


def sentencepiece_json(pieces: list[Piece], *, prepend: bool) -> str:
    """The tokenizer.json that Llama 2 ships, for these pieces. `prepend` puts a space before every text."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors

    vocabulary = {piece.text: index for index, piece in enumerate(pieces)}
    unknown = next((piece.text for piece in pieces if piece.kind == UNKNOWN), None)
    tokenizer = Tokenizer(
        models.BPE(
            vocabulary, merges(pieces, vocabulary), unk_token=unknown, fuse_unk=True, byte_fallback=True
        )
    )
    steps = [normalizers.Prepend(SPACE)] if prepend else []
    tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", SPACE)])
    ends = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*ends, *([decoders.Strip(" ", 1, 0)] if prepend else [])])
    tokenizer.add_special_tokens(
        [AddedToken(p.text, normalized=False, special=True) for p in pieces if p.kind in (UNKNOWN, CONTROL)]
    )
    tokenizer.add_tokens([AddedToken(p.text, normalized=False) for p in pieces if p.kind == USER_DEFINED])
    if "<s>" in vocabulary:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", vocabulary["<s>"])]
        )
    return str(tokenizer.to_str())


def merges(pieces: list[Piece], vocabulary: dict[str, int]) -> list[tuple[str, str]]:
    """SentencePiece merges the pair whose product scores best; BPE wants that order written out."""
    found = []
    for piece in pieces:
        if piece.kind != NORMAL:
            continue
        splits = [(piece.text[:i], piece.text[i:]) for i in range(1, len(piece.text))]
        known = [(a, b) for a, b in splits if a in vocabulary and b in vocabulary]
        found += [
            (piece.score, a, b) for a, b in sorted(known, key=lambda p: (vocabulary[p[0]], vocabulary[p[1]]))
        ]
    found.sort(key=lambda merge: -merge[0])  # stable: equal scores keep the vocabulary's order
    return [(a, b) for _, a, b in found]


def read_pieces(path: Path) -> list[Piece]:
    """The pieces of a tokenizer.model. Raises BundleError for a damaged file."""
    data = path.read_bytes()
    try:
        pieces = [
            read_piece(value) for number, value in fields(data) if number == 1 and isinstance(value, bytes)
        ]
    except (IndexError, struct.error, UnicodeDecodeError, ValueError) as error:
        raise BundleError(f"{path}: damaged SentencePiece model ({error})") from error
    if not pieces:
        raise BundleError(f"{path}: no SentencePiece vocabulary in it")
    return pieces


def read_piece(data: bytes) -> Piece:
    text, score, kind = "", 0.0, NORMAL
    for number, value in fields(data):
        if number == 1 and isinstance(value, bytes):
            text = value.decode("utf-8")
        elif number == 2 and isinstance(value, bytes):
            (score,) = struct.unpack("<f", value)
        elif number == 3 and isinstance(value, int):
            kind = value
    return Piece(text, score, kind)


def fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """(number, value) of each field of a message."""
    at = 0
    while at < len(data):
        key, at = varint(data, at)
        number, wire = key >> 3, key & 7
        if wire == VARINT:
            value, at = varint(data, at)
            yield number, value
            continue
        if wire == BYTES:
            length, at = varint(data, at)
        elif wire in (FIXED32, FIXED64):
            length = 4 if wire == FIXED32 else 8
        else:
            raise ValueError(f"wire type {wire}")
        if at + length > len(data):
            raise ValueError("cut short")
        yield number, data[at : at + length]
        at += length


def varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if not byte & 0x80:
            return value, at
