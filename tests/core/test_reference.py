"""docs/commands.md says what `--help` says."""

from __future__ import annotations

from pathlib import Path

from starsd_edge.cli.reference import reference

PAGE = Path(__file__).parents[2] / "docs" / "commands.md"


def test_the_page_of_all_commands_is_in_step_with_the_command_line() -> None:
    assert reference() == PAGE.read_text(encoding="utf-8"), (
        "make it anew: python -m starsd_edge.cli.reference >docs/commands.md"
    )


def test_every_command_has_words_and_every_option_too() -> None:
    for section in reference().split("\n## ")[1:]:
        name, _, words = section.partition("\n")
        assert words.strip().split("\n")[0].strip(), name
        assert "|  |" not in words, name
