"""Every command that the documents show exists, with every option that they give it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from starsd_edge.cli.main import cli

ROOT = Path(__file__).parents[2]
SHOWN = re.compile(r"(?:^|[\s`(])(?<!-n )starsd ([a-z][^`\n|#>;]*)", re.MULTILINE)
CODE = re.compile(r"^ {4}[^\n]*|`[^`\n]+`", re.MULTILINE)
OPTION = re.compile(r"(?<=\s)--[a-z][a-z0-9-]*")


def documents() -> list[Path]:
    return [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "changelog.d").glob("*.md")]


def shown_commands() -> Iterator[tuple[str, str]]:
    """(document, what follows `starsd`), from code only."""
    for document in documents():
        for code in CODE.findall(document.read_text(encoding="utf-8")):
            for command in SHOWN.findall(code):
                yield str(document.relative_to(ROOT)), command.strip()


def options_of(words: list[str]) -> set[str]:
    """Of the command that `words` name, and of all on the way to it. Raises LookupError: there is none."""
    command: click.Command = cli
    options: set[str] = set()
    context = click.Context(cli)
    for word in [*words, ""]:
        options |= {
            name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)
        }
        options |= {"--help", "--version"}
        if not isinstance(command, click.Group):
            break
        found = command.get_command(context, word)
        if found is None:
            default = command.get_command(context, "watch")  # `starsd monitor` is short for it
            if default is not None:
                options |= {name for parameter in default.params for name in parameter.opts}
            elif word and not word.startswith(("-", "<", "[", "...", "…")) and word.islower():
                raise LookupError(f"no command {word!r}")
            break
        command = found
    return options


@pytest.mark.parametrize(("document", "line"), sorted(set(shown_commands())))
def test_a_command_in_the_documents_exists(document: str, line: str) -> None:
    options = options_of(line.split())
    assert set(OPTION.findall(f" {line}")) <= options, f"{document}: starsd {line}"


def test_there_are_commands_to_check() -> None:
    assert len(set(shown_commands())) > 60
