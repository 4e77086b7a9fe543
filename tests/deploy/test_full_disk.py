"""What the deployer writes on the workstation is there whole or not at all."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

from starsd_edge.errors import ConfigError

APPEND = """
from pathlib import Path
from starsd_deploy.known_hosts import HostKey, append_host
append_host(Path("known_hosts"), "nano1", HostKey("ssh-ed25519", bytes(51)))
"""


def run_with_room(folder: Path, room_bytes: int, *words: str) -> subprocess.CompletedProcess[str]:
    """Python that can write no file further than so far: it fails as on a full disk, after a part."""
    return subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (room_bytes, room_bytes)),
    )


def test_an_inventory_that_finds_no_room_can_be_made_later(tmp_path: Path) -> None:
    words = ("-m", "starsd_edge", "deploy", "init", "nano1")
    done = run_with_room(tmp_path, 10, *words)
    assert (done.returncode, done.stderr.count("\n")) == (ConfigError.exit_code, 1)
    assert "fleet.toml: cannot be written" in done.stderr
    assert list(tmp_path.iterdir()) == []
    assert run_with_room(tmp_path, 10_000, *words).returncode == 0


def test_a_host_key_that_finds_no_room_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    known = tmp_path / "known_hosts"
    known.write_text("# mine\n")
    assert "File too large" in run_with_room(tmp_path, 40, "-c", APPEND).stderr
    assert known.read_text() == "# mine\n"
    assert run_with_room(tmp_path, 10_000, "-c", APPEND).returncode == 0
    assert known.read_text().startswith("# mine\nnano1 ssh-ed25519 ")
