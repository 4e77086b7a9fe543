"""Markdown for a terminal, as it streams in, append only.

What was handed out is never taken back or drawn again: a span such as **bold** is kept back until its end is
there (or until it is clear that there is none, and it is shown as written), everything else goes out at once.
Nothing but style is changed: a reader who copies the screen gets the words the model wrote.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass, replace

from starsd_edge.chat.wrap import Style, StyledText, Wrapper

__all__ = ["MarkdownStream"]

# A span that is not closed within this many characters is taken for plain text; longer emphasis is rare, and
# until its end is seen nothing of it is shown.
MAX_SPAN_CHARS = 160

LINE = re.compile(r"[^\n]*\n|[^\n]+")
FENCE = re.compile(r" {0,3}(`{3,}|~{3,})[^`]*$")
HEADING = re.compile(r"(#{1,6}) +")
ITEM = re.compile(r"( *)([-*+]|\d{1,3}[.)]) +")
QUOTE = re.compile(r"> ?")
# Beginnings of lines that may still turn into one of the above, or into a fence.
UNDECIDED = re.compile(r" {0,12}(#{1,6} *|[-*+] *|\d{1,3}[.)]? *|>|`{1,2}|~{1,2}|)$")
CODE_SPAN = re.compile(r"(`+)(?!`)(.+?)(?<!`)\1(?!`)")
STRONG = re.compile(r"(\*\*)(?=\S)(.+?)(?<=\S)\1")
EMPHASIS = re.compile(r"(\*|_)(?![\s*_])(.+?)(?<![\s*_])\1(?![*\w])")


PLAIN = Style()


@dataclass(frozen=True, slots=True)
class _Block:
    """What kind of line is being shown."""

    style: Style = PLAIN
    is_code: bool = False


class MarkdownStream:
    """Streaming text to terminal text.

    columns  the terminal's
    styled   False passes the text on as it is, line breaks between words aside
    """

    def __init__(self, columns: int, *, styled: bool = True, colour: bool = True, wrap: bool = True) -> None:
        self._wrapper = Wrapper(columns, colour=colour, wrap=wrap)
        self._styled = styled
        self._pending = ""  # of the current line, not yet shown
        self._fence: str | None = None  # the closing fence a code block waits for
        self._block: _Block | None = None  # None: the line's kind is not known yet
        self._before = " "  # the character before what is pending

    @property
    def column(self) -> int:
        """Where the cursor stands after what was handed out."""
        return self._wrapper.column

    def resize(self, columns: int) -> None:
        """The terminal's columns have changed."""
        self._wrapper.resize(columns)

    def push(self, text: str) -> str:
        """What may be shown now."""
        out = ""
        for line in LINE.findall(_visible(text)):
            self._pending += line
            ended = self._pending.endswith("\n")
            self._pending = self._pending.removesuffix("\n")
            out += self._advance(ended=ended)
            if ended:
                out += self._wrapper.newline()
                self._block = None
        return out

    def flush(self) -> str:
        """The text ended: show what was kept back."""
        return self._advance(ended=True) + self._wrapper.flush()

    def _advance(self, *, ended: bool) -> str:
        if not self._styled:
            return self._take_all(Style())
        out = "" if self._block else self._begin_line(ended=ended)
        block = self._block
        if block is None:
            return out
        if block.is_code:
            return out + self._take_all(block.style)
        return out + "".join(self._wrapper.push(run) for run in self._inline(block.style, ended=ended))

    def _take_all(self, style: Style) -> str:
        text, self._pending = self._pending, ""
        return self._wrapper.push(StyledText(text, style))

    def _begin_line(self, *, ended: bool) -> str:
        """Decide what the line is, or wait for more of it."""
        line = self._pending
        if self._fence is not None:
            return self._begin_code_line(line, ended=ended)
        if not ended and UNDECIDED.match(line):
            return ""
        if line.lstrip(" ").startswith(("```", "~~~")):
            if not ended:
                return ""
            if FENCE.match(line):
                self._fence = line.lstrip(" ")[:3]
                self._block = _Block(Style(dim=True), is_code=True)
                return ""
        self._before = " "
        if heading := HEADING.match(line):
            return self._open(Style(bold=True, colour=True), heading[0], Style(dim=True))
        if item := ITEM.match(line):
            return self._open(Style(), item[0], Style(bold=True), hang=len(item[0]))
        if quote := QUOTE.match(line):
            return self._open(Style(italic=True), quote[0], Style(dim=True), hang=len(quote[0]))
        self._block = _Block()
        return ""

    def _begin_code_line(self, line: str, *, ended: bool) -> str:
        """Inside a fence only the closing fence means anything."""
        assert self._fence is not None
        stripped = line.lstrip(" ")
        if not ended and (self._fence.startswith(stripped) or set(stripped) == {self._fence[0]}):
            return ""
        closes = stripped.startswith(self._fence) and set(stripped.rstrip()) == {self._fence[0]}
        if closes:
            self._fence = None
        self._block = _Block(Style(dim=True) if closes else Style(colour=True), is_code=True)
        self._wrapper.whole_lines = True
        return ""

    def _open(self, style: Style, prefix: str, prefix_style: Style, hang: int = 0) -> str:
        self._block = _Block(style)
        self._pending = self._pending[len(prefix) :]
        out = self._wrapper.push(StyledText(prefix, prefix_style))
        self._wrapper.hang = hang
        return out

    def _inline(self, style: Style, *, ended: bool) -> Iterator[StyledText]:
        """Runs of the pending line as far as they are certain."""
        while self._pending:
            start = _first_marker(self._pending, self._before)
            if start is None:
                yield self._consume(len(self._pending), style)
                return
            if start > 0:
                yield self._consume(start, style)
            if self._pending[0] == "\\" and len(self._pending) > 1:
                yield self._consume(2, style)
                continue
            span = _span(self._pending, certain=ended)
            if span is not None:
                self._pending = self._pending[span.length :]
                self._before = "*"
                yield from _nested(span.text, span.change(style))
            elif ended or len(self._pending) > MAX_SPAN_CHARS:
                run = len(self._pending) - len(self._pending.lstrip(self._pending[0]))
                yield self._consume(run, style)
            else:
                return

    def _consume(self, count: int, style: Style) -> StyledText:
        text, self._pending = self._pending[:count], self._pending[count:]
        self._before = text[-1]
        return StyledText(text, style)


@dataclass(frozen=True, slots=True)
class _Span:
    """A closed span at the beginning of a text: its inner text, and its length with both markers."""

    marker: str
    text: str
    length: int

    def change(self, style: Style) -> Style:
        if self.marker[0] == "`":
            return replace(style, colour=True)
        return replace(style, bold=True) if len(self.marker) == 2 else replace(style, italic=True)


def _first_marker(text: str, before: str) -> int | None:
    """Index of the first character that may open a span."""
    for index, letter in enumerate(text):
        previous = text[index - 1] if index else before
        if letter in "`\\*" or (letter == "_" and not previous.isalnum()):
            return index
    return None


def _span(text: str, *, certain: bool) -> _Span | None:
    """The span that `text` begins with. Unless `certain`, one that ends with the text may still go on: a
    second asterisk or a letter can follow."""
    for pattern in (CODE_SPAN, STRONG, EMPHASIS):
        found = pattern.match(text)
        if found and (certain or found.end() < len(text) or pattern is STRONG):
            return _Span(found[1], found[2], found.end())
    return None


def _nested(text: str, style: Style) -> Iterator[StyledText]:
    """Runs inside a span; code has none."""
    position = 0
    while position < len(text) and not style.colour:
        start = _first_marker(text[position:], " ")
        if start is None:
            break
        span = _span(text[position + start :], certain=True)
        end = position + start + (0 if span else 1)
        yield StyledText(text[position:end], style)
        position = end
        if span:
            yield from _nested(span.text, span.change(style))
            position += span.length
    yield StyledText(text[position:], style)


def _visible(text: str) -> str:
    """Without control characters: a model's output must not steer the terminal."""
    text = text.replace("\r\n", "\n").replace("\t", "    ")
    return "".join(c for c in text if c == "\n" or unicodedata.category(c) not in ("Cc", "Cs"))
