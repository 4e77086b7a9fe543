"""Text <-> token ids, over a Hugging Face `tokenizer.json`.

Two things are added to what the `tokenizers` package does. Text of a user never becomes a control token:
where it spells one, `neutralise` marks the place and `encode` reads it as plain letters. And every token has
its exact bytes, so that text can be put together from tokens whose borders lie inside a character.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from enum import Enum
from functools import cached_property, lru_cache
from typing import Any

import tokenizers

from starsd_edge.errors import BundleError

__all__ = ["Place", "Tokenizer"]

# A Unicode noncharacter (for internal use, never in real text), set inside control tokens that a user spelt.
MARK = "\ufdd0"
SPACE_SYMBOL = "\u2581"  # SentencePiece writes a space as this
BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Place(Enum):
    """Where a stretch of text stands, for tokenizers that put a space in front of a beginning."""

    START = "start"
    AFTER_SPECIAL = "after a special token"
    MIDDLE = "middle"


class Tokenizer:
    """One `tokenizer.json`. Raises BundleError when it is damaged or of a kind without exact bytes."""

    def __init__(self, tokenizer_json: str) -> None:
        try:
            self._plain = tokenizers.Tokenizer.from_str(tokenizer_json)
        except Exception as error:  # the package raises bare Exception
            raise BundleError(f"tokenizer.json cannot be read: {error}") from error
        self._plain.no_truncation()
        self._plain.no_padding()
        added = self._plain.get_added_tokens_decoder()
        self._special = {token.content: number for number, token in added.items() if token.special}
        self._style = _byte_style(json.loads(tokenizer_json).get("decoder"))
        self._bytes: dict[int, bytes] = {}
        self._variants: dict[Place, tokenizers.Tokenizer] = {}

    @property
    def vocab_size(self) -> int:
        """Ids are below this; added tokens included."""
        return self._plain.get_vocab_size(with_added_tokens=True)

    @cached_property
    def special_ids(self) -> frozenset[int]:
        return frozenset(self._special.values())

    @property
    def strips_first_space(self) -> bool:
        """Whether a text's first space is an artefact of the tokenizer."""
        return self._style is ByteStyle.SENTENCEPIECE_STRIPPED

    def special_id(self, text: str) -> int | None:
        """The id of a special token, by its text."""
        return self._special.get(text)

    def token_text(self, token: int) -> str:
        """A token as the vocabulary writes it; empty for an id it does not have."""
        return self._plain.id_to_token(token) or ""

    def starts_with_special(self, text: str) -> bool:
        """Whether a control token is the first thing in `text`."""
        return self._special_pattern is not None and self._special_pattern.match(text) is not None

    def neutralise(self, text: str) -> str:
        """User text that may go into a template: control tokens are marked, lone surrogates replaced."""
        text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace").replace(MARK, "")
        if self._special_pattern is None:
            return text
        marked = self._special_pattern.sub(lambda found: found[0][0] + MARK + found[0][1:], text)
        # A token inside another one may show up now ("<a<b>" with "<b>" special).
        while self._special_pattern.search(marked):
            marked = self._special_pattern.sub(lambda found: found[0][0] + MARK + found[0][1:], marked)
        return marked

    def encode(self, text: str, place: Place = Place.START) -> list[int]:
        """Ids of template text: control tokens are recognised except where `neutralise` marked them."""
        if MARK not in text and place is Place.START:
            return self._plain.encode(text, add_special_tokens=False).ids
        ids: list[int] = []
        for part in self._split(text):
            special = self._special.get(part)
            if special is not None:
                ids.append(special)
                place = Place.AFTER_SPECIAL
            elif part:
                ids += self._encode_letters(part, place)
                place = Place.MIDDLE
        return ids

    def encode_document(self, text: str) -> list[int]:
        """Ids of a raw prompt: control tokens are recognised, and what the tokenizer adds (BOS) is added."""
        text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        return self._plain.encode(text, add_special_tokens=True).ids

    def token_bytes(self, token: int) -> bytes:
        """The bytes a token stands for; empty for an id the vocabulary does not have."""
        found = self._bytes.get(token)
        if found is None:
            text = self._plain.id_to_token(token)
            found = b"" if text is None else self._style.to_bytes(text)
            self._bytes[token] = found
        return found

    def decode(self, tokens: Iterable[int]) -> str:
        """The text of `tokens` without special tokens; bytes that are not UTF-8 become U+FFFD."""
        data = b"".join(self.token_bytes(token) for token in tokens if token not in self.special_ids)
        if self.strips_first_space:
            data = data.removeprefix(b" ")
        return data.decode("utf-8", "replace")

    @cached_property
    def _special_pattern(self) -> re.Pattern[str] | None:
        # A special token of one letter cannot be marked inside; no tokenizer in use has one.
        names = sorted((name for name in self._special if len(name) > 1), key=len, reverse=True)
        return re.compile("|".join(map(re.escape, names))) if names else None

    def _split(self, text: str) -> Iterator[str]:
        """`text` as special tokens and what lies between them."""
        if self._special_pattern is None:
            yield text
            return
        start = 0
        for found in self._special_pattern.finditer(text):
            yield text[start : found.start()]
            yield found[0]
            start = found.end()
        yield text[start:]

    def _encode_letters(self, text: str, place: Place) -> list[int]:
        """Ids of text none of which is a control token, whatever it spells."""
        ids: list[int] = self._variant(place).encode(text.replace(MARK, ""), add_special_tokens=False).ids
        if self.special_ids.isdisjoint(ids):
            return ids
        # The vocabulary itself holds the token's letters as a piece: encode around the marked places.
        ids = []
        for part in text.split(MARK):
            ids += self._variant(place).encode(part, add_special_tokens=False).ids
            place = Place.MIDDLE
        return [number for number in ids if number not in self.special_ids]

    def _variant(self, place: Place) -> tokenizers.Tokenizer:
        """This tokenizer without control tokens, for text at `place`; made when first needed."""
        if place not in self._variants:
            spec = json.loads(self._plain.to_str())
            if place is not Place.START:
                _never_prepend(spec.get("pre_tokenizer"))
            if place is Place.MIDDLE:
                spec["normalizer"] = _without_prepend(spec.get("normalizer"))
            variant = tokenizers.Tokenizer.from_str(json.dumps(spec))
            variant.encode_special_tokens = True
            self._variants[place] = variant
        return self._variants[place]


class ByteStyle(Enum):
    """How a vocabulary writes bytes."""

    BYTE_LEVEL = "byte-level"
    SENTENCEPIECE = "sentencepiece"
    SENTENCEPIECE_STRIPPED = "sentencepiece, first space stripped"

    def to_bytes(self, text: str) -> bytes:
        if self is ByteStyle.BYTE_LEVEL:
            table = _byte_of_letter()
            # Added tokens are written as themselves and may use letters that stand for no byte.
            return bytes(table[c] for c in text) if all(c in table for c in text) else text.encode()
        found = BYTE_TOKEN.fullmatch(text)
        return bytes([int(found[1], 16)]) if found else text.replace(SPACE_SYMBOL, " ").encode()


def _byte_style(decoder: dict[str, Any] | None) -> ByteStyle:
    steps = [] if decoder is None else decoder.get("decoders", [decoder])
    kinds = {step["type"]: step for step in steps}
    if "ByteLevel" in kinds:
        return ByteStyle.BYTE_LEVEL
    if "Metaspace" in kinds:
        keeps = kinds["Metaspace"].get("prepend_scheme", "always") == "never"
        return ByteStyle.SENTENCEPIECE if keeps else ByteStyle.SENTENCEPIECE_STRIPPED
    if "Replace" in kinds and kinds["Replace"]["pattern"].get("String") == SPACE_SYMBOL:
        strips = kinds.get("Strip", {}).get("start", 0) > 0
        return ByteStyle.SENTENCEPIECE_STRIPPED if strips else ByteStyle.SENTENCEPIECE
    raise BundleError(
        f"tokenizer.json has a decoder of an unknown kind ({', '.join(kinds) or 'none'}); "
        "byte-level BPE and SentencePiece vocabularies are supported"
    )


def _never_prepend(pre_tokenizer: dict[str, Any] | None) -> None:
    """Turn `Metaspace(prepend_scheme="first")` off, in place: the text is not the first."""
    for step in [] if pre_tokenizer is None else pre_tokenizer.get("pretokenizers", [pre_tokenizer]):
        if step["type"] == "Metaspace" and step.get("prepend_scheme") == "first":
            step["prepend_scheme"] = "never"


def _without_prepend(normalizer: dict[str, Any] | None) -> dict[str, Any] | None:
    """A normalizer less its `Prepend` step."""
    if normalizer is None or normalizer["type"] == "Prepend":
        return None
    if normalizer["type"] == "Sequence":
        steps = [step for step in normalizer["normalizers"] if step["type"] != "Prepend"]
        return {"type": "Sequence", "normalizers": steps}
    return normalizer


@lru_cache(maxsize=1)
def _byte_of_letter() -> dict[str, int]:
    """GPT-2's table: printable Latin-1 bytes stand for themselves, the others for letters from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}
