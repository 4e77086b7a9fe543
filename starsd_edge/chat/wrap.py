"""Styled text to terminal bytes, broken between words, append only; knows the cursor's column."""

from __future__ import annotations

from dataclasses import dataclass

from wcwidth import wcswidth, wcwidth

__all__ = ["Style", "StyledText", "Wrapper"]

RESET = "\x1b[0m"


@dataclass(frozen=True, slots=True)
class Style:
    """How a stretch of text looks; `colour` is the one accent colour."""

    bold: bool = False
    italic: bool = False
    dim: bool = False
    colour: bool = False

    def codes(self, *, colour: bool) -> str:
        """The SGR sequence that switches this style on; empty for plain text."""
        numbers = [
            number
            for number, on in (
                ("1", self.bold),
                ("2", self.dim),
                ("3", self.italic),
                ("36", self.colour and colour),
            )
            if on
        ]
        return f"\x1b[{';'.join(numbers)}m" if numbers else ""


@dataclass(frozen=True, slots=True)
class StyledText:
    """One run of text in one style; no line breaks inside."""

    text: str
    style: Style


class Wrapper:
    """Puts words on lines that leave the terminal's last column free. A word is kept until its end is known.

    columns      the terminal's
    wrap         False leaves long lines to the terminal, which breaks them anywhere but copies them whole
    hang         columns that continued lines of this line are indented by; back to 0 with the next line
    whole_lines  the current line is code: as if `wrap` were False
    """

    def __init__(self, columns: int, *, colour: bool = True, wrap: bool = True) -> None:
        self.resize(columns)
        self._colour = colour
        self._wrap = wrap
        self._word: list[StyledText] = []
        self.column = 0
        self.hang = 0
        self.whole_lines = False

    def resize(self, columns: int) -> None:
        """The terminal has that many columns from now on; what is shown already stays as it is."""
        self._columns = max(columns, 8)
        self._width = self._columns - 1

    def push(self, run: StyledText) -> str:
        """Show `run` up to its last word."""
        if not self._wrap or self.whole_lines:
            return self._flush_word() + self._letters([run])
        out = ""
        letters = ""
        for letter in run.text:
            if letter == " " or _breaks_anywhere(letter):
                self._word.append(StyledText(letters, run.style))
                letters = ""
                out += self._flush_word()
                if letter != " ":
                    out += self._place([StyledText(letter, run.style)])
                elif self.column < self._width:  # a space at the very end of a line is not needed
                    out += self._put(" ", run.style)
            else:
                letters += letter
        if letters:
            self._word.append(StyledText(letters, run.style))
        return out

    def newline(self) -> str:
        """The text's own line break."""
        out = self._flush_word() + "\n"
        self.column = self.hang = 0
        self.whole_lines = False
        return out

    def flush(self) -> str:
        """The text ended."""
        return self._flush_word()

    def _flush_word(self) -> str:
        word, self._word = [run for run in self._word if run.text], []
        return self._place(word) if word else ""

    def _place(self, word: list[StyledText]) -> str:
        """Put a whole word, on the next line if it does not fit on this one."""
        width = sum(max(wcswidth(run.text), 0) for run in word)
        out = ""
        if self.column + width > self._width and self.column > self.hang:
            out = self._break()
        if self.column + width > self._width:  # longer than a line: break it where the line ends
            return out + self._letters(word)
        self.column += width
        return out + "".join(self._styled(run.text, run.style) for run in word)

    def _letters(self, runs: list[StyledText]) -> str:
        """Letter by letter, the next line beginning wherever this one is full."""
        out = ""
        for run in runs:
            shown = "".join(self._put(cluster, run.style) for cluster in _clusters(run.text))
            codes = run.style.codes(colour=self._colour)
            out += shown.replace(RESET + codes, "") if codes else shown
        return out

    def _put(self, cluster: str, style: Style) -> str:
        width = max(wcswidth(cluster), 0)
        out = ""
        if not self._wrap or self.whole_lines:
            if self.column + width > self._columns:
                self.column = 0  # the terminal begins a line
        elif self.column + width > self._width:
            out = self._break()
        self.column += width
        return out + self._styled(cluster, style)

    def _break(self) -> str:
        self.column = self.hang
        return "\n" + " " * self.hang

    def _styled(self, text: str, style: Style) -> str:
        codes = style.codes(colour=self._colour)
        return f"{codes}{text}{RESET}" if codes and text.strip() else text


def _breaks_anywhere(letter: str) -> bool:
    """Ideographs and kana are written without spaces: a line may end after each (emoji join and may not)."""
    return "\u2e80" <= letter <= "\ud7ff" and wcwidth(letter) == 2


def _clusters(text: str) -> list[str]:
    """Letters with the marks and joiners that belong to them."""
    clusters: list[str] = []
    for letter in text:
        joins = clusters and (wcwidth(letter) == 0 or clusters[-1].endswith("\u200d"))
        if joins:
            clusters[-1] += letter
        else:
            clusters.append(letter)
    return clusters
