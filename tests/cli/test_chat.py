"""`starsd chat` as a user starts it: processes, pipes, a terminal, a bundle on disk."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from starsd_edge.cli.main import main
from starsd_edge.cli.streams import open_streams
from tests.cli.tiny_bundle import make_bundle
from tests.core.chat.terminal import Terminal

ROOT = Path(__file__).parents[2]
STARSD = [sys.executable, "-m", "starsd_edge"]
# Nothing listens there.
NOBODY = "tcp://127.0.0.1:9"


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_bundle(tmp_path_factory.mktemp("bundle"))


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    """The user's files lie in a folder of the test."""
    paths = [str(ROOT), *(path for path in sys.path if path)]
    homes = {f"STARSD_{name}": str(tmp_path / name.lower()) for name in ("STATE", "CONFIG", "KEYS")}
    return {**homes, "PYTHONPATH": os.pathsep.join(paths)}


@dataclass(frozen=True)
class Done:
    code: int
    out: str
    err: str


@pytest.fixture
def run(
    environ: dict[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., Done]:
    """`starsd chat` in this process, with a pipe for its input."""
    for name, value in environ.items():
        monkeypatch.setenv(name, value)

    def start(*arguments: str, stdin: str = "") -> Done:
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        with pytest.raises(SystemExit) as left:
            main(["chat", "--attach", "off", *arguments])
        out, err = capsys.readouterr()
        return Done(int(left.value.code or 0), out, err)

    return start


def test_a_question_from_a_pipe_gets_a_plain_answer(bundle: Path, run: Callable[..., Done]) -> None:
    """And the same seed the same text, whether asked by argument, by pipe, or as JSON."""
    options = ["--bundle", str(bundle), "--max-tokens", "12", "--set", "temperature=1", "--seed", "7"]
    piped = run(*options, stdin="Who?\n")
    assert 0 == piped.code, piped.err
    assert piped.out.endswith("\n")
    asked = run(*options, "--json", "Who?")
    report = json.loads(asked.out)
    assert report["answer"].rstrip("\n") == piped.out.rstrip("\n")
    assert {"finish_reason": "length", "completion_tokens": 12, "model": "tiny"}.items() <= report.items()


def test_a_prompt_and_a_pipe_are_one_question(bundle: Path, run: Callable[..., Done]) -> None:
    options = ["--bundle", str(bundle), "--max-tokens", "4", "--json"]
    both = json.loads(run(*options, "Summarise:", stdin="some text\n").out)
    one = json.loads(run(*options, stdin="Summarise:\n\nsome text").out)
    assert both["answer"] == one["answer"]
    assert both["prompt_tokens"] == one["prompt_tokens"]


def test_quiet_says_nothing_but_the_answer(bundle: Path, run: Callable[..., Done]) -> None:
    done = run("--bundle", str(bundle), "--max-tokens", "4", "-q", "--service", NOBODY, "Who?")
    assert "" == done.err
    assert done.out


def test_a_missing_service_changes_no_word(bundle: Path, run: Callable[..., Done]) -> None:
    options = ["--bundle", str(bundle), "--max-tokens", "16", "Who?"]
    assert run(*options).out == run("--service", NOBODY, *options).out


@pytest.mark.parametrize(
    ("exit_code", "message", "arguments"),
    [
        (2, "the input is empty", []),
        (2, "no setting 'warmth'", ["--set", "warmth=1", "Who?"]),
        (2, "NAME=VALUE", ["--set", "temperature", "Who?"]),
        (2, "leave -i out", ["--json", "-i", "Who?"]),
        (2, "no address of a draft service", ["--service", "http://somewhere", "Who?"]),
        (2, "-i needs a terminal", ["-i", "Who?"]),
        (2, "--quant is for the embedded model", ["--quant", "int3", "Who?"]),
        (2, "--service is empty", ["--service", "", "Who?"]),
        (2, "--bundle is empty", ["--bundle", "", "Who?"]),
        (2, "this machine has", ["--threads", "100000", "Who?"]),
        (3, "key", ["--service", "tcp://192.168.7.7:7731", "Who?"]),
        (4, "not a bundle", ["--bundle", "/nonexistent", "Who?"]),
        (4, "not a bundle", ["--bundle", "/nonexistent"]),
    ],
)
def test_mistakes_end_in_one_line_and_their_code(
    bundle: Path, run: Callable[..., Done], exit_code: int, message: str, arguments: list[str]
) -> None:
    done = run("--bundle", str(bundle), *arguments)
    assert (exit_code, "") == (done.code, done.out)
    assert message in done.err
    assert 1 == len(done.err.strip().splitlines())


def test_the_settings_file_stands_behind_the_flags(
    bundle: Path, environ: dict[str, str], run: Callable[..., Done]
) -> None:
    config = Path(environ["STARSD_CONFIG"]) / "config.toml"
    config.parent.mkdir()
    config.write_text(f'[chat]\nbundle = "{bundle}"\n[chat.settings]\nmax_tokens = 3\n')
    assert 3 == json.loads(run("--json", "Who?").out)["completion_tokens"]
    flagged = run("--json", "--max-tokens", "5", "Who?")
    assert 5 == json.loads(flagged.out)["completion_tokens"]
    config.write_text("[chat]\nbundel = 'x'\n")
    wrong = run("Who?")
    assert 3 == wrong.code
    assert "bundel" in wrong.err
    assert str(config) in wrong.err
    config.write_text(f'[chat]\nbundle = "{bundle}"\n[chat.settings]\ntemprature = 1\n')
    wrong = run("Who?")
    assert 3 == wrong.code
    assert f"{config}: there is no setting 'temprature'" in wrong.err


@pytest.mark.parametrize(
    ("exit_code", "says", "around"),
    [
        (5, "the answer cannot be written: No space left", ">/dev/full"),
        (0, "", ">&-"),
        (0, "", "<&-"),
        (2, "the input is not utf-8 text (byte 1)", "<latin"),
        (0, "", "</dev/null"),
    ],
)
def test_odd_streams_are_one_line_at_most(
    bundle: Path, environ: dict[str, str], tmp_path: Path, exit_code: int, says: str, around: str
) -> None:
    (tmp_path / "latin").write_bytes(b"h\xe4ll")
    strict = {"PYTHONIOENCODING": "utf-8:strict"}
    script = f'exec "$@" {around}'
    command = [
        "sh",
        "-c",
        script,
        "sh",
        *STARSD,
        "chat",
        "--attach",
        "off",
        "-q",
        "--bundle",
        str(bundle),
        "Ü",
    ]
    chat = subprocess.run(
        command, env={**os.environ, **environ, **strict}, cwd=tmp_path, capture_output=True, timeout=120
    )
    assert exit_code == chat.returncode, chat.stderr
    assert says in chat.stderr.decode()
    assert chat.stderr.count(b"\n") == bool(says)


def test_letters_that_the_output_lacks_are_written_as_escapes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An answer ended in its middle where the locale is C."""
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii"))
    open_streams()
    sys.stdout.write("größer")
    sys.stdout.flush()
    assert rb"gr\xf6\xdfer" == written.getvalue()


def test_a_reader_that_has_seen_enough_is_no_error(bundle: Path, environ: dict[str, str]) -> None:
    command = [*STARSD, "chat", "--attach", "off", "--bundle", str(bundle), "Who?"]
    chat = subprocess.Popen(
        command,
        env={**os.environ, **environ},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert chat.stdout is not None
    chat.stdout.read(1)
    chat.stdout.close()
    _, errors = chat.communicate(timeout=120)
    assert b"Traceback" not in errors
    assert 0 == chat.returncode


def test_ctrl_c_keeps_what_a_pipe_got(bundle: Path, environ: dict[str, str]) -> None:
    command = [*STARSD, "chat", "--attach", "off", "--bundle", str(bundle), "Who?"]
    chat = subprocess.Popen(
        command,
        env={**os.environ, **environ},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert chat.stdout is not None
    first = chat.stdout.read(1)
    chat.send_signal(signal.SIGINT)
    rest, errors = chat.communicate(timeout=120)
    assert b"Traceback" not in errors
    assert chat.returncode in (0, 130)  # 0 when it had said everything by then
    assert (first + rest).endswith(b"\n")


def test_a_lost_service_shows_in_the_status_line_and_nowhere_else(
    bundle: Path, environ: dict[str, str]
) -> None:
    options = ["--bundle", str(bundle), "--max-tokens", "8", "--service", NOBODY]
    with Terminal([*STARSD, "chat", *options], environ) as terminal:
        terminal.expect("tiny · 512 tokens · /help")
        terminal.expect(lambda _: terminal.cursor_line == ">>>")
        terminal.send("Who?\r")
        terminal.expect("tokens/s")
        terminal.expect(lambda _: terminal.cursor_line == ">>>")
        terminal.expect("nothing listens at")
        lines = [line for line in terminal.lines if line]
        assert [lines[-1]] == [line for line in lines if "nothing listens" in line]
        terminal.send("/bye\r")
        assert 0 == terminal.expect_exit()
    history = Path(environ["STARSD_STATE"]) / "chat_history"
    assert "Who?" in history.read_text()


@pytest.mark.parametrize("off", ["flag", "environment"])
def test_history_can_be_off(off: str, bundle: Path, environ: dict[str, str]) -> None:
    options = ["--bundle", str(bundle), "--max-tokens", "2", *(["--no-history"] if off == "flag" else [])]
    homes = {**environ, **({"STARSD_NO_HISTORY": "1"} if off == "environment" else {})}
    with Terminal([*STARSD, "chat", *options], homes) as terminal:
        terminal.expect(lambda _: terminal.cursor_line == ">>>")
        terminal.send("a remarkable question\r")
        terminal.expect("cut at the token limit")
        terminal.expect(lambda _: terminal.cursor_line == ">>>")
        terminal.send("\x1b[A")  # within the chat it is still there
        terminal.expect(lambda _: terminal.cursor_line == ">>> a remarkable question")
        terminal.send("\x15/bye\r")
        assert 0 == terminal.expect_exit()
    assert [] == [file for file in Path(environ["STARSD_STATE"]).glob("**/*") if file.is_file()]
