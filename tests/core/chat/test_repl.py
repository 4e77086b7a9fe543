"""The chat in a real terminal."""

from __future__ import annotations

import base64
import json
import os
import signal
import stat
import sys
from pathlib import Path

import pytest

from starsd_edge.chat.answer import AnswerEnd, FinishReason
from starsd_edge.chat.conversation import Conversation
from starsd_edge.chat.keyboard import interrupts_stop
from starsd_edge.chat.repl import is_open_block, unquote_block
from tests.core.chat.terminal import Terminal
from tests.core.chat.toys import toy_speaker

ROOT = Path(__file__).parents[3]
FOX = "The **quick** brown fox jumps over the lazy dog."


def chat(columns: int = 80, environ: dict[str, str] | None = None, **options: object) -> Terminal:
    paths = [str(ROOT), *sys.path]
    return Terminal(
        [sys.executable, "-m", "tests.core.chat.toy_chat", json.dumps(options)],
        {"PYTHONPATH": os.pathsep.join(p for p in paths if p), **(environ or {})},
        columns,
    )


def enter(terminal: Terminal, keys: str) -> None:
    """Type once the prompt waits for it."""
    terminal.expect(lambda _: terminal.cursor_line == ">>>")
    terminal.send(keys)


def leave(terminal: Terminal) -> None:
    enter(terminal, "\x04")
    terminal.expect("left the chat")
    assert 0 == terminal.expect_exit()


def test_an_answer_streams_in_and_ctrl_d_leaves() -> None:
    with chat(script=FOX) as terminal:
        enter(terminal, "Who?\r")
        terminal.expect("The quick brown fox jumps over the lazy dog.")
        terminal.expect("tokens/s")
        leave(terminal)
        assert b"\x1b[1mquick" in terminal.raw


def test_ctrl_c_stops_the_answer_and_not_the_chat() -> None:
    with chat(script="fox " * 300, max_len=2000, round_s=0.02) as terminal:
        enter(terminal, "Go\r")
        terminal.expect("fox fox fox")
        terminal.send("\x03")
        terminal.expect("stopped")
        assert "fox fox fox" in terminal.text
        enter(terminal, "/show conversation\r")
        terminal.expect("assistant: fox fox")
        leave(terminal)


def test_typing_ahead_waits_for_the_prompt_and_spoils_nothing() -> None:
    answer = " ".join(f"word{number}" for number in range(40))
    with chat(script=answer, max_len=2000, round_s=0.01) as terminal:
        enter(terminal, "Go\r")
        terminal.expect("word3 ")
        terminal.send("the next question")
        terminal.expect("tokens/s")
        terminal.expect(lambda _: terminal.cursor_line == ">>> the next question")
        assert 1 == terminal.raw.count(b"next question")
        terminal.send("\x15")
        leave(terminal)


def test_ctrl_c_at_an_empty_prompt_says_how_to_leave() -> None:
    with chat(script=FOX) as terminal:
        enter(terminal, "\x03")
        terminal.expect("Ctrl-D or /bye leaves.")
        enter(terminal, "/bye\r")
        terminal.expect("left the chat")


def test_ctrl_c_right_behind_the_question_takes_it_back() -> None:
    with chat(script=FOX) as terminal:
        enter(terminal, "Who?\r\x03")
        terminal.expect("stopped")
        enter(terminal, "/show conversation\r")
        terminal.expect("Nothing was said yet.")
        leave(terminal)


def test_ctrl_c_before_the_answer_has_begun_ends_it() -> None:
    conversation = Conversation(toy_speaker(script=FOX))
    with interrupts_stop(conversation.backend) as interrupts:
        os.kill(os.getpid(), signal.SIGINT)
        for event in conversation.ask("Who?"):
            interrupts.insist()
            last = event
    assert isinstance(last, AnswerEnd)
    assert FinishReason.CANCELLED is last.reason


def test_a_pasted_text_of_several_lines_is_one_message() -> None:
    with chat(script="Yes.") as terminal:
        enter(terminal, "\x1b[200~first line\nsecond line\n/bye\x1b[201~")
        terminal.expect("second line")
        terminal.send("\r")
        terminal.expect("Yes.")
        enter(terminal, "/show conversation\r")
        terminal.expect("user: first line\nsecond line\n/bye")
        leave(terminal)


@pytest.mark.parametrize("keys", ['"""one\rtwo"""\r', "one\x1b\rtwo\r"], ids=["three quotes", "Alt-Enter"])
def test_several_lines_can_be_typed(keys: str) -> None:
    with chat(script="Yes.") as terminal:
        enter(terminal, keys)
        terminal.expect("Yes.")
        enter(terminal, "/show conversation\r")
        terminal.expect("user: one\ntwo\nassistant: Yes.")
        leave(terminal)


def test_the_editor_writes_a_message(tmp_path: Path) -> None:
    editor = tmp_path / "editor"
    editor.write_text("#!/bin/sh\nprintf 'from the editor' > \"$1\"\n")
    editor.chmod(0o755)
    with chat(environ={"EDITOR": str(editor), "VISUAL": str(editor)}, script="Yes.") as terminal:
        enter(terminal, "\x07")
        terminal.expect("from the editor")
        terminal.send("\r")
        terminal.expect("Yes.")
        leave(terminal)


def test_history_survives_the_chat_is_private_and_can_be_cleared(tmp_path: Path) -> None:
    history = tmp_path / "state"
    with chat(script="Yes.", history=str(history)) as terminal:
        enter(terminal, "a remarkable question\r")
        terminal.expect("Yes.")
        leave(terminal)
    file = history / "chat_history"
    assert 0o600 == stat.S_IMODE(file.stat().st_mode)
    with chat(script="Yes.", history=str(history)) as terminal:
        enter(terminal, "\x1b[A")
        terminal.expect(">>> a remarkable question")
        terminal.send("\x15/clear history\r")
        terminal.expect("The history file is empty.")
        leave(terminal)
    assert b"remarkable" not in file.read_bytes()


def test_commands_are_completed_explained_and_corrected() -> None:
    with chat(script=FOX) as terminal:
        enter(terminal, "/he\t")
        terminal.expect(">>> /help")
        terminal.send("\r")
        terminal.expect("write the conversation and its settings")
        enter(terminal, "/nonsense\r")
        terminal.expect("there is no command /nonsense; /help lists them all")
        enter(terminal, "/set temperature warm\r")
        terminal.expect("temperature: 'warm' is not a number")
        leave(terminal)


def test_a_saved_chat_goes_on(tmp_path: Path) -> None:
    file = tmp_path / "chat.json"
    with chat(script="Yes.") as terminal:
        enter(terminal, "/set temperature 0.5\r")
        terminal.expect("temperature = 0.5")
        enter(terminal, "Who?\r")
        terminal.expect("Yes.")
        enter(terminal, f"/save {file}\r")
        terminal.expect("Saved 2 messages")
        leave(terminal)
    with chat(script="Yes.") as terminal:
        enter(terminal, f"/load {file}\r")
        terminal.expect("Loaded 2 messages")
        enter(terminal, "/show\r")
        terminal.expect("temperature         0.5")
        enter(terminal, "/show conversation\r")
        terminal.expect("user: Who?\nassistant: Yes.")
        leave(terminal)


def test_copy_reaches_the_terminal_s_clipboard() -> None:
    with chat(script=FOX) as terminal:
        enter(terminal, "Who?\r")
        terminal.expect("lazy dog.")
        enter(terminal, "/copy\r")
        terminal.expect("Copied 48 characters.")
        leave(terminal)
        assert base64.b64encode(FOX.encode()) in terminal.raw


def test_statistics_and_the_status_line_tell_speed_and_link() -> None:
    with chat(script=FOX) as terminal:
        terminal.expect("decoding plainly")
        enter(terminal, "Who?\r")
        terminal.expect("lazy dog.")
        enter(terminal, "/stats\r")
        terminal.expect("tokens a round")
        enter(terminal, "/draft off\r")
        terminal.expect("only the speed changes")
        leave(terminal)


def test_finished_lines_are_never_drawn_again() -> None:
    """Every word of the answer is written to the terminal once, though a status line follows it down."""
    lines = [f"word{number}." for number in range(60)]
    with chat(script="\n".join(lines), max_len=3000) as terminal:
        enter(terminal, "Go\r")
        terminal.expect("word59.")
        leave(terminal)
        for line in lines:
            assert 1 == terminal.raw.count(line.encode())
        assert lines == [line for line in terminal.lines if line.startswith("word")]


def test_an_answer_follows_a_terminal_that_becomes_narrower() -> None:
    words = " ".join(f"word{number:03}" for number in range(120))
    with chat(columns=80, script=words, max_len=3000, round_s=0.01) as terminal:
        enter(terminal, "Go\r")
        terminal.expect("word020")
        terminal.resize(40, 24)
        terminal.expect("tokens/s")
        *_, before_last, last = (line for line in terminal.lines if line.startswith("word"))
        assert len(before_last) == 39  # five words, and the last column stays free
        assert last.split()[-1] == "word119"
        leave(terminal)


def test_words_wrap_and_wide_letters_count_double() -> None:
    with chat(
        columns=30, script="The quick brown fox jumps over the lazy dog 你好世界你好世界你好世界"
    ) as terminal:
        enter(terminal, "Go\r")
        terminal.expect("tokens/s")
        assert "The quick brown fox jumps\nover the lazy dog" in terminal.text
        leave(terminal)


def test_no_colour_means_no_colour() -> None:
    with chat(environ={"NO_COLOR": "1"}, script="# Title\n`code`") as terminal:
        enter(terminal, "Go\r")
        terminal.expect("code")
        leave(terminal)
        assert b"\x1b[36m" not in terminal.raw
        assert b";36m" not in terminal.raw


def test_an_answer_that_fails_is_one_line_and_the_chat_goes_on() -> None:
    with chat(script="Yes.", max_len=100) as terminal:
        enter(terminal, "fox " * 150 + "\r")
        terminal.expect("shorten it or split it")
        enter(terminal, "short\r")
        terminal.expect("Yes.")
        leave(terminal)


@pytest.mark.parametrize(
    ("expected", "text"),
    [
        (True, '"""'),
        (True, '"""a\nb'),
        (False, '"""a\nb"""'),
        (False, 'say """a"""'),
        (False, '""""""'),
    ],
)
def test_three_quotes_keep_a_text_open(expected: bool, text: str) -> None:
    assert expected == is_open_block(text)


def test_quotes_are_taken_off_a_closed_text_only() -> None:
    assert "a\nb" == unquote_block('"""\na\nb\n"""')
    assert 'say """a"""' == unquote_block('say """a"""')


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("answering", [False, True])
def test_a_signal_that_ends_the_chat_gives_the_terminal_back(number: signal.Signals, answering: bool) -> None:
    """It was left raw, and with every paste in brackets."""
    with chat(script="fox " * 3000, max_len=20000, round_s=0.02) as terminal:
        before = terminal.modes
        terminal.expect(lambda _: terminal.cursor_line == ">>>")
        if answering:
            terminal.send("Go\r")
            terminal.expect("fox fox fox")
        assert before != terminal.modes
        terminal.process.send_signal(number)
        assert 128 + number == terminal.expect_exit()
        assert before == terminal.modes
        assert terminal.raw.rindex(b"\x1b[?2004l") > terminal.raw.rindex(b"\x1b[?2004h")


@pytest.mark.parametrize("editor", ["'unbalanced", "/nowhere/editor", "false"])
def test_an_editor_that_cannot_be_run_ends_no_chat(editor: str) -> None:
    with chat(script=FOX, environ={"EDITOR": editor, "VISUAL": editor}) as terminal:
        enter(terminal, "/edit\r")
        terminal.expect("the editor cannot be run")
        enter(terminal, "/save /\r")
        terminal.expect("cannot save to /")
        leave(terminal)
