"""Streamed text: any bytes, any split, the same text."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from starsd_edge.text.detokenize import Detokenizer
from starsd_edge.text.tokenizer import Tokenizer
from tests.core.text.vocabularies import byte_level, sentencepiece

TOKENIZERS = {
    "byte-level": Tokenizer(byte_level()),
    "legacy": Tokenizer(sentencepiece(legacy=True)),
    "modern": Tokenizer(sentencepiece(legacy=False)),
}
ALL = pytest.mark.parametrize("tokenizer", TOKENIZERS.values(), ids=TOKENIZERS.keys())


def single_bytes(tokenizer: Tokenizer) -> dict[int, int]:
    """byte -> the token that is just this byte, for every byte."""
    found: dict[int, int] = {}
    for token in range(tokenizer.vocab_size):
        data = tokenizer.token_bytes(token)
        if len(data) == 1 and token not in tokenizer.special_ids:
            found.setdefault(data[0], token)
    return found


def pieces(tokenizer: Tokenizer, tokens: list[int], cuts: list[int]) -> list[str]:
    detokenizer = Detokenizer(tokenizer)
    out, start = [], 0
    for cut in [*sorted(min(cut, len(tokens)) for cut in cuts), len(tokens)]:
        out.append(detokenizer.push(tokens[start:cut]))
        start = cut
    return [*out, detokenizer.flush()]


@ALL
@given(data=st.binary(max_size=40), cuts=st.lists(st.integers(0, 40)))
@settings(deadline=None)
def test_any_bytes_in_any_split_give_the_same_text(
    tokenizer: Tokenizer, data: bytes, cuts: list[int]
) -> None:
    table = single_bytes(tokenizer)
    tokens = [table[byte] for byte in data]
    if tokenizer.strips_first_space:
        data = data.removeprefix(b" ")
    assert data.decode("utf-8", "replace") == "".join(pieces(tokenizer, tokens, cuts))


@ALL
@given(data=st.data())
@settings(deadline=None)
def test_any_tokens_in_any_split_give_what_decode_gives(tokenizer: Tokenizer, data: st.DataObject) -> None:
    tokens = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 3), max_size=30))
    cuts = data.draw(st.lists(st.integers(0, 30)))
    assert tokenizer.decode(tokens) == "".join(pieces(tokenizer, tokens, cuts))


@ALL
@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=30))
@settings(deadline=None)
def test_decode_agrees_with_the_tokenizers_package(tokenizer: Tokenizer, text: str) -> None:
    tokens = tokenizer.encode(tokenizer.neutralise(text))
    assert tokenizer._plain.decode(tokens, skip_special_tokens=True) == tokenizer.decode(tokens)


@ALL
@pytest.mark.parametrize("text", ["🙂", "你好", "👩‍👩‍👧‍👦", "é", "안녕"])
def test_no_half_character_is_ever_shown(tokenizer: Tokenizer, text: str) -> None:
    table = single_bytes(tokenizer)
    shown = pieces(tokenizer, [table[byte] for byte in text.encode()], list(range(40)))
    assert text == "".join(shown)
    assert all("\ufffd" not in piece for piece in shown)


def test_a_character_is_shown_with_its_last_byte() -> None:
    tokenizer = TOKENIZERS["byte-level"]
    table = single_bytes(tokenizer)
    detokenizer = Detokenizer(tokenizer)
    assert ["", "", "", "🙂"] == [detokenizer.push([table[byte]]) for byte in "🙂".encode()]


def test_special_tokens_are_not_text_even_inside_a_character() -> None:
    tokenizer = TOKENIZERS["byte-level"]
    table = single_bytes(tokenizer)
    first, *rest = (table[byte] for byte in "é".encode())
    assert "é" == "".join(pieces(tokenizer, [first, 1, *rest, 2], [1, 2]))


def test_an_ordinary_added_token_is_shown_as_written() -> None:
    tokenizer = TOKENIZERS["byte-level"]
    assert "a<tool→>b" == tokenizer.decode(tokenizer.encode("a<tool→>b"))


def test_only_the_first_space_of_an_answer_is_the_tokenizer_s() -> None:
    tokenizer = TOKENIZERS["legacy"]
    tokens = tokenizer.encode("The fox")
    assert ["The fox", " The fox"] == pieces(tokenizer, tokens + tokens, [len(tokens)])[:2]
