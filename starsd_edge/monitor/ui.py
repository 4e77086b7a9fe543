"""What the user is looking at, and how a key changes it. Pure."""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from starsd_edge.monitor.figures import device_figure
from starsd_edge.monitor.model import WINDOWS_S
from starsd_edge.monitor.views import DeviceView

__all__ = ["SORT_KEYS", "Command", "Key", "Page", "Ui", "after_key", "listed"]

# What `s` goes through. Numbers sort the largest first, because that is where to look.
SORT_KEYS = (
    "state",
    "device",
    "tokens_per_s",
    "acceptance_length",
    "link_p99_s",
    "queue_p99_s",
    "late_trees",
)
MAX_FILTER = 40


class Page(enum.Enum):
    """Which page fills the screen."""

    OVERVIEW = "overview"
    DEVICE = "device"
    BOARD = "board"
    HELP = "help"


class Key(enum.Enum):
    """Keys that are not a character."""

    UP = enum.auto()
    DOWN = enum.auto()
    PAGE_UP = enum.auto()
    PAGE_DOWN = enum.auto()
    HOME = enum.auto()
    END = enum.auto()
    ENTER = enum.auto()
    ESCAPE = enum.auto()
    BACKSPACE = enum.auto()
    INTERRUPT = enum.auto()


class Command(enum.Enum):
    """What the loop must do after a key."""

    NONE = enum.auto()
    QUIT = enum.auto()
    QUIT_KEEPING_SCREEN = enum.auto()
    RESET = enum.auto()


@dataclass(frozen=True, slots=True)
class Ui:
    """Page, selection and settings of the screen."""

    page: Page = Page.OVERVIEW
    back: Page = Page.OVERVIEW  # where Esc leads from help
    selected: str = ""  # key of a device view; "" is the first one
    sort: str = "state"
    reverse: bool = False
    filter: str = ""
    typing: bool = False  # characters go to the filter
    frozen: bool = False
    window: int = 0  # index into WINDOWS_S
    scroll: int = 0  # first line of a page that is longer than the screen

    @property
    def window_s(self) -> float:
        return WINDOWS_S[self.window]


def listed(views: Sequence[DeviceView], ui: Ui) -> list[DeviceView]:
    """The devices that the filter lets through, in the chosen order; the name decides between equals."""
    kept = [view for view in views if matches(view, ui.filter)]
    kept.sort(key=lambda view: view.device.device)
    kept.sort(key=sort_key(ui.sort), reverse=ui.reverse)
    return kept


def matches(view: DeviceView, text: str) -> bool:
    """Whether name, service, state or reason holds every word of the filter; !word must not be there."""
    where = f"{view.key} {view.status.value} {view.reason}".lower()
    return all(
        (word[1:] not in where) if word.startswith("!") and len(word) > 1 else word in where
        for word in text.lower().split()
    )


def sort_key(key: str) -> Callable[[DeviceView], tuple[int, float, str]]:
    """Unknown values last, numbers from high to low, words from a to z, states from bad to good."""
    if key == "state":
        return lambda view: (0, float(view.status.rank), "")
    figure = device_figure(key)

    def value_of(view: DeviceView) -> tuple[int, float, str]:
        value = figure.value(view)
        if isinstance(value, str):
            return (0, 0.0, value.lower())
        return (1, 0.0, "") if value is None else (0, -float(value), "")

    return value_of


def after_key(ui: Ui, key: Key | str, order: Sequence[str], max_scroll: int = 0) -> tuple[Ui, Command]:
    """The screen after a key: a character or a Key. `order` holds the keys of the listed devices,
    `max_scroll` is how far the page that stands can be scrolled."""
    if key is Key.INTERRUPT:
        return ui, Command.QUIT
    if ui.typing:
        return typed(ui, key), Command.NONE
    if key == "q":
        return ui, Command.QUIT
    if key == "Q":
        return ui, Command.QUIT_KEEPING_SCREEN
    if key == "r":
        return ui, Command.RESET
    if key in MOVES and ui.page is Page.OVERVIEW:
        return replace(ui, selected=moved(ui.selected, MOVES[key], order)), Command.NONE
    if key in MOVES:
        return replace(ui, scroll=min(max(0, ui.scroll + MOVES[key]), max_scroll)), Command.NONE
    change = CHANGES.get(key)
    return (change(ui) if change else ui), Command.NONE


def typed(ui: Ui, key: Key | str) -> Ui:
    """A key while the filter is typed."""
    if key is Key.ENTER:
        return replace(ui, typing=False)
    if key is Key.ESCAPE:
        return replace(ui, typing=False, filter="")
    if key is Key.BACKSPACE:
        return replace(ui, filter=ui.filter[:-1])
    if isinstance(key, str) and key.isprintable():
        return replace(ui, filter=(ui.filter + key)[:MAX_FILTER])
    return ui


def moved(selected: str, by: int, order: Sequence[str]) -> str:
    """The device `by` rows below the selected one."""
    if not order:
        return ""
    index = order.index(selected) if selected in order else 0
    return order[min(max(index + by, 0), len(order) - 1)]


def show_help(ui: Ui) -> Ui:
    back = ui.back if ui.page is Page.HELP else ui.page
    return replace(ui, page=Page.HELP, back=back, scroll=0)


def leave(ui: Ui) -> Ui:
    if ui.page is Page.HELP:
        return replace(ui, page=ui.back, scroll=0)
    if ui.page is not Page.OVERVIEW:
        return replace(ui, page=Page.OVERVIEW, scroll=0)
    return replace(ui, filter="")


def next_sort(ui: Ui) -> Ui:
    return replace(ui, sort=SORT_KEYS[(SORT_KEYS.index(ui.sort) + 1) % len(SORT_KEYS)], reverse=False)


WHOLE_LIST = 1_000_000  # rows: further than any list
MOVES: dict[Key | str, int] = {
    Key.UP: -1,
    Key.DOWN: 1,
    "k": -1,
    "j": 1,
    Key.PAGE_UP: -10,
    Key.PAGE_DOWN: 10,
    Key.HOME: -WHOLE_LIST,
    Key.END: WHOLE_LIST,
}
CHANGES: dict[Key | str, Callable[[Ui], Ui]] = {
    "?": show_help,
    "h": show_help,
    Key.ESCAPE: leave,
    Key.BACKSPACE: leave,
    Key.ENTER: lambda ui: replace(ui, page=Page.DEVICE, scroll=0) if ui.page is Page.OVERVIEW else ui,
    "d": lambda ui: replace(ui, page=Page.DEVICE, scroll=0),
    "b": lambda ui: replace(ui, page=Page.BOARD, scroll=0),
    "o": lambda ui: replace(ui, page=Page.OVERVIEW, scroll=0),
    "s": next_sort,
    "S": lambda ui: replace(ui, reverse=not ui.reverse),
    "/": lambda ui: replace(ui, typing=True, filter="", page=Page.OVERVIEW),
    "f": lambda ui: replace(ui, frozen=not ui.frozen),
    " ": lambda ui: replace(ui, frozen=not ui.frozen),
    "+": lambda ui: replace(ui, window=min(ui.window + 1, len(WINDOWS_S) - 1)),
    "-": lambda ui: replace(ui, window=max(ui.window - 1, 0)),
}
