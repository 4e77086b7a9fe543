"""The help page: every key, and every number defined."""

from __future__ import annotations

import textwrap

from rich.text import Text

from starsd_edge.monitor.figures import DEVICE_FIGURES, SERVICE_FIGURES, STAGE_DEFINITIONS
from starsd_edge.monitor.screen import Frame, State, line, part, scrolled, titled
from starsd_edge.monitor.session_figures import SESSION_FIGURES

__all__ = ["KEYS", "help_page"]

KEYS = (
    ("up down j k", "choose a device, or scroll a page; PgUp PgDn Home End go further"),
    ("Enter d", "the device: where its time goes, acceptance, sessions"),
    ("b", "its board: load, temperatures, power"),
    ("o Esc", "back to the overview"),
    ("s S", "sort by the next column, turn the order round"),
    ("/", "filter by words of name, service, state or reason; !word leaves out; Esc clears"),
    ("+ -", "longer or shorter window: 10 s, 1 min, 5 min, everything since the start or the last r"),
    ("f space", "freeze the screen, go on"),
    ("r", "begin all windows now"),
    ("? h", "this page"),
    ("q", "quit; Q leaves the last screen standing"),
)
TERM_WIDTH = 18


def help_page(state: State, width: int, height: int) -> Frame:
    body = [titled(width, "Keys")]
    for keys, what in KEYS:
        body += entry(keys, what, width)
    body += [Text("", end=""), titled(width, "Stages of a round (percentiles over the window, to 4.5%)")]
    for stage, definition in STAGE_DEFINITIONS.items():
        body += entry(stage.value, definition, width)
    body += [Text("", end=""), titled(width, "Figures of a device")]
    for figure in DEVICE_FIGURES:
        body += entry(f"{figure.title}", f"{figure.key}: {figure.definition}", width)
    body += [Text("", end=""), titled(width, "Figures of a session")]
    for session_figure in SESSION_FIGURES:
        body += entry(session_figure.title, f"{session_figure.key}: {session_figure.definition}", width)
    body += [Text("", end=""), titled(width, "Figures of a service")]
    for service_figure in SERVICE_FIGURES:
        body += entry(service_figure.title, f"{service_figure.key}: {service_figure.definition}", width)
    return scrolled(body, height, state.ui.scroll)


def entry(term: str, text: str, width: int) -> list[Text]:
    """A term and its text, wrapped beside it."""
    rows = textwrap.wrap(text, max(20, width - TERM_WIDTH - 3)) or [""]
    first = line(width, part(f"  {term:<{TERM_WIDTH}}", "bold"), part(rows[0]))
    return [first, *(line(width, part(" " * (TERM_WIDTH + 2) + row)) for row in rows[1:])]
