"""From a bundle to something that speaks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from starsd_edge.bundle import Bundle
from starsd_edge.chat.answer import AnswerEnd, AnswerPiece
from starsd_edge.chat.conversation import Conversation
from starsd_edge.chat.settings import ChatSettings
from starsd_edge.cli.runtime import READ_REPORT_S, ModelChoice, model_name, open_speaker, read_ahead
from starsd_edge.cli.verified import known_whole
from starsd_edge.errors import BundleError
from tests.cli.tiny_bundle import make_bundle


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return Bundle.open(make_bundle(tmp_path_factory.mktemp("bundle")))


def test_model_is_named_as_its_folder_was_and_a_link_to_it_by_the_link(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A deployed release links to a folder whose name is a hash."""
    (tmp_path / "0f3c").mkdir()
    (tmp_path / "vicuna-7b-int4").symlink_to("0f3c")
    monkeypatch.chdir(tmp_path / "0f3c")
    assert model_name(ModelChoice("../vicuna-7b-int4/")) == "vicuna-7b-int4"
    assert model_name(ModelChoice(".")) == "0f3c"


def test_loading_tells_how_far_it_is_once_it_takes_long(bundle: Bundle) -> None:
    """A clock on which every block of the file takes a second more than the patience."""

    def slow() -> Iterator[float]:
        now = 0.0
        while True:
            yield now
            now += READ_REPORT_S + 1.0

    said: list[str] = []
    read_ahead(bundle, bundle.manifest.files, said.append, slow().__next__)
    assert said
    assert all(line.startswith("loading tiny: ") for line in said)
    assert said[-1].endswith(" GB")


def test_a_changed_byte_is_found_on_load_and_what_is_known_is_not_hashed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STARSD_CACHE", str(tmp_path / "cache"))
    bundle = Bundle.open(make_bundle(tmp_path))
    assert set() == known_whole(bundle)
    read_ahead(bundle, bundle.manifest.files, lambda line: None)
    assert set(bundle.manifest.files) == known_whole(bundle)
    for name in bundle.manifest.files:
        file = bundle.path / name
        content = file.read_bytes()
        file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        with pytest.raises(BundleError, match=f"{name} is damaged"):
            read_ahead(bundle, bundle.manifest.files, lambda line: None)
        file.write_bytes(content)
    read_ahead(bundle, bundle.manifest.files, lambda line: None)


def test_only_what_is_read_is_hashed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who runs an engine reads none of the weights that it was built from."""
    monkeypatch.setenv("STARSD_CACHE", str(tmp_path / "cache"))
    bundle = Bundle.open(make_bundle(tmp_path))
    read_ahead(bundle, ["tokenizer.json"], lambda line: None)
    assert {"tokenizer.json"} == known_whole(bundle)
    read_ahead(bundle, ["model.onnx"], lambda line: None)
    assert {"tokenizer.json", "model.onnx"} == known_whole(bundle)


def test_loading_that_is_quick_says_nothing(bundle: Bundle) -> None:
    said: list[str] = []
    read_ahead(bundle, bundle.manifest.files, said.append, lambda: 0.0)
    assert [] == said


def test_without_a_service_the_device_drafts_repeats_itself_and_says_the_same(bundle: Bundle) -> None:
    """A random model soon says the same again and again; whether drafts of that pay is up to the machine."""
    texts = []
    for draft in (True, False):
        speaker = open_speaker(bundle, ModelChoice(str(bundle.path)), None, report=lambda line: None)
        conversation = Conversation(speaker, ChatSettings(max_tokens=120, draft=draft))
        events = list(conversation.ask("Who?"))
        speaker.close()
        texts.append("".join(event.text for event in events if isinstance(event, AnswerPiece)))
        assert isinstance(events[-1], AnswerEnd)
        assert draft or events[-1].figures.tree_rounds == 0
    assert texts[0] == texts[1]


@pytest.mark.parametrize(("beyond", "num_lines"), [(0, 0), (1, 1)])
def test_a_context_longer_than_the_models_is_said_to_be_shortened(
    bundle: Bundle, beyond: int, num_lines: int
) -> None:
    longest = bundle.manifest.max_len
    choice = ModelChoice(str(bundle.path), context=longest + beyond)
    said: list[str] = []
    speaker = open_speaker(bundle, choice, None, report=said.append)
    speaker.close()
    assert longest == speaker.max_len
    assert num_lines == len([line for line in said if f"made for {longest} tokens" in line])
