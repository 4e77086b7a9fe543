"""`starsd monitor` as a user runs it: real publisher process, real sockets, a real terminal."""

import fcntl
import gzip
import json
import os
import pty
import re
import resource
import select
import shutil
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
STARSD = [sys.executable, "-m", "starsd_edge", "monitor"]
PATIENCE_S = 60.0


def environment() -> dict[str, str]:
    paths = [str(ROOT), str(ROOT / "server"), str(ROOT / "jetson"), str(ROOT / "deploy")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "LC_ALL": "C.UTF-8", "TERM": "xterm-256color"}


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    """A service of twelve devices, which publishes ten times as fast as its own clock runs."""
    child = subprocess.Popen(
        [sys.executable, "-m", "tests.core.monitor.service", "12", "20"],
        stdout=subprocess.PIPE,
        cwd=ROOT,
        env=environment(),
        text=True,
    )
    assert child.stdout is not None
    yield child.stdout.readline().strip()
    child.kill()
    child.wait()
    child.stdout.close()


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*STARSD, *arguments],
        capture_output=True,
        text=True,
        env=environment(),
        timeout=PATIENCE_S,
        check=False,
    )


def test_once_prints_json_for_scripts(endpoint: str) -> None:
    done = run(endpoint, "--once", "--json", "--for", "1")
    assert done.returncode == 0, done.stderr
    (service,) = json.loads(done.stdout)["services"]
    assert (service["link"], len(service["devices"])) == ("up", 12)
    assert service["tokens_per_s"] > 0


def test_once_prints_markdown_for_people(endpoint: str) -> None:
    done = run(endpoint, "--once", "--for", "1")
    assert "| orin-05 | plain |" in done.stdout


def test_once_says_why_a_service_is_not_there() -> None:
    done = run("127.0.0.1:9", "--once", "--json")
    assert done.returncode == 1
    (service,) = json.loads(done.stdout)["services"]
    assert service["link"] == "server down"
    assert "is the service running" in service["link_advice"]


def test_stream_prints_a_line_each_time(endpoint: str) -> None:
    done = run("stream", endpoint, "--count", "2", "--every", "0.5")
    assert [len(json.loads(line)["services"]) for line in done.stdout.splitlines()] == [1, 1]


def test_stream_of_csv_has_one_head(endpoint: str) -> None:
    lines = run("stream", endpoint, "--csv", "--count", "2", "--every", "1").stdout.splitlines()
    assert sum(line.startswith("service,device,state") for line in lines) == 1
    assert len(lines) == 1 + 2 * 12


def test_a_recording_shows_the_same_devices_again(endpoint: str, tmp_path: Path) -> None:
    recorded = run("record", str(tmp_path / "a.gz"), endpoint, "--for", "1.5")
    assert "snapshots" in recorded.stdout
    (service,) = json.loads(run("replay", str(tmp_path / "a.gz"), "--once", "--json").stdout)["services"]
    assert len(service["devices"]) == 12
    assert service["tokens_per_s"] > 0


def test_a_recording_of_which_nothing_fits_the_disk_leaves_no_file(endpoint: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [*STARSD, "record", str(tmp_path / "a"), endpoint, "--for", "1"],
        capture_output=True,
        text=True,
        env=environment(),
        timeout=PATIENCE_S,
        check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0)),
    )
    assert done.returncode == 5
    assert "the disk is full" in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--json"], "go with --once"),
        ([], "no terminal"),
        (["10.0.0.1:7732", "--once"], "not known here"),
        (["tcp://desk", "--once"], "starsd keys"),
        (["replay", "/nowhere/a", "--once"], "/nowhere/a"),
        (["replay", "spoilt.gz", "--once"], "not a recording"),
        (["record", "/dev/full", "127.0.0.1:9", "--for", "1"], "/dev/full: the disk is full"),
        (["export", "--listen", "127.0.0.1:99999", "127.0.0.1:9"], "port 0 to 65535"),
    ],
)
def test_mistakes_are_told_in_one_line(arguments: list[str], says: str, tmp_path: Path) -> None:
    packed = bytearray(gzip.compress(b"a recording" * 1000))
    packed[12:20] = b"\xff" * 8
    (tmp_path / "spoilt.gz").write_bytes(packed)
    arguments = [str(tmp_path / word) if word.endswith(".gz") else word for word in arguments]
    done = subprocess.run(
        [*STARSD, *arguments],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        env={**environment(), "STARSD_KEYS": str(tmp_path)},
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode != 0
    assert done.stderr.count("\n") == 1
    assert says in done.stderr


class Pty:
    """A program on a pseudo-terminal of a given size, and what it wrote."""

    def __init__(self, command: list[str], columns: int, lines: int, **extra: str) -> None:
        self.master, slave = pty.openpty()
        set_size(slave, columns, lines)
        self.before = termios.tcgetattr(slave)
        self.slave = slave
        self.child = subprocess.Popen(
            command,
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env={**environment(), **extra},
            start_new_session=True,
        )
        self.seen = ""

    def read(self, until: str) -> str:
        """Everything written up to and with `until`, which is cut off what is seen next."""
        deadline = time.monotonic() + PATIENCE_S
        while until not in self.seen:
            assert time.monotonic() < deadline, f"no {until!r} in {self.seen[-2000:]!r}"
            if select.select([self.master], [], [], 0.2)[0]:
                self.seen += os.read(self.master, 65536).decode("utf-8", "replace")
        found, _, self.seen = self.seen.partition(until)
        return found + until

    def press(self, keys: str) -> None:
        os.write(self.master, keys.encode())

    def close(self) -> None:
        if self.child.poll() is None:
            self.child.kill()
        self.child.wait()
        os.close(self.master)
        os.close(self.slave)


def set_size(descriptor: int, columns: int, lines: int) -> None:
    fcntl.ioctl(descriptor, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))


@pytest.fixture
def screen(endpoint: str) -> Iterator[Pty]:
    terminal = Pty([*STARSD, endpoint], 80, 24)
    yield terminal
    terminal.close()


def test_the_screen_comes_up_answers_keys_and_gives_the_terminal_back(screen: Pty) -> None:
    screen.read("orin-05")
    screen.press("?")
    screen.read("Keys")
    screen.press("\x1b[6~")
    screen.press("\x1b")
    screen.read("orin-05")  # of the overview alone: before it is back, "/" would be taken for a part of Alt-/
    screen.press("/orin-02\r")
    screen.read("filter: orin-02")
    screen.press("b")
    screen.read("VDD_IN")
    screen.press("q")
    screen.read("\x1b[?1049l")
    assert screen.child.wait(PATIENCE_S) == 0
    assert termios.tcgetattr(screen.slave) == screen.before


def test_big_q_leaves_the_last_screen_standing(screen: Pty) -> None:
    screen.read("orin-05")
    screen.press("Q")
    screen.read("\x1b[?1049l")
    screen.read("orin-05")
    assert screen.child.wait(PATIENCE_S) == 0


def test_a_changed_size_is_drawn_anew(screen: Pty) -> None:
    screen.read("orin-05")
    set_size(screen.slave, 120, 40)
    screen.read("LINK95")  # a column that 80 cells have no room for


def test_only_changed_lines_are_written(screen: Pty) -> None:
    """Frozen, the next device is chosen: its line and that of the one before change, no other."""
    screen.read("orin-05")  # frozen before there are devices, there is none to choose
    screen.press("f")
    screen.read("FROZEN")
    screen.read("\x1b[?2026l")
    screen.press("j")
    written = screen.read("\x1b[?2026l")
    assert len(re.findall(r"\x1b\[\d+;1H", written)) == 2


def test_sigterm_gives_the_terminal_back(screen: Pty) -> None:
    screen.read("orin-05")
    screen.child.terminate()
    screen.read("\x1b[?1049l")
    screen.child.wait(PATIENCE_S)
    assert termios.tcgetattr(screen.slave) == screen.before


def test_no_color_draws_without_colours(endpoint: str) -> None:
    terminal = Pty([*STARSD, endpoint], 80, 24, NO_COLOR="1")
    written = terminal.read("orin-05")
    terminal.close()
    assert not re.search(r"\x1b\[(?:[0-9]+;)*(?:3[0-7]|9[0-7])(?:;[0-9]+)*m", written)


@pytest.mark.skipif(shutil.which("tmux") is None, reason="tmux is not installed")
def test_in_tmux(endpoint: str, tmp_path: Path) -> None:
    """What tmux holds as the pane's content after all that was written is a whole screen."""
    tmux = ["tmux", "-S", str(tmp_path / "socket"), "-f", "/dev/null"]
    command = " ".join([*STARSD, endpoint])
    start = [*tmux, "new-session", "-d", "-x", "80", "-y", "24", command]
    subprocess.run(start, env=environment(), check=True)
    try:
        deadline = time.monotonic() + PATIENCE_S
        while True:
            capture = [*tmux, "capture-pane", "-p"]
            lines = subprocess.run(capture, capture_output=True, text=True, check=True).stdout.splitlines()
            if len(lines) == 24 and "q quit" in lines[23] and any("orin-11" in line for line in lines):
                break
            assert time.monotonic() < deadline, lines
        assert "starsd monitor" in lines[0]
        assert sum("drafting" in line for line in lines) >= 8
    finally:
        subprocess.run([*tmux, "kill-server"], check=False)
