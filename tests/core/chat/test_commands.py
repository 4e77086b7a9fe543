"""Slash commands, without a terminal."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import pytest

from starsd_edge.chat.commands import COMMANDS, Action, complete_command, is_command, run_command
from starsd_edge.chat.conversation import Conversation
from starsd_edge.chat.screen import fold
from starsd_edge.chat.settings import ChatSettings
from starsd_edge.decoding.sampling import SamplingParams
from starsd_edge.errors import UsageError
from starsd_edge.text.template import Message, Role
from tests.core.chat.toys import toy_speaker


@pytest.fixture
def conversation() -> Conversation:
    return Conversation(toy_speaker(script="Yes."))


def asked(conversation: Conversation) -> Conversation:
    for _ in conversation.ask("Who?"):
        pass
    return conversation


@pytest.mark.parametrize(
    ("expected", "line"),
    [
        (True, "/help"),
        (True, "/?"),
        (True, "/set temperature 1"),
        (True, "/nonsense"),
        (False, "hello /help"),
        (False, "/usr/bin/env is a path"),
        (False, "/help\nme with this"),
        (False, "/ alone"),
        (True, "exit"),
        (True, " quit "),
        (False, "exit the shell how?"),
        (False, ""),
    ],
)
def test_what_counts_as_a_command(expected: bool, line: str) -> None:
    assert expected == is_command(line)


@pytest.mark.parametrize(
    ("expected", "line"),
    [
        (["/save", "/set", "/show", "/stats", "/system"], "/s"),
        (["/help"], "/he"),
        (["temperature"], "/set te"),
        (["on", "off"], "/draft "),
        (["drop-oldest"], "/set full_window d"),
        (["model"], "/show mod"),
        (["history"], "/clear h"),
        ([], "/save fi"),
    ],
)
def test_completion(expected: list[str], line: str) -> None:
    assert sorted(expected) == sorted(complete_command(line))


def test_help_lists_every_command(conversation: Conversation) -> None:
    lines = run_command(conversation, "/help").lines
    assert all(any(line.startswith(name) for line in lines) for name in COMMANDS)


@pytest.mark.parametrize("name", ["/bye", "/exit", "/quit", "exit", "quit"])
def test_ways_to_leave(conversation: Conversation, name: str) -> None:
    assert Action.LEAVE is run_command(conversation, name).action


def test_the_last_answer_is_copied_and_there_must_be_one(conversation: Conversation) -> None:
    with pytest.raises(UsageError, match="no answer"):
        run_command(conversation, "/copy")
    assert "Yes." == run_command(asked(conversation), "/copy").text


def test_regenerating_greedily_says_that_nothing_will_change(conversation: Conversation) -> None:
    outcome = run_command(asked(conversation), "/regen")
    assert Action.REGENERATE is outcome.action
    assert "temperature 0" in outcome.lines[0]
    with pytest.raises(UsageError, match="nothing to answer"):
        next(Conversation(toy_speaker()).regenerate())


def test_clear_forgets_what_was_said_and_keeps_the_settings(conversation: Conversation) -> None:
    run_command(conversation, "/set temperature 0.5")
    run_command(asked(conversation), "/clear")
    assert [] == conversation.messages
    assert 0.5 == conversation.settings.sampling.temperature


def test_a_saved_chat_is_loaded_whole(conversation: Conversation, tmp_path: Path) -> None:
    file = tmp_path / "a chat.json"
    run_command(conversation, "/set stop \\n É")
    run_command(asked(conversation), f"/save {file}")
    other = Conversation(toy_speaker())
    run_command(other, f"/load {file}")
    assert conversation.messages == other.messages
    assert conversation.settings == other.settings


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        "{}",
        '{"starsd_chat": 99}',
        '{"starsd_chat": 1, "messages": 5, "settings": {}}',
        '{"starsd_chat": 1, "messages": [{"role": "robot", "content": ""}], "settings": {}}',
        '{"starsd_chat": 1, "messages": [], "settings": {"temperature": "warm"}}',
    ],
)
def test_a_damaged_file_changes_nothing(conversation: Conversation, tmp_path: Path, content: str) -> None:
    file = tmp_path / "chat.json"
    file.write_text(content)
    conversation.messages = [Message(Role.USER, "kept")]
    with pytest.raises(UsageError, match=r"chat\.json"):
        run_command(conversation, f"/load {file}")
    assert [Message(Role.USER, "kept")] == conversation.messages
    assert ChatSettings() == conversation.settings


def test_a_failed_save_leaves_the_older_file(conversation: Conversation, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot save"):
        run_command(conversation, f"/save {tmp_path}/missing/chat.json")
    file = tmp_path / "chat.json"
    run_command(conversation, f"/save {file}")
    assert 1 == json.loads(file.read_text())["starsd_chat"]
    assert [file] == list(tmp_path.iterdir())


def test_a_new_saved_chat_is_its_users_alone_and_an_older_one_keeps_its_mode(
    conversation: Conversation, tmp_path: Path
) -> None:
    new, old = tmp_path / "new.json", tmp_path / "old.json"
    old.touch()
    old.chmod(0o640)
    for file in (new, old):
        run_command(asked(conversation), f"/save {file}")
    assert [0o600, 0o640] == [stat.S_IMODE(file.stat().st_mode) for file in (new, old)]


@pytest.mark.parametrize("exists", [True, False])
def test_a_link_is_saved_through(conversation: Conversation, tmp_path: Path, exists: bool) -> None:
    """It was destroyed, and the file it named was left as it was."""
    link, file = tmp_path / "link.json", tmp_path / "file.json"
    link.symlink_to(file.name)
    if exists:
        file.write_text("older")
    run_command(asked(conversation), f"/save {link}")
    assert link.is_symlink()
    assert 1 == json.loads(file.read_text())["starsd_chat"]
    assert {link, file} == set(tmp_path.iterdir())


@pytest.mark.parametrize("verb", ["/save", "/load"])
def test_a_pipe_or_device_is_neither_saved_to_nor_loaded(
    conversation: Conversation, tmp_path: Path, verb: str
) -> None:
    """A device was replaced by a file; a pipe without a writer kept the chat waiting for ever."""
    pipe, link = tmp_path / "pipe", tmp_path / "link"
    os.mkfifo(pipe)
    link.symlink_to(pipe)
    for place in (pipe, link):
        with pytest.raises(UsageError, match="no ordinary file"):
            run_command(conversation, f"{verb} {place}")
    assert stat.S_ISFIFO(pipe.stat().st_mode)


@pytest.mark.parametrize("content", ["# A title", "", "[" * 100_000, "\udcff", "{}"])
def test_a_file_of_another_kind_is_said_to_be_no_chat(
    conversation: Conversation, tmp_path: Path, content: str
) -> None:
    file = tmp_path / "README.md"
    file.write_text(content, errors="surrogateescape")
    with pytest.raises(UsageError, match="is not a saved chat of this program"):
        run_command(conversation, f"/load {file}")


def test_statistics_and_views(conversation: Conversation) -> None:
    assert "No answer yet." == run_command(conversation, "/stats").lines[0]
    assert "Nothing was said yet." == run_command(conversation, "/show conversation").lines[0]
    asked(conversation)
    assert any("tokens a round" in line for line in run_command(conversation, "/stats").lines)
    assert "400 tokens" in "\n".join(run_command(conversation, "/show model").lines)
    assert ("temperature = 0.0",) == run_command(conversation, "/show temperature").lines
    with pytest.raises(UsageError, match="nothing called 'x'"):
        run_command(conversation, "/show x")


def test_drafting_is_switched(conversation: Conversation) -> None:
    run_command(conversation, "/draft off")
    assert conversation.settings.draft is False
    with pytest.raises(UsageError, match="on or /draft off"):
        run_command(conversation, "/draft maybe")


def test_a_changed_setting_is_shown_with_what_the_model_suggested(conversation: Conversation) -> None:
    suggested = SamplingParams(temperature=0.2, top_p=0.9)
    conversation = Conversation(conversation.backend, ChatSettings(sampling=suggested))
    assert ("temperature = 0.2",) == run_command(conversation, "/show temperature").lines
    run_command(conversation, "/set temperature 0.7")
    run_command(conversation, "/set stop END")
    assert ("temperature = 0.7  (began with 0.2)",) == run_command(conversation, "/show temperature").lines
    shown = run_command(conversation, "/show").lines
    assert "top_p               0.9" in shown
    assert "stop                END  (began with (none))" in shown


@pytest.mark.parametrize("place", ["/", ".", "~nobody-of-this-name/x", "a\0b", "n" * 300, "/dev/null/x"])
@pytest.mark.parametrize("verb", ["/save", "/load"])
def test_a_place_that_holds_no_file_is_one_line(conversation: Conversation, verb: str, place: str) -> None:
    """Each was an exception that ended the chat, and the conversation with it."""
    with pytest.raises(UsageError):
        run_command(conversation, f"{verb} {place}")


def test_a_file_that_is_not_there_is_named_once(conversation: Conversation, tmp_path: Path) -> None:
    with pytest.raises(UsageError) as refused:
        run_command(conversation, f"/load {tmp_path}/x")
    assert f"cannot load {tmp_path}/x: No such file or directory" == str(refused.value)


def test_long_lines_of_a_table_go_on_in_their_column() -> None:
    assert ["key  one two", "     three"] == fold("key  one two three", 13)
    assert ["short"] == fold("short", 80)
    assert ["one two", "three"] == fold("one two three", 8)
