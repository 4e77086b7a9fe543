"""Flags that say which model to run and which draft service to use, shared by `starsd chat` and `serve`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

__all__ = ["model_options"]

Command = TypeVar("Command", bound=Callable[..., Any])

OPTIONS = (
    click.option(
        "--bundle",
        metavar="DIR",
        help="Bundle to run, or 'embedded' for the small model that comes with this program (the default).",
    ),
    click.option(
        "--quant", metavar="KIND", help="Precision of the embedded model: fp32, fp16, int8 or int4."
    ),
    click.option("--threads", type=click.IntRange(1), help="CPU threads of the target."),
    click.option("--context", type=click.IntRange(64), help="Tokens of context; less needs less memory."),
    click.option(
        "--service",
        metavar="ADDRESS",
        help="Draft service, tcp://HOST:PORT, or several by commas. None: decode plainly.",
    ),
    click.option(
        "--draft",
        type=click.Choice(["exact", "inexact", "off"]),
        default="exact",
        show_default=True,
        help="exact: the model's own text to the bit, plainly decoded where the runtime can verify no tree "
        "that exactly (int4). inexact: draft there too. off: until /draft on.",
    ),
    click.option(
        "--keys",
        metavar="DIR",
        type=click.Path(path_type=Path, file_okay=False),
        help="Folder of this device's key and of the services it knows.",
    ),
)


def model_options(command: Command) -> Command:
    """Add the flags, in the order above."""
    for option in reversed(OPTIONS):
        command = option(command)
    return command
