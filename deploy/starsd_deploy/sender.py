"""Chunks over several SFTP lanes at once, by one thread.

The lanes take turns, one write each: all of their windows are used, and a file arrives in order, as the
hashing on the device wants it. Nothing is waited for but windows and, at the end, the last answers.
"""

from __future__ import annotations

import contextlib
from collections import Counter, deque
from collections.abc import Callable, Iterator
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import BinaryIO

import msgspec

from starsd_deploy.blobs import Blob, Chunk, chunk_count
from starsd_deploy.device import DeviceShell
from starsd_deploy.sftp_lane import Mode, SftpLane
from starsd_deploy.throttle import Pacer
from starsd_edge.errors import DeployError

__all__ = ["Sender"]

# Writes before its turn that a file is opened: many small files cost no round trip each.
OPEN_AHEAD = 64


class _Piece(msgspec.Struct, frozen=True):
    """The range of a chunk that one write holds."""

    chunk: Chunk
    offset: int
    size: int


class Sender:
    """Sends chunks whose part files are there; `finished` is told of each that the device has.

    `note` is called with counts of bytes as the device has them.
    """

    def __init__(
        self,
        shell: DeviceShell,
        lanes: list[SftpLane],
        note: Callable[[int], None],
        finished: Callable[[Chunk], None],
        pacer: Pacer,
    ) -> None:
        self._shell, self._lanes, self._note, self._finished = shell, lanes, note, finished
        self._pacer = pacer
        self._source = _Source()
        self._writing: dict[SftpLane, str] = {}
        self._pieces_left: Counter[Chunk] = Counter()
        self._to_journal: deque[Chunk] = deque()

    def send(self, chunks: list[Chunk]) -> None:
        """Return once the device has all of them.

        Raises:
            DeployError: a source file became shorter. Else as SftpLane.
        """
        ahead: deque[tuple[SftpLane, _Piece]] = deque()
        with contextlib.closing(self._source):
            for lane, piece in zip(cycle(self._lanes), self._pieces(chunks), strict=False):
                self._open(lane, piece)
                ahead.append((lane, piece))
                if len(ahead) > OPEN_AHEAD:
                    self._write(*ahead.popleft())
            while ahead:
                self._write(*ahead.popleft())
            for lane in self._lanes:
                lane.settle()
            self._keep_journal()

    def _pieces(self, chunks: list[Chunk]) -> Iterator[_Piece]:
        """Chunks cut into writes of equal size."""
        most = min(lane.write_bytes for lane in self._lanes)
        for chunk in chunks:
            count = -(-chunk.size // most)
            size = -(-chunk.size // count)
            self._pieces_left[chunk] = count
            for start in range(0, chunk.size, size):
                yield _Piece(chunk, chunk.offset + start, min(size, chunk.size - start))

    def _open(self, lane: SftpLane, piece: _Piece) -> None:
        blob = piece.chunk.blob
        lane.open(self._part(blob), Mode.WRITE)
        if chunk_count(blob) > 1:
            self._lanes[0].open(self._journal(blob), Mode.APPEND)

    def _write(self, lane: SftpLane, piece: _Piece) -> None:
        blob = piece.chunk.blob
        part = self._part(blob)
        if (before := self._writing.get(lane, part)) != part:
            lane.close(before)
        self._writing[lane] = part
        self._pacer.take(piece.size)
        self._source.go_to(blob.source, piece.offset)
        lane.write(part, piece.offset, piece.size, self._source.read, partial(self._written, piece))
        self._shell.connection.count_sent(piece.size)
        lane.collect()
        self._keep_journal()

    def _written(self, piece: _Piece) -> None:
        self._note(piece.size)
        self._pieces_left[piece.chunk] -= 1
        if not self._pieces_left[piece.chunk]:
            self._finished(piece.chunk)
            if chunk_count(piece.chunk.blob) > 1:
                self._to_journal.append(piece.chunk)

    def _keep_journal(self) -> None:
        """Note finished chunks on the device, for a transfer that goes on after this one was cut."""
        while self._to_journal:
            chunk = self._to_journal.popleft()
            self._lanes[0].append(self._journal(chunk.blob), f"{chunk.index}\n".encode())

    def _part(self, blob: Blob) -> str:
        return f"{self._shell.root}/parts/{blob.sha256}.part"

    def _journal(self, blob: Blob) -> str:
        return f"{self._shell.root}/parts/{blob.sha256}.journal"


class _Source:
    """The local file that is being read; one at a time."""

    def __init__(self) -> None:
        self._name = ""
        self._file: BinaryIO | None = None

    def go_to(self, name: str, offset: int) -> None:
        """Read from there on."""
        if name != self._name or self._file is None:
            self.close()
            self._name, self._file = name, Path(name).open("rb")  # noqa: SIM115 (close does)
        if self._file.tell() != offset:
            self._file.seek(offset)

    def read(self, size: int) -> bytes:
        """Exactly so many bytes.

        Raises:
            DeployError: the file ends before.
        """
        assert self._file is not None
        data = self._file.read(size)
        if len(data) < size:
            raise DeployError(f"{self._name} became shorter while it was sent; plan again")
        return data

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
