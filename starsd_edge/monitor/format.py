"""Numbers as the monitor prints them: short, aligned by their unit, and "-" for what is not known."""

from __future__ import annotations

import enum
import unicodedata
from collections.abc import Callable, Sequence

from rich.cells import cell_len, set_cell_size

__all__ = ["UNKNOWN", "Form", "bar", "clean", "fit", "right", "shown", "sparkline"]

UNKNOWN = "-"
SPARKS = "▁▂▃▄▅▆▇█"
SPARKS_ASCII = "._-=+*#@"
ELLIPSIS = "…"


class Form(enum.Enum):
    """How a number is printed."""

    TEXT = enum.auto()
    COUNT = enum.auto()
    RATE = enum.auto()
    FACTOR = enum.auto()
    SHARE = enum.auto()
    SECONDS = enum.auto()
    AGE = enum.auto()
    BYTES = enum.auto()
    WATTS = enum.auto()
    CELSIUS = enum.auto()


def shown(value: float | int | str | None, form: Form) -> str:
    """`value` in at most seven cells (text: as it is, made safe for a terminal)."""
    if value is None:
        return UNKNOWN
    if isinstance(value, str):
        return clean(value)
    return PRINTERS[form](value)


def clean(text: str) -> str:
    """Text from elsewhere without anything that steers a terminal or changes the reading direction."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(c if unicodedata.category(c)[0] not in "CZ" or c == " " else " " for c in text)


def fit(text: str, width: int) -> str:
    """`text` in exactly `width` cells, cut with an ellipsis."""
    if text.isascii():
        return text.ljust(width) if len(text) <= width else text[: max(0, width - 1)] + ELLIPSIS[:width]
    if cell_len(text) <= width:
        return text + " " * (width - cell_len(text))
    return set_cell_size(text, width - 1) + ELLIPSIS if width > 0 else ""


def right(text: str, width: int) -> str:
    """`text` at the right of `width` cells."""
    return text.rjust(width) if len(text) <= width else fit(text, width)


def sparkline(values: Sequence[float], width: int, *, ascii_only: bool = False) -> str:
    """The last `width` values as a line of blocks, scaled to the highest of them."""
    if not values or width <= 0:
        return " " * width
    sparks = SPARKS_ASCII if ascii_only else SPARKS
    last = values[-width:]
    highest = max(last)
    scale = (len(sparks) - 1) / highest if highest > 0 else 0.0
    return "".join(sparks[round(max(0.0, value) * scale)] for value in last).rjust(width)


def bar(share: float, width: int, *, ascii_only: bool = False) -> str:
    """A bar of `width` cells filled by `share` (0..1)."""
    filled = round(min(max(share, 0.0), 1.0) * width)
    full, empty = ("#", ".") if ascii_only else ("█", "░")
    return full * filled + empty * (width - filled)


def rate(value: float) -> str:
    if value < 1000:
        return f"{value:.1f}"
    return f"{value / 1000:.1f}k" if value < 1e6 else f"{value / 1e6:.1f}M"


def count(value: float) -> str:
    if value < 100_000:
        return f"{value:.0f}"
    return f"{value / 1000:.0f}k" if value < 1e8 else f"{value / 1e6:.0f}M"


def seconds(value: float) -> str:
    if value < 0.001:
        return f"{value * 1e6:.0f}us"
    if value < 1:
        return f"{value * 1000:.1f}ms" if value < 0.1 else f"{value * 1000:.0f}ms"
    return f"{value:.2f}s" if value < 100 else f"{value:.0f}s"


def age(value: float) -> str:
    if value < 60:
        return f"{value:.0f}s"
    if value < 3600:
        return f"{value // 60:.0f}m{value % 60:02.0f}s" if value % 60 < 59.5 else f"{value // 60 + 1:.0f}m00s"
    hours = value / 3600
    return f"{hours:.0f}h" if hours < 48 else f"{hours / 24:.0f}d"


def bytes_of(value: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000:
            return f"{value:.0f}{unit}" if unit == "B" or value >= 100 else f"{value:.1f}{unit}"
        value /= 1000
    return f"{value:.1f}TB"


PRINTERS: dict[Form, Callable[[float], str]] = {
    Form.TEXT: str,
    Form.COUNT: count,
    Form.RATE: rate,
    Form.FACTOR: lambda value: f"{value:.2f}",
    Form.SHARE: lambda value: f"{value:.0%}",
    Form.SECONDS: seconds,
    Form.AGE: age,
    Form.BYTES: bytes_of,
    Form.WATTS: lambda value: f"{value:.1f}W",
    Form.CELSIUS: lambda value: f"{value:.0f}C",
}
