"""What the guides quote is what the programs say."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TABLE_ROW = re.compile(r"^\| (`[^|]*) \|", re.MULTILINE)
QUOTED = re.compile(r"`([^`]+)`")


def quotes() -> list[str]:
    """The fixed parts of every message in the first column of a table of symptoms."""
    text = (ROOT / "docs/guides/troubleshooting.md").read_text(encoding="utf-8")
    cells = [quote for row in TABLE_ROW.findall(text) for quote in QUOTED.findall(row)]
    return [part.strip() for cell in cells for part in re.split(r"\.\.\.|XXXX-", cell) if part.strip()]


@pytest.fixture(scope="module")
def sources() -> str:
    """All our code, with strings that are written over several lines joined."""
    folders = ("starsd_edge", "server", "jetson", "deploy")
    code = "".join(
        file.read_text(encoding="utf-8") for name in folders for file in (ROOT / name).rglob("*.py")
    )
    return re.sub(r'"\s+f?"', "", code)


@pytest.mark.parametrize("quote", quotes())
def test_a_symptom_is_quoted_word_for_word(quote: str, sources: str) -> None:
    assert re.sub(r"\s+", " ", quote) in sources


def test_there_are_symptoms_to_check() -> None:
    assert len(quotes()) > 15
