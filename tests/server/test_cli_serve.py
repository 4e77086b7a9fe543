"""What `starsd draft serve` makes of its options."""

from __future__ import annotations

import pty
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from starsd_edge.errors import StarSDError
from starsd_edge.link.keys import KeyPair
from starsd_server.cli_serve import command, monitor_endpoint
from starsd_server.config import ServiceConfig

from .heads import save_toy_head


@pytest.mark.parametrize(
    ("expected", "bind", "monitor"),
    [
        ("tcp://127.0.0.1:7732", "tcp://127.0.0.1:7731", None),
        ("tcp://[::1]:7732", "tcp://[::1]:7731", None),
        ("", "tcp://127.0.0.1:0", None),
        ("", "tcp://127.0.0.1:65535", None),
        ("", "ipc:///run/starsd/draft", None),
        ("", "tcp://127.0.0.1:7731", "none"),
        ("tcp://127.0.0.1:9000", "tcp://127.0.0.1:7731", "tcp://127.0.0.1:9000"),
    ],
)
def test_monitor_is_published_beside_the_service_unless_told_otherwise(
    expected: str, bind: str, monitor: str | None
) -> None:
    assert expected == monitor_endpoint(bind, monitor)


def check(head: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "starsd_edge", "draft", "serve", "--check", "--head", str(head)]
    # a port that is taken, as by the service that runs while its successor is checked
    with socket.create_server(("127.0.0.1", 0)) as taken:
        bind = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        return subprocess.run([*command, "--bind", bind], capture_output=True, text=True, check=False)


def test_check_loads_the_head_beside_a_running_service_and_leaves(tmp_path: Path) -> None:
    save_toy_head(tmp_path)
    done = check(tmp_path)
    assert (0, "starsd: heads load, the service could serve\n") == (done.returncode, done.stdout), done.stderr
    assert "loading" not in done.stderr  # a log needs no waiting for
    assert "has gone" not in done.stderr  # both processes were told to leave


def test_whoever_waits_at_a_terminal_is_told_what_for(tmp_path: Path) -> None:
    """The first start takes many seconds."""
    save_toy_head(tmp_path)
    near, far = pty.openpty()
    command = [sys.executable, "-m", "starsd_edge", "draft", "serve", "--check", "--head", str(tmp_path)]
    with open(near, "rb", buffering=0) as terminal:
        with open(far, "wb", buffering=0) as its_end:
            process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=its_end)
        assert terminal.read(4096).splitlines()[0] == b"starsd: loading the draft head ..."
        assert process.wait() == 0


def test_check_says_what_is_wrong_with_a_head(tmp_path: Path) -> None:
    done = check(tmp_path)
    assert done.returncode != 0
    assert str(tmp_path) in done.stderr.splitlines()[-1]


NO_KEY = r"usual/service\.key: no key is there; make one with `starsd keys generate --name service`"


@pytest.mark.parametrize(
    ("says", "arguments"),
    [
        ("port 0 to 65535", ["--bind", "tcp://127.0.0.1:99999"]),
        ("no address", ["--bind", "a/b"]),
        ("port 0 to 65535", ["--monitor", "tcp://127.0.0.1:99999"]),
        (NO_KEY, ["--bind", "tcp://192.0.2.1:7731"]),
        (NO_KEY, ["--monitor", "tcp://192.0.2.1:7732"]),
        ("service.key", ["--keys", "/nonexistent"]),
        ("/nonexistent: not a draft head", ["--head", "/nonexistent"]),
        ("/nonexistent: not a target", ["--target", "/nonexistent"]),
    ],
)
def test_simple_mistakes_are_told_before_anything_is_loaded(
    says: str, arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STARSD_KEYS", str(tmp_path / "usual"))
    monkeypatch.setattr("starsd_server.cli_serve.Service", None)
    with pytest.raises(StarSDError, match=says):
        command.main(arguments, standalone_mode=False)


@pytest.mark.parametrize(
    ("bind", "keys"),
    [("tcp://192.0.2.1:7731", "usual"), ("tcp://127.0.0.1:7731", ""), ("ipc:///run/starsd/draft", "")],
)
def test_off_this_machine_the_usual_keys_are_taken(
    bind: str, keys: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever had made them was told again to make some, and nothing of --keys."""
    usual = tmp_path / "usual"
    monkeypatch.setenv("STARSD_KEYS", str(usual))
    KeyPair.generate("service").save(usual / "service.key")
    told: list[ServiceConfig] = []

    class Service:
        def __init__(self, config: ServiceConfig) -> None:
            told.append(config)
            raise SystemExit

    monkeypatch.setattr("starsd_server.cli_serve.Service", Service)
    with pytest.raises(SystemExit):
        command.main(["--bind", bind], standalone_mode=False)
    assert [str(usual) if keys else ""] == [config.keys for config in told]
