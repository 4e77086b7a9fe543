"""The JSON of every benchmark: its figures, and the machine and versions that they were measured with."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from starsd_edge.bench.result_files import result_option, write_result
from starsd_edge.machine import describe_machine

__all__ = ["json_option", "write_json"]

Command = TypeVar("Command", bound=Callable[..., Any])


def json_option(command: Command) -> Command:
    """`--json FILE`, as `json_file`."""
    option = result_option("--json", "json_file", "Write the figures there, with the machine and versions.")
    return option(command)


def write_json(json_file: Path | None, figures: Mapping[str, object]) -> None:
    """Nothing without a file. Raises UsageError where it cannot be written."""
    if json_file is not None:
        write_result(json_file, json.dumps({"machine": describe_machine(), **figures}, indent=1) + "\n")
