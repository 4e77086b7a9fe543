"""What a screen is made of: the state it shows, lines of text with styles, and a frame of them."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass, field
from functools import cached_property

from rich.cells import cell_len
from rich.text import Text

from starsd_edge.monitor.alarms import Alarm, Severity, alarms_of
from starsd_edge.monitor.format import clean, fit
from starsd_edge.monitor.model import Model
from starsd_edge.monitor.ui import Ui, listed
from starsd_edge.monitor.views import DeviceView, Status

__all__ = ["STATUS_STYLES", "Frame", "State", "alarm_lines", "line", "part", "scrolled", "titled"]

# Colours only repeat what words and signs already say.
ALARM_STYLES = {Severity.CRITICAL: "bold red", Severity.WARNING: "yellow", Severity.NOTE: "dim"}
ALARM_SIGNS = {Severity.CRITICAL: "!!", Severity.WARNING: "! ", Severity.NOTE: "i "}
STATUS_STYLES = {
    Status.DOWN: "bold red",
    Status.PLAIN: "yellow",
    Status.DRAFTING: "green",
    Status.IDLE: "",
    Status.GONE: "dim",
    Status.ABSENT: "dim",
}


@dataclass(eq=False)
class State:
    """Everything a frame depends on; the same state gives the same frame.

    clock       time of day, as text
    watch       what watching costs, as text
    ascii_only  the terminal cannot show block characters
    """

    model: Model
    ui: Ui
    clock: str = ""
    watch: str = ""
    ascii_only: bool = False

    @cached_property
    def views(self) -> list[DeviceView]:
        """All devices."""
        return self.model.device_views(self.ui.window_s)

    @cached_property
    def listed(self) -> list[DeviceView]:
        """Those the filter lets through, in order."""
        return listed(self.views, self.ui)

    @cached_property
    def alarms(self) -> list[Alarm]:
        return alarms_of(self.model, self.views, self.ui.window_s)

    @cached_property
    def selected(self) -> DeviceView | None:
        """The selected device; the first one when that is gone."""
        by_key = {view.key: view for view in self.listed}
        return by_key.get(self.ui.selected) or next(iter(self.listed), None)


@dataclass(frozen=True)
class Frame:
    """`height` lines of at most `width` cells. `max_scroll`: how far this page can be scrolled."""

    lines: list[Text] = field(default_factory=list)
    max_scroll: int = 0


def part(text: str, style: str = "") -> tuple[str, str]:
    """A piece of a line, safe for a terminal."""
    return (clean(text), style)


def line(width: int, *parts: tuple[str, str] | str) -> Text:
    """One line of at most `width` cells: the pieces one after the other, cut at the end."""
    text = Text(no_wrap=True, end="")
    room, waiting, waiting_style = width, "", ""
    for piece in parts:
        content, style = piece if isinstance(piece, tuple) else (piece, "")
        size = len(content) if content.isascii() else cell_len(content)
        if size > room:
            content, size = fit(content, room), room
        room -= size
        if style == waiting_style:  # neighbours of one style are one span: fewer to keep and to print
            waiting += content
            continue
        text.append(waiting, waiting_style or None)
        waiting, waiting_style = content, style
    text.append(waiting, waiting_style or None)
    return text


def titled(width: int, title: str) -> Text:
    """A heading within a page."""
    return line(width, part(title, "bold"))


def alarm_lines(alarm: Alarm, width: int) -> list[Text]:
    """Sign, state, place and reason, whose rest takes a second line. Words carry the meaning, not colour."""
    style = ALARM_STYLES[alarm.severity]
    head = f"{ALARM_SIGNS[alarm.severity]} {fit(alarm.what, 17)} "
    where = fit(clean(alarm.where), 14) + " "
    indent = len(head) + cell_len(where)
    first, *rest = textwrap.wrap(clean(alarm.why), max(20, width - indent)) or [""]
    lines = [line(width, (head, style), (where, "bold"), (first, ""))]
    if rest:
        lines.append(line(width, (" " * indent + " ".join(rest), "")))
    return lines


def scrolled(body: list[Text], height: int, scroll: int) -> Frame:
    """The part of `body` that a window of `height` lines shows."""
    max_scroll = max(0, len(body) - height)
    first = min(scroll, max_scroll)
    return Frame(body[first : first + height], max_scroll)
