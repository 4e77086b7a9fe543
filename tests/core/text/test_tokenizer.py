"""The tokenizer: exact bytes, and user text that never becomes a control token."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from starsd_edge.errors import BundleError
from starsd_edge.text.tokenizer import MARK, Place, Tokenizer
from tests.core.text.vocabularies import SPECIAL, byte_level, sentencepiece

BYTE_LEVEL = Tokenizer(byte_level())
LEGACY = Tokenizer(sentencepiece(legacy=True))
MODERN = Tokenizer(sentencepiece(legacy=False))
ALL = pytest.mark.parametrize(
    "tokenizer", [BYTE_LEVEL, LEGACY, MODERN], ids=["byte-level", "legacy", "modern"]
)

CONTROL = [*SPECIAL, "<s>", "</s>", "<unk>"]
texts = st.text(st.characters(exclude_categories=["Cs"], exclude_characters=MARK), max_size=40)
hostile = st.lists(st.sampled_from([*CONTROL, "<", "|", ">", "<|im_", "start|>", "<<s>s>", " ", "a", MARK]))


@ALL
@given(text=texts)
@settings(deadline=None)
def test_text_survives_the_way_there_and_back(tokenizer: Tokenizer, text: str) -> None:
    """The legacy tokenizer puts a space before text that begins with one, so it may keep one more."""
    assert text == tokenizer.decode(tokenizer.encode(tokenizer.neutralise(text))) or text.startswith(" ")


@ALL
@given(parts=hostile)
@settings(deadline=None)
def test_user_text_never_becomes_a_control_token(tokenizer: Tokenizer, parts: list[str]) -> None:
    text = "".join(parts)
    tokens = tokenizer.encode(tokenizer.neutralise(text))
    assert set() == tokenizer.special_ids & set(tokens)
    assert text.replace(MARK, "").strip() == tokenizer.decode(tokens).strip()


def test_the_template_s_own_control_tokens_are_read_as_such() -> None:
    text = "<|im_start|>user\n" + BYTE_LEVEL.neutralise("say <|im_end|> please") + "<|im_end|>\n"
    tokens = BYTE_LEVEL.encode(text)
    assert [1, 2] == [token for token in tokens if token in BYTE_LEVEL.special_ids]
    assert 2 == tokens[-2]
    assert "user\nsay <|im_end|> please\n" == BYTE_LEVEL.decode(tokens)


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, LEGACY, MODERN])
def test_marked_text_gets_the_same_tokens_as_unmarked(tokenizer: Tokenizer) -> None:
    """Splitting around control tokens by hand gives what the tokenizers package gives."""
    end = "<|im_end|>" if tokenizer is BYTE_LEVEL else "</s>"
    plain = f"{end}USER: the fox{end} runs on {end}\nthe end"
    spelt = tokenizer.neutralise("<|im_start|><s>")
    expected = [*tokenizer.encode(plain), *tokenizer.encode(end)]
    assert expected == tokenizer.encode(plain + end + spelt)[: len(expected)]


def test_text_that_goes_on_gets_no_space_in_front() -> None:
    for tokenizer in (BYTE_LEVEL, LEGACY, MODERN):
        tokens = [*tokenizer.encode("The fox"), *tokenizer.encode("es run</s>", Place.MIDDLE)]
        assert "The foxes run" == tokenizer.decode(tokens).removesuffix("</s>")


def test_a_piece_of_the_vocabulary_that_spells_a_control_token_is_encoded_around() -> None:
    """A vocabulary may hold the letters of a control token as an ordinary piece: no merge may use it."""
    merges = [["<", "s"], ["<s", ">"]]
    vocabulary = {"<s>": 0, "<": 1, "s": 2, ">": 3, "<s": 4}
    tokenizer = Tokenizer(
        '{"added_tokens":[{"id":0,"content":"<s>","special":true,"single_word":false,"lstrip":false,'
        '"rstrip":false,"normalized":false}],"decoder":{"type":"ByteLevel","add_prefix_space":false,"trim_offsets":true,"use_regex":true},'
        f'"model":{{"type":"BPE","vocab":{vocabulary},"merges":{merges}}}}}'.replace("'", '"')
    )
    assert [0] == tokenizer.encode("<s>")
    assert [1, 2, 3] == tokenizer.encode(tokenizer.neutralise("<s>"))


def test_lone_surrogates_become_replacement_characters() -> None:
    assert "a\ufffdb" == BYTE_LEVEL.neutralise("a\ud800b")


@pytest.mark.parametrize("damaged", ["", "{}", "[1", '{"model": {"type": "BPE", "vocab": {}, "merges": []}}'])
def test_a_damaged_tokenizer_file_is_one_clear_error(damaged: str) -> None:
    with pytest.raises(BundleError, match=r"tokenizer\.json"):
        Tokenizer(damaged)
