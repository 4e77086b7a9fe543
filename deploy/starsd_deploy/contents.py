"""Folders of this machine (bundles, heads) as content: every file by its hash, the folder by all of them."""

from __future__ import annotations

import hashlib
from pathlib import Path

import msgspec

from starsd_deploy.blobs import Blob, hash_file
from starsd_deploy.folders import NO_FOLDER
from starsd_deploy.steps import Content, ContentFile
from starsd_edge.errors import BundleError
from starsd_edge.whole_file import write_whole

__all__ = ["HashCache", "read_content"]

CACHE_MODE = 0o600


class _Entry(msgspec.Struct, frozen=True):
    size: int
    modified_ns: int
    sha256: str


class HashCache:
    """Hashes of large files, kept over runs: a 4 GB bundle is read once, not at every plan.

    A file counts as unchanged while size and modification time (in nanoseconds) are. The device checks the
    content's hash in any case, so a wrong entry ends in an error and never in a wrong file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._entries = msgspec.json.decode(path.read_bytes(), type=dict[str, _Entry])
        except (OSError, msgspec.MsgspecError):
            self._entries = {}

    def sha256(self, path: Path) -> str:
        """The hash of a file, from the cache where it can be."""
        stat = path.stat()
        known = self._entries.get(str(path))
        if known and (known.size, known.modified_ns) == (stat.st_size, stat.st_mtime_ns):
            return known.sha256
        digest = hash_file(path)
        self._entries[str(path)] = _Entry(stat.st_size, stat.st_mtime_ns, digest)
        return digest

    def save(self) -> None:
        """Write the cache back, whole or not at all."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(self._path, msgspec.json.encode(self._entries).decode(), CACHE_MODE)


def read_content(link: str, folder: Path, cache: HashCache) -> Content:
    """A folder as content; hidden files are left out.

    Raises:
        BundleError: no such folder, or nothing in it.
    """
    if not folder.is_dir():
        raise BundleError(f"{folder}: {NO_FOLDER}")
    files = []
    for path in sorted(folder.rglob("*")):
        relative = path.relative_to(folder)
        if path.is_file() and not any(part.startswith(".") for part in relative.parts):
            blob = Blob(sha256=cache.sha256(path), size=path.stat().st_size, source=str(path))
            files.append(ContentFile(path=str(relative), blob=blob))
    if not files:
        raise BundleError(f"{folder}: the folder is empty")
    listing = "".join(f"{file.blob.sha256} {file.path}\n" for file in files)
    return Content(link=link, id=hashlib.sha256(listing.encode()).hexdigest()[:16], files=tuple(files))
