"""Files by content, and the chunks that a transfer counts them in."""

from __future__ import annotations

import hashlib
from pathlib import Path

import msgspec

__all__ = ["CHUNK_BYTES", "CHUNK_MIB", "Blob", "Chunk", "chunk_count", "chunks_of", "hash_file"]

CHUNK_MIB = 4
CHUNK_BYTES = CHUNK_MIB * 1024 * 1024


class Blob(msgspec.Struct, frozen=True):
    """A file by content: its hash and size, and where this machine has it."""

    sha256: str
    size: int
    source: str


class Chunk(msgspec.Struct, frozen=True):
    """A range of a blob; all but the last are of CHUNK_BYTES."""

    blob: Blob
    index: int

    @property
    def offset(self) -> int:
        """Where it begins in the file, bytes."""
        return self.index * CHUNK_BYTES

    @property
    def size(self) -> int:
        """Its bytes."""
        return min(CHUNK_BYTES, self.blob.size - self.offset)


def chunk_count(blob: Blob) -> int:
    """Chunks of a blob; an empty file has none."""
    return -(-blob.size // CHUNK_BYTES)


def chunks_of(blobs: tuple[Blob, ...]) -> list[Chunk]:
    """All chunks in order."""
    return [Chunk(blob, index) for blob in blobs for index in range(chunk_count(blob))]


def hash_file(path: Path) -> str:
    """SHA-256 of a file, hex."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()
