"""What the two READMEs show exists: commands and files."""

from __future__ import annotations

import re
from pathlib import Path

import click
import pytest

from starsd_edge.cli.main import cli

ROOT = Path(__file__).parents[2]
READMES = ["README.md", "README.zh-CN.md"]


@pytest.mark.parametrize("name", READMES)
def test_every_command_that_is_shown_exists(name: str) -> None:
    text = (ROOT / name).read_text(encoding="utf-8")
    shown = set(re.findall(r"(?:^    (?:\$ )?|`)starsd ((?:[a-z]+ ?)+)", text, re.MULTILINE))
    assert len(shown) >= 7
    for words in shown:
        group: click.Command = cli
        for word in words.split():
            if not isinstance(group, click.Group):
                break
            found = group.get_command(click.Context(group), word)
            assert found is not None, f"starsd {words}"
            group = found


@pytest.mark.parametrize("name", READMES)
def test_every_file_that_is_linked_exists(name: str) -> None:
    text = (ROOT / name).read_text(encoding="utf-8")
    links = re.findall(r"\]\(([^):]+)\)", text)
    assert links
    for link in links:
        assert (ROOT / link).exists(), link


def test_both_readmes_have_the_same_promises_and_sections_in_the_same_order() -> None:
    english, chinese = ((ROOT / name).read_text(encoding="utf-8") for name in READMES)
    promises = [re.findall(r"^(\d)\. \*\*", text, re.MULTILINE) for text in (english, chinese)]
    assert promises[0] == promises[1] == ["1", "2", "3", "4"]
    assert english.split("## ")[0].count("make ") == chinese.split("## ")[0].count("make ")
