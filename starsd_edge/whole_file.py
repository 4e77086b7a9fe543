"""Files that are written whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

__all__ = ["DISK_FULL", "PRIVATE_MODE", "SHARED_MODE", "check_savable", "save_as", "whole", "write_whole"]

DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # what a write fails with where there is no room
PRIVATE_MODE = 0o600
SHARED_MODE = 0o666  # less what the user's umask takes, as with any other program


@contextlib.contextmanager
def whole(path: Path, mode: int) -> Iterator[BinaryIO]:
    """A file to write to. All of it or nothing, on disk before it has its name; never readable by more than
    `mode` allows.

    Raises OSError, and ValueError for a name that no file can have.
    """
    draft = _draft_of(path)
    try:
        # O_EXCL: not through a link somebody left there.
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        with os.fdopen(descriptor, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    finally:
        with contextlib.suppress(OSError, ValueError):
            draft.unlink(missing_ok=True)


def write_whole(path: Path, text: str, mode: int) -> None:
    """`text` as a file, like `whole`. Raises ValueError for a letter that none can hold, too."""
    data = text.encode()
    with whole(path, mode) as file:
        file.write(data)


def save_as(path: Path, text: str, mode: int = PRIVATE_MODE) -> None:
    """Write to where a user says: through a link to what it names, over an ordinary file, whose mode stays,
    and over nothing else. A new file gets `mode`: unless told otherwise it is its user's alone.

    Raises OSError and ValueError.
    """
    place, older_mode = _place(path)
    write_whole(place, text, mode if older_mode is None else older_mode)


def check_savable(path: Path) -> None:
    """See that `save_as` would find a place, by making and removing a file in it; a disk may still fill up.

    Raises OSError and ValueError.
    """
    place, _ = _place(path)
    draft = _draft_of(place)
    os.close(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, PRIVATE_MODE))
    draft.unlink()


def _draft_of(path: Path) -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}.new")


def _place(path: Path) -> tuple[Path, int | None]:
    """What `path` leads to, and the mode of the file that is there."""
    place = Path(os.path.realpath(path))
    try:
        found = place.stat().st_mode
    except FileNotFoundError:
        return place, None
    if stat.S_ISDIR(found):
        raise IsADirectoryError(errno.EISDIR, "it is a folder; name a file in it")
    if not stat.S_ISREG(found):
        raise OSError(errno.EINVAL, "it is no ordinary file")
    if not os.access(place, os.W_OK):  # a new file in its place would need no permission of the old one
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    return place, stat.S_IMODE(found)
