"""How far an export is: a bar in a terminal, lines where there is none."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeAlias

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

__all__ = ["Tell", "lines", "shown"]

LINE_PERCENT = 5  # between two lines
LONG_S = 120.0  # what is longer is told in minutes

Tell: TypeAlias = Callable[[int, int], None]
"""(layers done, layers in all)."""


@contextmanager
def shown() -> Iterator[Tell]:
    """On standard error, while the block runs."""
    terminal = Console(stderr=True)
    if not terminal.is_terminal:
        yield lines(lambda line: click.echo(line, err=True), time.monotonic)
        return
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[count]}"),
        TimeRemainingColumn(),
        console=terminal,
        transient=True,
    )
    with bar:
        task = bar.add_task("reading", total=None, count="")

        def tell(done: int, total: int) -> None:
            what = "exporting" if done < total else "trying out"
            bar.update(task, completed=done, total=total, description=what, count=f"{done}/{total} layers")

        yield tell


def lines(say: Callable[[str], None], clock: Callable[[], float]) -> Tell:
    """One every LINE_PERCENT, with the time that the remaining layers will take at the pace so far."""
    began_s = clock()
    due = 0

    def tell(done: int, total: int) -> None:
        nonlocal due
        percent = 100 * done // max(total, 1)
        if percent < due:
            return
        due = percent - percent % LINE_PERCENT + LINE_PERCENT
        if done == total:
            say("exporting: all layers written, trying out")
            return
        left_s = (clock() - began_s) / max(done, 1) * (total - done)
        say(f"exporting: {percent}%, {done} of {total} layers, about {duration(left_s)} left")

    return tell


def duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < LONG_S else f"{seconds / 60:.0f} min"
