"""The JSON of every benchmark: its figures, and the machine and versions that they were measured with."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import click

from starsd_edge.errors import UsageError
from starsd_edge.machine import describe_machine

__all__ = ["json_option", "write_json"]

Command = TypeVar("Command", bound=Callable[..., Any])


def json_option(command: Command) -> Command:
    """`--json FILE`, as `json_file`. Where it cannot be written, that is said before minutes are spent."""
    return click.option(
        "--json",
        "json_file",
        type=click.Path(path_type=Path, dir_okay=False),
        callback=_writable,
        help="Write the figures there, with the machine and versions.",
    )(command)


def write_json(json_file: Path | None, figures: Mapping[str, object]) -> None:
    """Nothing without a file. Raises UsageError where it cannot be written."""
    if json_file is None:
        return
    text = json.dumps({"machine": describe_machine(), **figures}, indent=1)
    try:
        json_file.write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{json_file}: cannot be written: {error.strerror}") from error


def _writable(_context: click.Context, _parameter: click.Parameter, path: Path | None) -> Path | None:
    if path is not None and not os.access(path if path.exists() else path.parent, os.W_OK):
        raise UsageError(f"{path}: its folder does not exist or it cannot be written to")
    return path
