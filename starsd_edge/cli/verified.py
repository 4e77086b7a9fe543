"""Which files of bundles were hashed already, so that only what is new or was changed is hashed on load.

A file is known by size, times and inode: whoever writes to it changes one of them.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Collection
from pathlib import Path

from starsd_edge.bundle import Bundle
from starsd_edge.config import cache_dir
from starsd_edge.whole_file import PRIVATE_MODE, write_whole

__all__ = ["known_whole", "remember_whole"]


def known_whole(bundle: Bundle) -> frozenset[str]:
    """Files that had the hash of the manifest when they were read last, and were not touched since."""
    try:
        known = json.loads(note_of(bundle).read_text("utf-8"))
    except (OSError, ValueError):
        return frozenset()
    if not isinstance(known, dict):
        return frozenset()
    return frozenset(name for name in bundle.manifest.files if known.get(name) == state_of(bundle, name))


def remember_whole(bundle: Bundle, names: Collection[str]) -> None:
    """These files have the hash of the manifest. A note that cannot be written only costs time."""
    note = note_of(bundle)
    states = {name: state_of(bundle, name) for name in names}
    with contextlib.suppress(OSError):
        note.parent.mkdir(parents=True, exist_ok=True)
        write_whole(note, json.dumps(states), PRIVATE_MODE)


def note_of(bundle: Bundle) -> Path:
    folder = hashlib.sha256(str(bundle.path.resolve()).encode()).hexdigest()
    return cache_dir() / "verified" / f"{folder}.json"


def state_of(bundle: Bundle, name: str) -> list[int | str]:
    stat = (bundle.path / name).stat()
    return [bundle.manifest.files[name].sha256, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino]
