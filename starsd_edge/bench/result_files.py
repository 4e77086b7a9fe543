"""Where a benchmark's results go: looked at before minutes are spent, written whole after."""

from __future__ import annotations

import contextlib
import importlib.util
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import click

from starsd_edge.errors import MissingDependencyError, UsageError
from starsd_edge.extras import install_hint
from starsd_edge.whole_file import SHARED_MODE, check_savable, save_as, whole

__all__ = ["picture_option", "result_option", "save_picture", "unwritten", "write_result"]

PICTURES = (".png", ".svg", ".pdf")
STREAMS = ("/dev/", "/proc/")  # whatever they lead to is written to, and never replaced

Command = TypeVar("Command", bound=Callable[..., Any])


def result_option(flag: str, name: str, help_text: str, **more: Any) -> Callable[[Command], Command]:
    """An option that names a file. Where it cannot be written, that is said before anything is measured."""
    kind = click.Path(path_type=Path, dir_okay=False)
    return click.option(flag, name, type=kind, callback=_writable, help=help_text, **more)


def picture_option(flag: str, name: str, help_text: str) -> Callable[[Command], Command]:
    """Like `result_option`, for a picture: matplotlib and a format it knows are needed, too."""
    kind = click.Path(path_type=Path, dir_okay=False)
    return click.option(flag, name, type=kind, callback=_drawable, help=help_text)


def write_result(path: Path, text: str) -> None:
    """Raises UsageError where it cannot be written."""
    with unwritten(path):
        if _is_stream(path):
            with path.open("a", encoding="utf-8") as stream:  # behind what is there: it may lead to a file
                stream.write(text)
        else:
            save_as(path, text, SHARED_MODE)


def save_picture(figure: Any, path: Path, dots_per_inch: int) -> None:
    """A matplotlib figure, in the format of the file's name. Raises UsageError."""
    with unwritten(path), whole(path, SHARED_MODE) as file:
        figure.savefig(file, dpi=dots_per_inch, format=path.suffix.lower()[1:])


@contextlib.contextmanager
def unwritten(path: Path) -> Iterator[None]:
    """What keeps `path` from being written becomes a UsageError."""
    try:
        yield
    except OSError as error:
        raise UsageError(f"{path}: cannot be written: {error.strerror}") from error
    except ValueError as error:
        raise UsageError(f"{path}: cannot be written: {error}") from error


def _writable(_context: click.Context, _parameter: click.Parameter, path: Path | None) -> Path | None:
    if path is not None and not _is_stream(path):
        with unwritten(path):
            check_savable(path)
    return path


def _drawable(context: click.Context, parameter: click.Parameter, path: Path | None) -> Path | None:
    if path is not None:
        if path.suffix.lower() not in PICTURES:
            raise UsageError(f"{path}: a picture's name ends in one of {', '.join(PICTURES)}")
        if importlib.util.find_spec("matplotlib") is None:
            raise MissingDependencyError(f"a picture needs matplotlib: {install_hint('bench')}")
    return _writable(context, parameter, path)


def _is_stream(path: Path) -> bool:
    """Standard output, say, or a pipe of the shell's."""
    at_streams = os.path.abspath(path).startswith(STREAMS)
    return path.exists() and (at_streams or not path.is_file()) and not path.is_dir()
