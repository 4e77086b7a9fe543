"""Texts to train on: written and read by a target, kept on disk, and a whole `starsd draft train` on them."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from transformers import LlamaConfig, LlamaForCausalLM

from starsd_edge.bundle import Bundle
from starsd_edge.decoding.sampling import SamplingParams
from starsd_edge.errors import BundleError, ConfigError
from starsd_edge.testing import ToyTarget, plain_text
from starsd_edge.text.prompt import PromptWriter
from starsd_edge.text.template import ChatTemplate
from starsd_edge.text.tokenizer import Tokenizer
from starsd_jetson.export import ExportSettings, export
from starsd_server.cli_train import command
from starsd_server.heads.checkpoint import load_head, read_manifest
from starsd_server.train.store import CorpusWriter, open_corpus
from starsd_server.train.texts import KnownText, chats_of, windows_of
from starsd_server.train.write import ChatWriter, read_text
from tests.core.text.vocabularies import byte_level

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
STOP = 2  # <|im_end|>
ABOUT = {"target": "toy"}


@pytest.fixture
def prompts() -> PromptWriter:
    return PromptWriter(Tokenizer(byte_level()), ChatTemplate(CHATML))


def write_chats(folder: Path, prompts: PromptWriter, numbers: range, answer: int = 20) -> None:
    target = ToyTarget(vocab_size=prompts.tokenizer.vocab_size, levels=40)
    with CorpusWriter(folder, target.spec.feature_size, ABOUT) as corpus:
        chats = ChatWriter(target, prompts, [STOP], answer)
        for number in numbers:
            chats.write(number, corpus)


def test_every_token_of_a_chat_comes_with_its_own_feature(tmp_path: Path, prompts: PromptWriter) -> None:
    """The toy's features are the token and position of their row."""
    write_chats(tmp_path, prompts, range(6))
    corpus = open_corpus(tmp_path)
    assert len(corpus.starts) == 6
    for i in range(6):
        rows = slice(corpus.offsets[i], corpus.offsets[i + 1])
        assert np.array_equal(corpus.tokens[rows], corpus.features[rows, 0])
        assert np.array_equal(np.arange(corpus.lengths[i]), corpus.features[rows, 1])


def test_greedy_answers_are_the_targets_own_and_come_every_second_time(
    tmp_path: Path, prompts: PromptWriter
) -> None:
    write_chats(tmp_path, prompts, range(6))
    corpus = open_corpus(tmp_path)
    assert corpus.greedy.tolist() == [True, False] * 3
    target = ToyTarget(vocab_size=prompts.tokenizer.vocab_size, levels=40)
    for i in range(0, 6, 2):
        tokens = corpus.tokens[corpus.offsets[i] : corpus.offsets[i + 1]].tolist()
        start = int(corpus.starts[i])
        assert plain_text(target, SamplingParams(), tokens[:start], len(tokens) - start) == tokens[start:]
        assert prompts.tokenizer.decode(tokens[:start]).endswith("assistant\n")


def test_an_answer_ends_with_the_stop_token_the_limit_or_the_context(
    tmp_path: Path, prompts: PromptWriter
) -> None:
    write_chats(tmp_path, prompts, range(8), answer=400)
    corpus = open_corpus(tmp_path)
    for i, answer in enumerate(corpus.responses(np.arange(8))):
        assert len(answer) >= 1
        assert STOP not in answer[:-1]
        assert answer[-1] == STOP or len(answer) == 400 or corpus.lengths[i] == 256


def test_chats_are_the_same_whether_written_in_one_go_or_two(tmp_path: Path, prompts: PromptWriter) -> None:
    write_chats(tmp_path / "one", prompts, range(4))
    write_chats(tmp_path / "two", prompts, range(3))
    write_chats(tmp_path / "two", prompts, range(3, 4))
    for file in (tmp_path / "one").iterdir():
        assert file.read_bytes() == (tmp_path / "two" / file.name).read_bytes()


def test_a_torn_write_is_cut_off_when_writing_goes_on(tmp_path: Path) -> None:
    """As after a power cut: tokens and half a feature row are there, the sequence is not."""
    tokens, features = np.arange(5, dtype=np.int32), np.ones((5, 2), np.float16)
    with CorpusWriter(tmp_path, 2, ABOUT) as corpus:
        corpus.append(tokens, features, 1, greedy=True)
    for name, rest in (("tokens.i32", 40), ("features.f16", 33), ("sequences.i64", 11)):
        with (tmp_path / name).open("ab") as file:
            file.write(b"\x07" * rest)
    with CorpusWriter(tmp_path, 2, ABOUT) as corpus:
        assert (corpus.num_sequences, corpus.num_tokens) == (1, 5)
        corpus.append(tokens + 5, features * 2, 2, greedy=False)
    read = open_corpus(tmp_path)
    assert read.tokens.tolist() == list(range(10))
    assert read.features[:, 0].tolist() == [1] * 5 + [2] * 5
    assert (read.starts.tolist(), read.greedy.tolist()) == ([1, 2], [True, False])


def test_texts_of_another_target_are_not_mixed_in(tmp_path: Path) -> None:
    CorpusWriter(tmp_path, 2, ABOUT).__exit__(None, None, None)
    with pytest.raises(BundleError, match="target differ"):
        CorpusWriter(tmp_path, 2, {"target": "other"})
    with pytest.raises(BundleError, match="no texts to train on"):
        open_corpus(tmp_path / "nothing")


def test_plain_text_teaches_at_every_position_and_is_no_answer(tmp_path: Path) -> None:
    target = ToyTarget()
    with CorpusWriter(tmp_path, 2, ABOUT) as corpus:
        read_text(target, KnownText(np.arange(9, dtype=np.int32), 0, greedy=False), corpus)
    read = open_corpus(tmp_path)
    assert (read.starts.tolist(), read.greedy.tolist()) == ([0], [False])
    assert read.features[:, 0].tolist() == list(range(9))


def test_a_text_is_read_in_pieces_of_more_than_one_token(tmp_path: Path) -> None:
    tokenizer = Tokenizer(byte_level())
    file = tmp_path / "text"
    file.write_text("The quick brown fox. " * 200, "utf-8")
    pieces = [text.tokens for text in windows_of(tokenizer, file)]
    assert (
        np.concatenate(pieces).tolist() == tokenizer.encode(file.read_text("utf-8"))[: sum(map(len, pieces))]
    )
    assert {len(piece) for piece in pieces[:-1]} == {256}
    file.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="cannot be read as UTF-8"):
        list(windows_of(tokenizer, file))


@pytest.mark.parametrize("name", ["chats.jsonl", "chats.jsonl.gz"])
def test_chats_written_before_are_read_with_their_answers(tmp_path: Path, name: str) -> None:
    lines = [{"t": [1, 5, 6, 7], "s": 2, "temp": 0, "other": 1}, {"t": list(range(9)), "s": 3, "temp": 0.7}]
    data = "".join(json.dumps(line) + "\n" for line in lines).encode()
    (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    first, second = chats_of(tmp_path / name, vocab_size=9, max_len=6)
    assert (first.tokens.tolist(), first.start, first.greedy) == ([1, 5, 6, 7], 2, True)
    assert (second.tokens.tolist(), second.start, second.greedy) == ([0, 1, 2, 3, 4, 5], 3, False)


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("{", "line 2: needs `t`"),
        ('{"t": [1, 2], "s": 0}', "line 2: needs `t`"),
        ('{"t": [[1, 2]], "s": 0, "temp": 0}', "line 2: .* no chat"),
        ('{"t": [1, 2], "s": 2, "temp": 0}', "line 2: .* no chat"),
        ('{"t": [1, 9], "s": 1, "temp": 0}', "line 2: has a token outside 0 to 8"),
    ],
)
def test_a_line_that_is_no_chat_is_named(tmp_path: Path, line: str, complaint: str) -> None:
    file = tmp_path / "chats.jsonl"
    file.write_text('{"t": [1, 2], "s": 1, "temp": 0}\n' + line + "\n", "utf-8")
    with pytest.raises(ConfigError, match=complaint):
        list(chats_of(file, vocab_size=9, max_len=6))


def test_a_template_that_hides_the_user_is_refused() -> None:
    silent = PromptWriter(Tokenizer(byte_level()), ChatTemplate("no messages here"))
    with pytest.raises(BundleError, match="does not show the user's message"):
        ChatWriter(ToyTarget(), silent, [STOP], 10)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random model, exported."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("out") / "bundle"
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=Tokenizer(byte_level()).vocab_size,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        eos_token_id=STOP,
        initializer_range=0.2,
    )
    LlamaForCausalLM(config).save_pretrained(source)
    (source / "tokenizer.json").write_text(byte_level(), "utf-8")
    (source / "tokenizer_config.json").write_text(json.dumps({"chat_template": CHATML}), "utf-8")
    export(source, out, ExportSettings(quant="fp32"))
    return out


def train(bundle: Path, out: Path, *more: str) -> str:
    args = [str(bundle), "--out", str(out), "--tokens=1500", "--rows=256", "--unroll=2", "--draft-vocab=100"]
    result = CliRunner().invoke(command, [*args, "--threads=1", "--json", *more], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_a_head_is_trained_from_nothing_but_a_bundle(bundle: Path, tmp_path: Path) -> None:
    """Texts, updates, acceptance, a head that loads and names its target; going on with more updates finds
    the texts and the checkpoint."""
    text = tmp_path / "notes.txt"
    text.write_text("The quick brown fox jumps over the lazy dog. " * 40, "utf-8")
    chats = tmp_path / "chats.jsonl"
    chats.write_text(json.dumps({"t": [1, 5, 6, 7, 8], "s": 3, "temp": 0.7}) + "\n", "utf-8")
    known = ["--text", str(text), "--chats", str(chats)]
    reached = json.loads(train(bundle, tmp_path / "head", "--steps=6", *known))
    assert [item["size"] for item in reached] == [5, 4, 8, 16, 30]
    assert all(1.0 <= item["acceptance_length"] <= 1 + item["depth"] for item in reached)

    manifest = read_manifest(tmp_path / "head")
    identity = Bundle.open(bundle).manifest.identity
    assert (manifest.name, manifest.head.draft_vocab_size) == ("head", 100)
    assert manifest.identity.target_hash == identity.source_sha256
    assert manifest.identity.tokenizer_hash == identity.tokenizer_sha256
    assert manifest.trained_len == 0  # its texts were short: they say nothing of how far it is good
    head = load_head(tmp_path / "head")
    embedding = torch.tensor(Bundle.open(bundle).embedding().tolist())
    lm_head = torch.tensor(Bundle.open(bundle).lm_head(head.draft_to_target.numpy()).tolist())
    torch.testing.assert_close(head.embedding, embedding, atol=1e-3, rtol=1e-3)
    torch.testing.assert_close(head.lm_head, lm_head, atol=1e-3, rtol=1e-3)

    corpus = tmp_path / "head.work" / "corpus"
    texts = {file.name: file.read_bytes() for file in corpus.iterdir()}
    train(bundle, tmp_path / "head", "--steps=9", *known)
    assert texts == {file.name: file.read_bytes() for file in corpus.iterdir()}
    state = torch.load(tmp_path / "head.work" / "state.pt", weights_only=True)
    assert state["place"]["step"] == 9


def test_only_heads_of_the_final_norms_features_are_trained(bundle: Path, tmp_path: Path) -> None:
    from starsd_server.train.run import Plan, head_config

    opened = Bundle.open(bundle)
    taps = replace(opened, manifest=replace(opened.manifest, feature_layers=(0, 1), projection="00"))
    with pytest.raises(BundleError, match="only EAGLE-1 heads are trained here"):
        head_config(taps, Plan(chat_tokens=1))
