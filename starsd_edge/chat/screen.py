"""Text that scrolls, and one status line below it. Only the status line is ever drawn again."""

from __future__ import annotations

import os
import re
import textwrap
from collections.abc import Callable
from typing import TextIO

from wcwidth import wcswidth, wcwidth

__all__ = ["Screen", "clip", "fold"]

ERASE_LINE = "\x1b[2K"
FIRST_COLUMN = re.compile(r"\S+(?: \S+)*  +")  # of a table: a name, and two spaces at least
DIM, RESET = "\x1b[2m", "\x1b[0m"


class Screen:
    """Writes to a terminal. `live` False leaves the status line out (a pipe, a dumb terminal).

    columns  the terminal's width now
    """

    def __init__(self, out: TextIO, *, live: bool, columns: Callable[[], int]) -> None:
        self._out = out
        self._live = live
        self._columns = columns
        self._column = 0
        self._status = ""  # as shown

    def write(self, text: str, column: int) -> None:
        """Append `text`, after which the cursor stands in `column`."""
        if not text:
            return
        status = self._status
        self._send(self._hidden() + text)
        self._column = column
        self._send(self._shown(status))
        self._out.flush()

    def status(self, line: str) -> None:
        """Show `line` below the text."""
        if not self._live:
            return
        self._send(self._hidden() + self._shown(line))
        self._out.flush()

    def close(self) -> None:
        """Take the status line away and begin a new line, if one was begun."""
        self._send(self._hidden() + ("\n" if self._column else ""))
        self._column = 0
        self._out.flush()

    def _hidden(self) -> str:
        if not self._status:
            return ""
        self._status = ""
        return f"\x1b[B\r{ERASE_LINE}\x1b[A{self._to_column()}"

    def _shown(self, line: str) -> str:
        # A full line leaves the cursor between two lines; the status line waits for the next letter.
        if not line or not self._live or self._column >= self._columns():
            return ""
        self._status = line
        return f"\n{ERASE_LINE}{DIM}{clip(line, self._columns() - 1)}{RESET}\x1b[A{self._to_column()}"

    def _to_column(self) -> str:
        return f"\x1b[{self._column + 1}G"

    def _send(self, text: str) -> None:
        self._out.write(text)


def clip(line: str, width: int) -> str:
    """`line` cut to `width` columns."""
    used = 0
    for index, letter in enumerate(line):
        used += max(wcwidth(letter), 0)
        if used > width:
            return line[: max(index - 1, 0)] + "…"
    return line


def fold(line: str, width: int) -> list[str]:
    """`line` broken between words; what continues the second column of a table stays in it."""
    if wcswidth(line) <= width:
        return [line]
    first = FIRST_COLUMN.match(line)
    indent = " " * first.end() if first is not None and first.end() < width // 2 else ""
    return textwrap.wrap(line, width, subsequent_indent=indent, break_on_hyphens=False) or [line]


def terminal_columns(out: TextIO) -> int:
    """The terminal's width now; 80 where there is none."""
    try:
        return os.get_terminal_size(out.fileno()).columns or 80
    except (OSError, ValueError):
        return 80
