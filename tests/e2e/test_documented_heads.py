"""What the documents say of one's own model and head, line by line, on stand-ins for Vicuna and its heads."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from starsd_edge.bundle import Bundle
from starsd_edge.cli.drafts import identity_of
from starsd_server.heads.checkpoint import read_manifest
from tests.e2e.drafting import serving
from tests.e2e.published import EAGLE1, EAGLE3, vicuna_folder

ROOT = Path(__file__).parents[2]
SHOWN = re.compile(
    r"^    (starsd (?:export|bundle verify|draft (?:convert|serve)|keys generate) .*)$", re.MULTILINE
)
TRIES = 20  # answers until a tree was verified: it depends on what this machine does besides


@dataclass(frozen=True)
class Shown:
    """Commands of a document from `heading` on, the names they use, and the pair that they leave."""

    document: str
    heading: str
    names: dict[str, str]
    bundle: str
    head: str
    kind: str = "EAGLE-1"
    fits: str = "fits EAGLE-1 heads made for"

    @property
    def lines(self) -> list[str]:
        text = (ROOT / self.document).read_text("utf-8")
        section = re.split(r"^## ", text[text.index(self.heading) + len(self.heading) :], flags=re.MULTILINE)[
            0
        ]
        return SHOWN.findall(section)


README = Shown(
    "README.md",
    "## Your own model and head",
    {"models/vicuna-7b": "model", "models/EAGLE-Vicuna-7B-v1.3": "eagle1"},
    "vicuna.bundle",
    "vicuna.head",
)
GUIDE = Shown(
    "docs/guides/vicuna-7b-on-agx-orin.md",
    "# Vicuna-7B on an AGX Orin",
    {"models/vicuna-7b-v1.3": "model", "models/EAGLE-Vicuna-7B-v1.3": "eagle1"},
    "vicuna.bundle",
    "vicuna.head",
)
HEADS = Shown(
    "docs/heads.md",
    "## Published heads",
    {"MODEL": "model", "TARGET": "model", "SOURCE": "eagle1", "EAGLE3": "eagle3"},
    "BUNDLE",
    "HEAD3",
    "EAGLE-3",
    "fits the EAGLE-3 head HEAD3, and no other",
)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("STARSD_CACHE", str(tmp_path / "cache"))
    return tmp_path


def follow(shown: Shown, home: Path) -> str:
    """Run every line as a shell would, in `home`; a service only sees that it could serve. What they said."""
    model = home / "stand-ins"
    model.mkdir()
    there = {"model": vicuna_folder(model), "eagle1": EAGLE1, "eagle3": EAGLE3}
    for name, what in shown.names.items():
        (home / name).parent.mkdir(exist_ok=True)
        (home / name).symlink_to(there[what])
    said = ""
    starsd = f'starsd() {{ "{sys.executable}" -m starsd_edge "$@"; }}; '
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    for line in shown.lines:
        command = line.partition(" #")[0] + (" --check" if line.startswith("starsd draft serve") else "")
        done = subprocess.run(
            ["bash", "-c", starsd + command], cwd=home, env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, f"{line}: {done.stderr}"
        said += done.stdout
    return said


@pytest.mark.slow
@pytest.mark.parametrize("shown", [README, GUIDE, HEADS], ids=lambda shown: shown.document)
def test_the_commands_of_a_document_make_a_pair_that_drafts(shown: Shown, home: Path) -> None:
    assert len(shown.lines) >= 3
    said = follow(shown, home)
    assert f"{shown.head}: {shown.kind} head" in said
    assert "for vicuna-tiny-v1.3, trained on contexts of 2048 tokens" in said
    assert shown.fits in said
    manifest = Bundle.open(home / shown.bundle).manifest
    assert identity_of(manifest) == read_manifest(home / shown.head).identity
    if manifest.flavour == "tensorrt":
        return  # a chat with it needs a device
    with serving(home / shown.head) as service:
        chat = [sys.executable, "-m", "starsd_edge", "chat", "--bundle", str(home / shown.bundle)]
        chat += ["--service", service.address, "--json", "--max-tokens", "400"]
        for number in range(TRIES):
            done = subprocess.run(
                [*chat, f"{number} a fox"], capture_output=True, text=True, cwd=home, check=True
            )
            answer = json.loads(done.stdout)
            if answer["draft_tokens"]:
                break
        assert answer["draft_tokens"] > 0, answer["link"]
