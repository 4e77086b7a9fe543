"""Flags that say which model to run and which draft service to use, shared by `starsd chat` and `serve`."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from starsd_edge.errors import UsageError

__all__ = ["model_options", "provider_option"]

Command = TypeVar("Command", bound=Callable[..., Any])


def _not_empty(context: click.Context, option: click.Parameter, value: str | None) -> str | None:
    if value is not None and not value.strip():
        raise UsageError(f"--{option.name} is empty: leave it out for the default")
    return value


def _few_enough(context: click.Context, option: click.Parameter, value: int | None) -> int | None:
    cores = os.cpu_count() or 1
    if value is not None and value > cores:
        raise UsageError(f"--{option.name} {value}: this machine has {cores} cores")
    return value


provider_option = click.option(
    "--provider",
    type=click.Choice(["cpu", "cuda", "tensorrt"]),
    help="Run a bundle made --for tensorrt in ONNX Runtime, on this; without, in TensorRT itself.",
)

quant_option = click.option(
    "--quant", metavar="KIND", help="Precision of the embedded model: fp32, int8, int4 or int4-exact."
)

OPTIONS = (
    click.option(
        "--bundle",
        metavar="DIR",
        callback=_not_empty,
        help="Bundle to run, or 'embedded' for the small model that comes with this program (the default).",
    ),
    quant_option,
    click.option(
        "--threads", type=click.IntRange(1), callback=_few_enough, help="CPU threads of the target."
    ),
    provider_option,
    click.option("--context", type=click.IntRange(64), help="Tokens of context; less needs less memory."),
    click.option(
        "--service",
        metavar="ADDRESS",
        callback=_not_empty,
        help="Draft service: HOST:PORT, or a pinned name; several with commas. None: decode plainly.",
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
        type=click.Path(path_type=Path, file_okay=False, exists=True),
        help="Folder of this device's key and of the services it knows.",
    ),
)


def model_options(command: Command) -> Command:
    """Add the flags, in the order above."""
    for option in reversed(OPTIONS):
        command = option(command)
    return command
