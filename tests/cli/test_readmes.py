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
    assert links(text)
    for link in re.findall(r"\]\(([^):]+)\)", text):
        assert (ROOT / link).exists(), link


def test_both_readmes_have_the_same_promises_and_sections_in_the_same_order() -> None:
    english, chinese = ((ROOT / name).read_text(encoding="utf-8") for name in READMES)
    promises = [re.findall(r"^(\d)\. \*\*", text, re.MULTILINE) for text in (english, chinese)]
    assert promises[0] == promises[1] == ["1", "2", "3", "4"]
    assert english.count("\n## ") == chinese.count("\n## ")
    assert links(english) == links(chinese)


def test_both_readmes_show_the_same() -> None:
    """Every line of code and output; comments are in the page's own language."""
    english, chinese = ((ROOT / name).read_text(encoding="utf-8") for name in READMES)
    assert shown_lines(english) == shown_lines(chinese)
    assert len(shown_lines(english)) > 40


def links(text: str) -> list[str]:
    return [link for link in re.findall(r"\]\(([^):]+)\)", text) if not link.startswith("README")]


def shown_lines(text: str) -> list[str]:
    return [re.sub(r"\s+# .*", "", line) for line in text.splitlines() if line.startswith("    ")]
