"""The page of all commands and options: `python -m starsd_edge.cli.reference >docs/commands.md`."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator

import click

from starsd_edge.cli.main import cli

__all__ = ["reference"]

INTRODUCTION = """\
# Commands

What `--help` says, of every command. Made by `python -m starsd_edge.cli.reference`; the guides
show how they are used.
"""


def reference() -> str:
    """Markdown, ended by a newline."""
    return "\n".join([INTRODUCTION, *_sections(cli, click.Context(cli, info_name="starsd"))])


def _sections(command: click.Command, context: click.Context) -> Iterator[str]:
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            inner = command.get_command(context, name)
            if inner is not None and not inner.hidden:
                yield from _sections(inner, click.Context(inner, info_name=name, parent=context))
        if not command.invoke_without_command:
            return
    usage = " ".join(piece for piece in command.collect_usage_pieces(context) if piece != "[OPTIONS]")
    yield f"## {context.command_path} {usage}".rstrip() + "\n"
    yield inspect.cleandoc(command.help or "").replace("\b\n", "") + "\n"
    options = [option for option in command.params if isinstance(option, click.Option) and not option.hidden]
    records = [record for option in options if (record := option.get_help_record(context)) is not None]
    if records:
        yield "| option | |\n|---|---|"
        for names, words in records:
            yield f"| `{_cell(names)}` | {_cell(words)} |"
        yield ""


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


if __name__ == "__main__":
    sys.stdout.write(reference())
