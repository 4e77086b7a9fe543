"""The terminal: raw keys in, changed lines out.

Only lines that differ from what stands there are written, in one piece and between the marks of a
synchronised update, so that nothing flickers over SSH or in tmux. Whatever happens, the terminal is given
back as it was.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import termios
import tty
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from types import FrameType

from rich.color import ColorSystem
from rich.style import Style
from rich.text import Text

from starsd_edge.monitor.keys import parse_keys
from starsd_edge.monitor.ui import Key

__all__ = ["Terminal", "ansi", "wants_colour"]

ENTER = "\x1b[?1049h\x1b[?25l\x1b[2J"  # alternate screen, no cursor
LEAVE = "\x1b[?25h\x1b[?1049l"
SYNC, SYNC_END = "\x1b[?2026h", "\x1b[?2026l"  # drawn at once where the terminal knows it, ignored elsewhere
ESCAPE_PATIENCE_S = 0.05  # the rest of a key's sequence has come by then
SMALLEST = (20, 5)  # a terminal that says 0x0 is treated as this


def wants_colour(environ: Mapping[str, str] = os.environ) -> bool:
    """NO_COLOR (https://no-color.org) and TERM=dumb turn colour off; bold and reverse stay."""
    return not environ.get("NO_COLOR") and environ.get("TERM") != "dumb"


class Terminal:
    """Keyboard and screen, between `opened` and its end. Not thread-safe."""

    def __init__(self, *, colour: bool) -> None:
        self._colour = colour
        self._shown: list[str] = []
        self._size = (0, 0)
        self._pending = b""
        self.terminated = False

    @contextlib.contextmanager
    def opened(self) -> Iterator[Terminal]:
        """Raw mode on the alternate screen; both undone at the end, an exception included."""
        keyboard = sys.stdin.fileno()
        before = termios.tcgetattr(keyboard)
        handlers = {
            number: signal.signal(number, self._on_signal)
            for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGWINCH)
        }
        try:
            tty.setcbreak(keyboard)
            self._write(ENTER)
            yield self
        finally:
            with contextlib.suppress(OSError, termios.error):  # the terminal has gone
                termios.tcsetattr(keyboard, termios.TCSADRAIN, before)
                self._write(LEAVE)
            for number, handler in handlers.items():
                signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        # A changed size needs no more than waking the poll; the next draw looks at it.
        if number != signal.SIGWINCH:
            self.terminated = True

    @property
    def keyboard(self) -> int:
        return sys.stdin.fileno()

    @property
    def size(self) -> tuple[int, int]:
        """(columns, lines) right now."""
        try:
            columns, lines = os.get_terminal_size(sys.stdout.fileno())
        except OSError:
            columns, lines = 0, 0
        return (columns or SMALLEST[0], lines or SMALLEST[1])

    def keys(self) -> list[Key | str]:
        """Keys pressed since the last look; does not wait, but for the rest of a sequence."""
        if not select.select([self.keyboard], [], [], 0)[0]:
            return []
        data = self._pending + os.read(self.keyboard, 4096)
        if data == self._pending:  # the terminal is gone
            self.terminated = True
        more = bool(
            select.select([self.keyboard], [], [], ESCAPE_PATIENCE_S if data[-1:] == b"\x1b" else 0)[0]
        )
        parsed = parse_keys(data, complete=not more)
        self._pending = parsed.rest
        return parsed.keys

    def draw(self, lines: Sequence[Text]) -> int:
        """Show `lines`; returns the bytes written, 0 when all stood there already."""
        size = self.size
        changed = []
        if size != self._size:
            self._size, self._shown = size, []
            changed.append("\x1b[2J")
        drawn = [ansi(text, colour=self._colour) for text in lines[: size[1]]]
        for row, content in enumerate(drawn):
            if row >= len(self._shown) or self._shown[row] != content:
                changed.append(f"\x1b[{row + 1};1H{content}\x1b[K")
        self._shown = drawn
        return self._write(SYNC + "".join(changed) + SYNC_END) if changed else 0

    def leave_standing(self) -> None:
        """Print what is shown to the normal screen; call it after `opened` has ended."""
        self._write("\n".join(self._shown) + "\n")

    def _write(self, text: str) -> int:
        data = text.encode(sys.stdout.encoding or "utf-8", "replace")
        view = memoryview(data)
        while view:
            view = view[os.write(sys.stdout.fileno(), view) :]
        return len(data)


def ansi(text: Text, *, colour: bool) -> str:
    """A line with its styles as escape sequences; without colour only bold, dim, underline and reverse."""
    if not text.spans:
        return text.plain
    pieces, at = [], 0
    for span in text.spans:  # in order and apart: lines are made by appending
        if span.start > at:
            pieces.append(text.plain[at : span.start])
        before, after = codes(str(span.style), colour=colour)
        pieces.append(before + text.plain[span.start : span.end] + after)
        at = span.end
    pieces.append(text.plain[at:])
    return "".join(pieces)


@lru_cache(maxsize=256)
def codes(style: str, *, colour: bool) -> tuple[str, str]:
    """What turns a style on and off."""
    parsed = Style.parse(style)
    mark = "\0"
    rendered = (parsed if colour else parsed.without_color).render(mark, color_system=ColorSystem.STANDARD)
    before, _, after = rendered.partition(mark)
    return before, after
