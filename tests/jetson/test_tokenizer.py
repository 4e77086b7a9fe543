"""Tokenizers rebuilt from GGUF metadata or SentencePiece models give the ids of the originals."""

from __future__ import annotations

import io
import json
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pytest
import sentencepiece
from tokenizers import Tokenizer

from starsd_edge.errors import BundleError
from starsd_edge.text.builtin_templates import BUILTIN_TEMPLATES
from starsd_jetson import embedded
from starsd_jetson.graph.gguf_source import GgufSource
from starsd_jetson.graph.sources import open_source
from starsd_jetson.sample_text import CALIBRATION, HELD_OUT
from starsd_jetson.sentencepiece import Piece, read_pieces, sentencepiece_json
from starsd_jetson.tokenizer import read_gguf, read_text_settings
from tests.jetson.gguf_files import sentencepiece_model, write_gguf

BYTE = 6  # kind of a piece that stands for one byte
TEXTS = [
    "Hello, world!",
    "  two spaces,\ttab\r\n\r\nlines   \n",
    "In 2024, 1234567 people paid 3.14 and 0x7f.",
    "don't, I'll, WE'RE, it's",
    "Grüße, naïve café — “quotes” … 你好世界 🙂👩‍👩‍👧",
    "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
    "def f(x):\n    return {'a': [x ** 2 for _ in range(10)]}\n",
    "",
]


@pytest.mark.model
def test_the_embedded_tokenizer_gives_the_ids_of_transformers(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    shutil.copy(embedded.gguf_path(), tmp_path / "model.gguf")
    theirs = AutoTokenizer.from_pretrained(tmp_path, gguf_file="model.gguf")
    settings = read_text_settings(open_source(tmp_path / "model.gguf"))
    ours = Tokenizer.from_str(settings.tokenizer_json)
    for text in TEXTS:
        assert ours.encode(text).ids == theirs(text)["input_ids"], text
        assert ours.decode(ours.encode(text).ids, skip_special_tokens=False) == text
    assert settings.stop_tokens == (0, 2)
    assert not settings.add_bos
    assert "<|im_start|>" in settings.chat_template


def test_sentencepiece_merges_the_best_scored_pair_first(tmp_path: Path) -> None:
    """'abc' may become ab + c or a + bc: the scores decide, and what no piece covers falls back to bytes."""
    texts = ["▁", "a", "b", "c", "ab", "bc", "▁a", "▁ab"]
    scores = dict(zip(texts, [-9.0, -8.0, -7.0, -6.0, -2.0, -1.0, -3.0, -4.0], strict=True))
    pieces = [Piece("<unk>", 0.0, 2), Piece("<s>", 0.0, 3), Piece("</s>", 0.0, 3)]
    pieces += [Piece(f"<0x{byte:02X}>", 0.0, 6) for byte in range(256)]
    pieces += [Piece(text, scores[text], 1) for text in texts]
    (tmp_path / "tokenizer.model").write_bytes(sentencepiece_model(pieces))
    assert read_pieces(tmp_path / "tokenizer.model") == pieces

    tokenizer = Tokenizer.from_str(sentencepiece_json(pieces, prepend=True))
    assert tokenizer.encode("abc").tokens == ["<s>", "▁a", "bc"]
    assert tokenizer.encode("ab").tokens == ["<s>", "▁ab"]
    assert tokenizer.encode("é", add_special_tokens=False).tokens == ["▁", "<0xC3>", "<0xA9>"]
    assert tokenizer.decode(tokenizer.encode("abc é ab").ids) == "abc é ab"


@pytest.fixture(scope="module", params=[True, False], ids=["space before a text", "no space"])
def trained(request: pytest.FixtureRequest) -> Trained:
    """A vocabulary as Llama 2's was trained: BPE, digits one by one, bytes for what no piece covers."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter((CALIBRATION + HELD_OUT).splitlines()),
        model_writer=model,
        model_type="bpe",
        vocab_size=800,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        allow_whitespace_only_pieces=True,
        split_digits=True,
        add_dummy_prefix=request.param,
        minloglevel=2,
    )
    return Trained(model.getvalue(), request.param)


@dataclass(frozen=True)
class Trained:
    model: bytes
    prepend: bool

    def pieces(self, folder: Path) -> list[Piece]:
        (folder / "tokenizer.model").write_bytes(self.model)
        return read_pieces(folder / "tokenizer.model")


def many_texts() -> list[str]:
    """Sentences, and what nobody would write: runs of spaces, controls, letters of other scripts."""
    rng = random.Random(0)
    letters = "abcdefghij etaoin shrdlu ETAOIN 0123456789 .,;:!?'\"()\n\t\r  éüß你好🙂한\u00a0\u200d▁<|>\0"
    noise = ("".join(rng.choices(letters, k=rng.randrange(1, 40))) for _ in range(1000))
    return [*TEXTS, " ", "   ", " lead", "trail  ", "▁", *HELD_OUT.splitlines(), *noise]


def test_a_trained_vocabulary_gives_the_ids_and_texts_of_sentencepiece(
    trained: Trained, tmp_path: Path
) -> None:
    theirs = sentencepiece.SentencePieceProcessor(model_proto=trained.model)
    pieces = trained.pieces(tmp_path)
    ours = Tokenizer.from_str(sentencepiece_json(pieces, prepend=trained.prepend))
    fallen_back = 0
    for text in many_texts():
        ids = theirs.encode(text)
        assert ids == ours.encode(text, add_special_tokens=False).ids, text
        assert theirs.decode(ids) == ours.decode(ids), text
        fallen_back += sum(pieces[token].kind == BYTE for token in ids)
    assert fallen_back > 1000


def test_a_gguf_file_with_sentencepiece_s_vocabulary_gives_the_same_ids(
    trained: Trained, tiny: Callable[[str], Any], tmp_path: Path
) -> None:
    theirs = sentencepiece.SentencePieceProcessor(model_proto=trained.model)
    file = write_gguf(
        tiny("llama grouped").folder,
        tmp_path / "model.gguf",
        pieces=trained.pieces(tmp_path),
        prepend=trained.prepend,
    )
    settings = read_text_settings(open_source(file))
    ours = Tokenizer.from_str(settings.tokenizer_json)
    for text in many_texts():
        assert theirs.encode(text) == ours.encode(text, add_special_tokens=False).ids, text
    assert (settings.bos_token, settings.add_bos, settings.stop_tokens) == (1, True, (2,))
    assert ours.encode("a").ids[0] == settings.bos_token


@pytest.mark.parametrize("where", ["added_tokens.json", "tokenizer_config.json"])
def test_tokens_that_were_added_behind_a_sentencepiece_model_are_tokens(
    where: str, trained: Trained, tiny: Callable[[str], Any], tmp_path: Path
) -> None:
    """As in chats of fine-tuned Llamas and Mistrals: they were letters, and no answer ended."""
    folder = tmp_path / "model"
    shutil.copytree(tiny("llama grouped").folder, folder)
    (folder / "tokenizer.json").unlink()
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": 900, "eos_token_id": None}))
    count = len(trained.pieces(folder))
    start, end = "<|im_start|>", "<|im_end|>"
    if where == "added_tokens.json":
        settings: dict[str, Any] = {}
        (folder / where).write_text(json.dumps({end: count, start: count + 1}))
        (folder / "special_tokens_map.json").write_text(
            json.dumps(
                {"eos_token": {"content": end}, "additional_special_tokens": [start], "bos_token": "<s>"}
            )
        )
    else:
        tokens = {"1": "<s>", str(count): end, str(count + 1): start}
        settings = {"added_tokens_decoder": {i: {"content": t, "special": True} for i, t in tokens.items()}}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"eos_token": end}))
    text = read_text_settings(open_source(folder))
    ours = Tokenizer.from_str(text.tokenizer_json)
    ids = ours.encode(f"{start}user{end}", add_special_tokens=False).ids
    assert (ids[0], ids[-1]) == (count + 1, count)
    assert ids[1:-1] == ours.encode("user", add_special_tokens=False).ids
    assert count in text.stop_tokens
    (folder / "added_tokens.json").write_text(json.dumps({"<far>": count + 50}))
    with pytest.raises(BundleError, match=f"its added tokens have the ids .*{count + 50}.*, behind {count}"):
        read_text_settings(open_source(folder))


@pytest.mark.parametrize(
    ("pre", "said", "added"),
    [("llama-bpe", None, True), ("llama-bpe", False, False), ("smollm", None, False), ("smollm", True, True)],
)
def test_a_gguf_file_of_llama_3_begins_its_texts_as_llama_cpp_does(
    pre: str, said: bool | None, added: bool
) -> None:
    """Its files do not say so; raw prompts went in without."""
    fields = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": ["<|begin_of_text|>", "<|eot_id|>", "a", "b", "ab"],
        "tokenizer.ggml.token_type": [3, 3, 1, 1, 1],
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.add_bos_token": said,
    }

    class File:
        path = Path("llama3.gguf")

        def field(self, key: str, default: Any = None) -> Any:
            value = fields.get(key)
            return default if value is None else value

    text = read_gguf(cast("GgufSource", File()))
    assert text.add_bos == added
    assert Tokenizer.from_str(text.tokenizer_json).encode("ab").ids == ([0, 4] if added else [4])


@pytest.mark.parametrize(
    ("name", "file", "template"),
    [
        ("Vicuna 7b v1.3", "model.gguf", "vicuna_v1.1"),
        ("LLaMA v2", "vicuna-7b-v1.5.Q4_K_M.gguf", "vicuna_v1.1"),
        ("LLaMA v2", "model.gguf", None),
        (None, "model.gguf", None),
    ],
)
def test_a_gguf_file_of_vicuna_without_a_template_gets_vicunas(
    name: str | None, file: str, template: str | None, tiny: Callable[[str], Any], tmp_path: Path
) -> None:
    pieces = [Piece("<unk>", 0.0, 2), Piece("<s>", 0.0, 3), Piece("</s>", 0.0, 3), Piece("a", 0.0, 1)]
    folder = tiny("llama grouped").folder
    source = open_source(write_gguf(folder, tmp_path / file, pieces=pieces, name=name))
    assert read_text_settings(source).chat_template == (BUILTIN_TEMPLATES[template] if template else "")


@pytest.mark.parametrize("data", [b"", b"\x0a\xff", b"\x0a\x03\x0a\x09a", b"\x0f"])
def test_a_damaged_sentencepiece_model_is_named(data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.model"
    path.write_bytes(data)
    with pytest.raises(BundleError, match=r"tokenizer\.model"):
        read_pieces(path)


def test_merges_of_tokens_that_are_not_there_are_a_damaged_file(
    tiny: Callable[[str], Any], tmp_path: Path
) -> None:
    """The file that the tests write has few tokens, and more merges than those make."""
    source = open_source(write_gguf(tiny("llama grouped").folder, tmp_path / "model.gguf"))
    with pytest.raises(BundleError, match=r"model\.gguf: its tokenizer is damaged"):
        read_text_settings(source)
