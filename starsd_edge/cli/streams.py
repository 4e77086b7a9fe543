"""Standard input and output as every command takes them for granted: there, and able to take any letter."""

from __future__ import annotations

import io
import os
import sys

__all__ = ["open_streams"]


def open_streams() -> None:
    """Stand in for streams that were closed (`<&-`), and write what an encoding lacks as escapes."""
    # In this order each takes the lowest descriptor that is free: its own.
    if sys.stdin is None:
        sys.stdin = open(os.devnull, encoding="utf-8")  # noqa: SIM115  # for as long as the program
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115  # for as long as the program
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115  # for as long as the program
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
