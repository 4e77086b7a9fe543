"""Devices that nobody can talk to: one line each, and the others are not kept waiting for them."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from starsd_deploy.cli import command
from starsd_edge.errors import UnreachableError


@pytest.fixture
def silent_port() -> Iterator[int]:
    """A port of this machine that accepts (by its backlog) and never says a word."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield int(server.getsockname()[1])


@pytest.fixture
def words(tmp_path: Path, silent_port: int) -> list[str]:
    """Options of an inventory with a silent device and one where nothing listens."""
    (tmp_path / "bundle").mkdir()
    (tmp_path / "bundle" / "manifest.json").write_text("{}")
    (tmp_path / "ssh_config").write_text("Host *\n  ConnectTimeout 1\n")
    (tmp_path / "fleet.toml").write_text(
        '[defaults]\nroles = ["target"]\nbundle = "bundle"\n'
        f'[devices.mute]\naddress = "127.0.0.1"\nport = {silent_port}\n'
        '[devices.off]\naddress = "127.0.0.1"\nport = 1\n'
    )
    return ["--fleet", str(tmp_path / "fleet.toml"), "--ssh-config", str(tmp_path / "ssh_config")]


@pytest.mark.parametrize("name", ["doctor", "status", "plan", "apply"])
def test_a_port_that_says_nothing_is_one_line_and_the_other_devices_have_theirs(
    name: str, words: list[str]
) -> None:
    done = CliRunner().invoke(command, [name, *words])
    assert done.exit_code == UnreachableError.exit_code == 7
    mute, off = done.stdout.splitlines()
    assert mute.startswith("mute: ")
    assert "says nothing for 1 s: is it an SSH server" in mute
    assert off.startswith("off: ")
    assert "cannot reach 127.0.0.1 port 1 " in off
    assert (mute.count("mute: "), off.count("off: ")) == (1, 1)
