"""The loop: wait for snapshots and keys, draw twice a second and at once after a key."""

from __future__ import annotations

import time
from collections.abc import Callable

from starsd_edge.monitor.feed import Arrival, Feed
from starsd_edge.monitor.format import Form, shown
from starsd_edge.monitor.model import Model
from starsd_edge.monitor.render import render
from starsd_edge.monitor.screen import Frame, State
from starsd_edge.monitor.terminal import Terminal
from starsd_edge.monitor.ui import Command, Ui, after_key

__all__ = ["run"]

DRAW_EVERY_S = 0.5


def run(
    feed: Feed, terminal: Terminal, *, ascii_only: bool = False, now: Callable[[], float] = time.monotonic
) -> None:
    """Show `feed` until the user quits, or the terminal goes away."""
    screen = Screen(feed, terminal, ascii_only=ascii_only)
    with terminal.opened():
        command = screen.loop(time.monotonic)
    if command is Command.QUIT_KEEPING_SCREEN:
        terminal.leave_standing()


class Screen:
    """The model, what the user looks at, and the frame that stands on the terminal."""

    def __init__(self, feed: Feed, terminal: Terminal, *, ascii_only: bool) -> None:
        self._feed, self._terminal, self._ascii_only = feed, terminal, ascii_only
        self._model = Model.of(feed.names)
        self._ui = Ui()
        self._frame = Frame()
        self._order: list[str] = []
        self._started_s: float | None = None
        self._num_bytes = 0

    def loop(self, now: Callable[[], float]) -> Command:
        due_s = self._started_s = now()
        while not self._terminal.terminated:
            wait_s = max(0.0, due_s - now())
            self._take(self._feed.poll(wait_s, self._terminal.keyboard))
            command, touched = self._press()
            if command in (Command.QUIT, Command.QUIT_KEEPING_SCREEN):
                return command
            if touched or now() >= due_s:
                self._draw(now())
                # On the beat, whatever a draw takes; after a pause the beat starts anew.
                due_s = max(due_s, now() - DRAW_EVERY_S) + DRAW_EVERY_S if now() >= due_s else due_s
        return Command.QUIT

    def _take(self, arrivals: list[Arrival]) -> None:
        self._num_bytes += sum(arrival.num_bytes for arrival in arrivals)
        if self._ui.frozen:
            return  # counters count up: what is missed here is made good by the next snapshot
        for arrival in arrivals:
            self._model.take(arrival.source, arrival.snapshot, arrival.num_bytes)
        self._model.note_links(self._feed.links)

    def _press(self) -> tuple[Command, bool]:
        keys = self._terminal.keys()
        for key in keys:
            self._ui, command = after_key(self._ui, key, self._order, self._frame.max_scroll)
            if command is Command.RESET:
                self._model.reset()
            elif command is not Command.NONE:
                return command, True
        return Command.NONE, bool(keys)

    def _draw(self, now_s: float) -> None:
        columns, lines = self._terminal.size
        state = State(self._model, self._ui, time.strftime("%H:%M:%S"), self._cost(now_s), self._ascii_only)
        self._frame = render(state, columns, lines)
        self._order = [view.key for view in state.listed]
        self._terminal.draw(self._frame.lines)

    def _cost(self, now_s: float) -> str:
        """What watching takes from the link."""
        seconds = max(1.0, now_s - (self._started_s or now_s))
        probes = f", {self._feed.probes} probes" if self._feed.probes else ""
        return f"watching takes {shown(self._num_bytes / seconds, Form.BYTES)}/s{probes}"
