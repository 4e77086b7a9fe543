"""Text files that are written whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from pathlib import Path

__all__ = ["save_as", "write_whole"]

PRIVATE_MODE = 0o600


def write_whole(path: Path, text: str, mode: int) -> None:
    """All of it or nothing, on disk before it has its name; never readable by more than `mode` allows.

    Raises OSError, and ValueError for a name that no file can have or a letter that none can hold.
    """
    draft = path.with_name(f".{path.name}.{os.getpid()}.new")
    try:
        # O_EXCL: not through a link somebody left there.
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    finally:
        with contextlib.suppress(OSError, ValueError):
            draft.unlink(missing_ok=True)


def save_as(path: Path, text: str) -> None:
    """Write to where a user says: through a link to what it names, over an ordinary file, whose mode stays,
    and over nothing else. A new file is its user's alone.

    Raises OSError and ValueError.
    """
    place = Path(os.path.realpath(path))
    mode = PRIVATE_MODE
    with contextlib.suppress(FileNotFoundError):
        found = place.stat().st_mode
        if stat.S_ISDIR(found):
            raise IsADirectoryError(errno.EISDIR, "it is a folder; name a file in it")
        if not stat.S_ISREG(found):
            raise OSError(errno.EINVAL, "it is no ordinary file")
        if not os.access(place, os.W_OK):  # a new file in its place would need no permission of the old one
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        mode = stat.S_IMODE(found)
    write_whole(place, text, mode)
