"""From a state to a screen: `render(state, width, height)`. Pure; the same state gives the same lines."""

from __future__ import annotations

from collections.abc import Callable

from rich.text import Text

from starsd_edge.monitor.render_board import board_page
from starsd_edge.monitor.render_device import device_page
from starsd_edge.monitor.render_help import help_page
from starsd_edge.monitor.render_overview import overview
from starsd_edge.monitor.screen import Frame, State, line, part
from starsd_edge.monitor.ui import Page

__all__ = ["MIN_HEIGHT", "MIN_WIDTH", "render"]

MIN_WIDTH, MIN_HEIGHT = 80, 24  # what pages are laid out for; smaller terminals see the upper left of it
FRAME_LINES = 2  # title and footer

PAGES: dict[Page, Callable[[State, int, int], Frame]] = {
    Page.OVERVIEW: overview,
    Page.DEVICE: device_page,
    Page.BOARD: board_page,
    Page.HELP: help_page,
}
FOOTERS = {
    Page.OVERVIEW: "? help  Enter device  b board  s sort  / filter  +- window  f freeze  q quit",
    Page.DEVICE: "Esc back  b board  up down scroll  +- window  f freeze  ? help  q quit",
    Page.BOARD: "Esc back  d device  up down scroll  f freeze  ? help  q quit",
    Page.HELP: "Esc back  up down scroll  q quit",
}


def render(state: State, width: int, height: int) -> Frame:
    """`height` lines of at most `width` cells."""
    page = PAGES[state.ui.page](state, width, max(1, height - FRAME_LINES))
    body = page.lines[: max(0, height - FRAME_LINES)]
    filler = [Text("", end="") for _ in range(height - FRAME_LINES - len(body))]
    lines = [title(state, width), *body, *filler, footer(state, width)]
    return Frame(lines[:height], page.max_scroll)


def title(state: State, width: int) -> Text:
    ui = state.ui
    window = "since start" if ui.window_s == float("inf") else f"{ui.window_s:.0f} s"
    left = [part(" starsd monitor ", "reverse bold"), part(f" {ui.page.value}  window {window}")]
    if ui.frozen:
        left.append(part("  FROZEN (f goes on)", "bold yellow"))
    if ui.filter and not ui.typing:
        left.append(part(f"  filter: {ui.filter}", "bold"))
    head = line(width, *left)
    right = "  ".join(filter(None, (state.watch, state.clock)))
    if right and head.cell_len + len(right) + 2 <= width:
        head.append(" " * (width - head.cell_len - len(right)) + right, "dim")
    return head


def footer(state: State, width: int) -> Text:
    if state.ui.typing:
        return line(
            width, part(f"/{state.ui.filter}", "bold"), part("_  Enter keeps it, Esc clears it", "dim")
        )
    return line(width, part(FOOTERS[state.ui.page], "dim"))
