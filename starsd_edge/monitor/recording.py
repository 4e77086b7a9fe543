"""Recordings: what a monitor saw, in a file that shows it again anywhere.

A recording is lines of JSON (gzipped where the name ends in .gz): a head, then snapshots and changes of the
links, each with the time since the start. It holds names, addresses and fingerprints of devices, and no key,
prompt or token.
"""

from __future__ import annotations

import contextlib
import gzip
import select
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, cast

import msgspec

from starsd_edge.errors import ConfigError, RemoteProtocolError, ResourceError
from starsd_edge.monitor.feed import Arrival
from starsd_edge.monitor.link_state import Link, LinkState
from starsd_edge.protocol.telemetry import (
    MAX_SNAPSHOT_BYTES,
    ServiceSnapshot,
    decode_snapshot,
    encode_snapshot,
)
from starsd_edge.whole_file import DISK_FULL

__all__ = ["Recorder", "ReplayFeed"]

FORMAT = "starsd monitor recording"
VERSION = 1


class Head(msgspec.Struct):
    """First line."""

    format: str
    version: int
    names: list[str]


class Entry(msgspec.Struct, omit_defaults=True):
    """Every other line: a snapshot of a source, or how the links stand."""

    at_s: float
    source: int = 0
    snapshot: msgspec.Raw = msgspec.Raw(b"null")
    links: list[str] = []


class Recorder:
    """Writes a recording. `start_s` is the monotonic time that the recording calls zero.

    Every method raises ConfigError where the file cannot be written, ResourceError where the disk is full:
    what fitted stays, and can be shown.
    """

    def __init__(self, path: Path, names: Sequence[str], start_s: float) -> None:
        self._path, self._start_s = path, start_s
        self._links: list[str] = []
        try:
            self._file = _open(path, "wb")
        except OSError as error:
            raise self._unwritten(error) from error
        self._line(Head(FORMAT, VERSION, list(names)))

    def snapshot(self, arrival: Arrival) -> None:
        """Write an arrival down."""
        raw = msgspec.Raw(encode_snapshot(arrival.snapshot))
        self._line(Entry(arrival.at_s - self._start_s, arrival.source, raw))

    def links(self, links: Sequence[Link], now_s: float) -> None:
        """Write down how the links stand, where that has changed."""
        states = [link.state.name for link in links]
        if states != self._links:
            self._links = states
            self._line(Entry(now_s - self._start_s, links=states))

    def close(self) -> None:
        """Write the rest."""
        try:
            self._file.close()
        except OSError as error:
            raise self._unwritten(error) from error

    def _line(self, entry: Head | Entry) -> None:
        try:
            self._file.write(msgspec.json.encode(entry) + b"\n")
        except OSError as error:
            raise self._unwritten(error) from error

    def _unwritten(self, error: OSError) -> ConfigError | ResourceError:
        with contextlib.suppress(OSError):
            if self._path.is_file() and self._path.stat().st_size == 0:
                self._path.unlink()
        if error.errno in DISK_FULL:
            return ResourceError(f"{self._path}: the disk is full ({error.strerror})")
        return ConfigError(f"{self._path}: cannot be written: {error.strerror}")


class ReplayFeed:
    """Plays a recording as a feed, `speed` times as fast as it happened (infinity: all at once).

    Raises ConfigError, naming the line, when the file is no recording."""

    def __init__(self, path: Path, *, speed: float = 1.0, now: Callable[[], float] = time.monotonic) -> None:
        self._path, self._speed, self._now = path, speed, now
        self._entries = read_recording(path)
        head = next(self._entries)
        assert isinstance(head, Head)
        self.names = head.names
        self.links = [Link() for _ in head.names]
        self.probes = 0
        self._next = next(self._entries, None)
        self._start_s: float | None = None

    @property
    def ended(self) -> bool:
        """Whether all of it was played."""
        return self._next is None

    def poll(self, timeout_s: float, keyboard: int | None = None) -> list[Arrival]:
        if self._start_s is None:
            self._start_s = self._now()
        wait_s = min(timeout_s, max(0.0, self._due_s() - self._now()))
        if wait_s > 0:
            select.select([keyboard] if keyboard is not None else [], [], [], wait_s)
        arrivals = []
        while self._next is not None and self._due_s() <= self._now():
            entry = self._next
            assert isinstance(entry, Entry)
            if entry.links:
                self.links = [Link(LinkState[name], self._now()) for name in entry.links]
            else:
                raw = bytes(entry.snapshot)
                arrivals.append(Arrival(entry.source, self._due_s(), len(raw), self._snapshot(raw)))
            self._next = next(self._entries, None)
            if self._next is None:
                self.links = [Link(LinkState.ENDED, self._now()) for _ in self.names]
        return arrivals

    def close(self) -> None:
        self._entries.close()  # type: ignore[attr-defined]  # a generator's

    def _due_s(self) -> float:
        if self._next is None:
            return float("inf")
        assert isinstance(self._next, Entry)
        assert self._start_s is not None
        return self._start_s + self._next.at_s / self._speed

    def _snapshot(self, raw: bytes) -> ServiceSnapshot:
        try:
            return decode_snapshot(raw)
        except RemoteProtocolError as error:
            raise ConfigError(f"{self._path}: {error}") from error


def read_recording(path: Path) -> Iterator[Head | Entry]:
    """The head, then the entries. Raises ConfigError for a file that is none, or a damaged line; a last line
    that was cut off by an interrupted recording ends it."""
    head_decoder, decoder = msgspec.json.Decoder(Head), msgspec.json.Decoder(Entry)
    try:
        with _open(path, "rb") as file:
            number, names = 0, 0
            while line := file.readline(MAX_SNAPSHOT_BYTES + 1024):
                number += 1
                if number == 1:
                    head = head_decoder.decode(line)
                    if head.format != FORMAT or head.version != VERSION:
                        raise ConfigError(f"{path}: not a recording of version {VERSION}")
                    names = len(head.names)
                    yield head
                    continue
                if not line.endswith(b"\n"):
                    return
                entry = decoder.decode(line)
                unknown = [name for name in entry.links if name not in LinkState.__members__]
                if not 0 <= entry.source < names or unknown or len(entry.links) not in (0, names):
                    raise ConfigError(f"{path}:{number}: does not belong to its head")
                yield entry
            if number == 0:
                raise ConfigError(f"{path}: an empty file is no recording")
    except EOFError:
        return  # gzip cut off in the middle
    except (OSError, zlib.error, msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not a recording of starsd monitor ({error})") from error


def _open(path: Path, mode: str) -> BinaryIO:
    """The file, through gzip where its name says so."""
    return cast(BinaryIO, gzip.open(path, mode) if path.suffix == ".gz" else path.open(mode))
