"""What a user typed before, in a file only they can read."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from prompt_toolkit.history import FileHistory, History, InMemoryHistory

from starsd_edge.errors import UsageError

__all__ = ["clear_history", "open_history"]

HISTORY_NAME = "chat_history"


class PrivateHistory(FileHistory):
    """A history file that a full or read-only disk does not make an error of: it is a convenience."""

    def load_history_strings(self) -> Iterable[str]:
        try:
            return super().load_history_strings()
        except OSError:
            return []

    def store_string(self, string: str) -> None:
        try:
            super().store_string(string)
        except OSError:
            return


def open_history(folder: Path | None) -> History:
    """The history in `folder` (created, mode 0700; the file 0600); None keeps it in memory."""
    if folder is None:
        return InMemoryHistory()
    path = folder / HISTORY_NAME
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        os.close(os.open(path, os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o600))
        path.chmod(0o600)
    except OSError:
        return InMemoryHistory()
    return PrivateHistory(str(path))


def clear_history(history: History) -> None:
    """Forget everything typed, on disk too. Raises UsageError when the file cannot be emptied."""
    history._loaded_strings = []  # the package offers no way to clear
    if isinstance(history, FileHistory):
        path = Path(os.fsdecode(history.filename))
        try:
            path.write_bytes(b"")
        except OSError as error:
            raise UsageError(f"{path} cannot be emptied: {error.strerror}") from error
    elif isinstance(history, InMemoryHistory):
        history._storage.clear()
