"""Whom a service lets in: a directory with one file per device.

A file is a device's public key and name. Adding, replacing and removing files is all there is to it, by this
module or by hand; changes are seen at the next look. A file that cannot be read lets nobody in.

A process that is short of descriptors, because strangers hold them all, cannot read: whoever it knows and
whose file lies there unchanged stays trusted.
"""

from __future__ import annotations

import logging
import os
import threading
from dataclasses import replace
from pathlib import Path
from typing import TypeAlias

from starsd_edge.errors import ConfigError, ResourceError, UsageError
from starsd_edge.link.keys import (
    PublicKey,
    check_name,
    make_folder,
    read_public_record,
    unreadable,
    write_public,
)

__all__ = ["TrustStore"]

log = logging.getLogger(__name__)

SUFFIX = ".pub"
Stamp: TypeAlias = tuple[int, int, int]  # time of its last change, size, inode
NOT_TO_BE_SEEN: Stamp = (0, 0, 0)


class TrustStore:
    """Devices by name and by key. `refresh` sees changes of the directory; it costs a stat per device.

    `changes` counts them. Any thread may call anything.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.changes = 0
        self._lock = threading.Lock()
        self._seen: dict[str, Stamp] = {}
        self._devices: dict[str, PublicKey] = {}
        self._names: dict[str, str] = {}  # public key -> device name
        self._trouble = ""  # with the folder as a whole, which the log knows of
        self.refresh()

    def device_of(self, public: str) -> str | None:
        """The device that holds the secret of `public`, or None: a stranger, or revoked."""
        return self._names.get(public)

    def devices(self) -> list[PublicKey]:
        """All that are trusted, by name."""
        devices = self._devices  # another thread may put others in its place meanwhile
        return [devices[name] for name in sorted(devices)]

    def find(self, public: str) -> str | None:
        """Like `device_of`, but has a look at the directory before it takes somebody for a stranger."""
        device = self.device_of(public)
        if device is None:
            self.refresh()
            device = self.device_of(public)
        return device

    def refresh(self) -> bool:
        """Read what changed; True when somebody was added, replaced or removed."""
        with self._lock:
            return self._refresh()

    def _refresh(self) -> bool:
        trouble, keys = "", []
        try:
            seen = stamps(self.folder)
            if seen != self._seen:
                keys = [key for name in sorted(seen) if (key := read_device(self.folder / name)) is not None]
        except ConfigError as error:
            seen, trouble = {}, f"{error}; nobody is let in"
        except ResourceError as error:
            seen, trouble = self._unchanged(), f"{error}; nobody new is let in"
            keys = [key for key in self.devices() if key.name + SUFFIX in seen]
        if trouble not in ("", self._trouble):
            log.warning("%s", trouble)
        self._trouble = trouble
        if seen == self._seen:
            return False
        names = {key.previous: key.name for key in keys if key.previous}
        names.update({key.public: key.name for key in reversed(keys)})
        for key in keys:
            if names[key.public] != key.name:
                log.warning(
                    "%s and %s hold the same key: it is known as the first", names[key.public], key.name
                )
        self._seen = seen
        self._devices = {key.name: key for key in keys}
        self._names = names  # in one step: others read it meanwhile
        self.changes += 1
        return True

    def _unchanged(self) -> dict[str, Stamp]:
        """The files that lie there as they did at the last look: to see that takes no descriptor."""
        return {name: stamp for name, stamp in self._seen.items() if stamp_of(self.folder / name) == stamp}

    def trust(self, key: PublicKey, *, replace_other: bool = False, keep_previous: bool = False) -> None:
        """Let `key` in under its name. Raises UsageError when the name or the key is taken."""
        self.refresh()
        known = self._devices.get(key.name)
        other = self._names.get(key.public)
        if other not in (None, key.name):
            raise UsageError(f"this key is already trusted, as '{other}'")
        if known is not None and known.public != key.public and not replace_other:
            raise UsageError(
                f"'{key.name}' is already trusted with another key ({known.fingerprint}); "
                f"--replace puts this one in its place"
            )
        if keep_previous and known is not None and known.public != key.public:
            key = replace(key, previous=known.public)
        make_folder(self.folder, 0o755)
        write_public(self.folder / (key.name + SUFFIX), key)
        self.refresh()

    def revoke(self, name_or_fingerprint: str) -> PublicKey:
        """Let a device in no more, under whatever names its keys lie here; its live connections end with the
        service's next look.

        Raises UsageError when there is no such device, ConfigError when its file cannot be removed.
        """
        self.refresh()
        for key in self.devices():
            if name_or_fingerprint in (key.name, key.fingerprint):
                for name in self._names_of(key):
                    path = self.folder / (check_name(name) + SUFFIX)
                    try:
                        path.unlink(missing_ok=True)
                    except OSError as error:
                        raise ConfigError(f"{path}: cannot be removed: {error.strerror}") from None
                self.refresh()
                return key
        known = ", ".join(key.name for key in self.devices()) or "nobody"
        raise UsageError(f"no device {name_or_fingerprint!r} is trusted; trusted: {known}")

    def _names_of(self, key: PublicKey) -> list[str]:
        """All whose files let one of its keys in: files are copied by hand, too."""
        keys = {key.public, key.previous} - {""}
        return [each.name for each in self.devices() if keys & {each.public, each.previous}]


def stamps(folder: Path) -> dict[str, Stamp]:
    """What tells every key file in `folder` from what was there before.

    A file that is gone meanwhile is left out; one that cannot be looked at (a link to nowhere) hinders nobody
    else, and is told when it is read. Raises ConfigError, and ResourceError where that says nothing of the
    folder.
    """
    try:
        names = [name for name in os.listdir(folder) if name.endswith(SUFFIX)]
    except FileNotFoundError:
        return {}  # nobody was trusted yet
    except OSError as error:
        raise unreadable(folder, error) from None
    found = {name: stamp_of(folder / name) for name in names}
    return {name: stamp for name, stamp in found.items() if stamp is not None}


def stamp_of(path: Path) -> Stamp | None:
    """What tells this file from another one in its place, or from itself before; None when there is none.

    Takes no descriptor. The time of change and not of modification, which a file keeps when its mode changes,
    and can be given when it is written anew. The inode, because a file put in place within the clock's
    resolution is another one all the same.
    """
    try:
        found = path.stat()
    except OSError:
        return NOT_TO_BE_SEEN if os.path.lexists(path) else None
    return found.st_ctime_ns, found.st_size, found.st_ino


def read_device(path: Path) -> PublicKey | None:
    """The device in a file; None, and a line in the log, when it lets nobody in. Raises ResourceError."""
    try:
        key = read_public_record(path)
    except ConfigError as error:
        log.warning("%s; this device is not let in", error)
        return None
    if key.name != path.name.removesuffix(SUFFIX):
        log.warning("%s: is for a device named '%s'; it is not let in", path, key.name)
        return None
    return key
