"""Content to a device: many files, several SFTP channels on one connection, resumable, verified.

One SSH channel is limited by its window (2 MiB a round trip), so a file is cut into chunks that several
channels write at once into `parts/<sha256>.part`. A journal beside it lists finished chunks; a transfer that
was cut goes on from there. The part's name is the content's hash, so a part can never be continued with other
content. The device hashes each file while it is being written, chunk after chunk, and moves it to
`blobs/<sha256>`; one that does not match is looked through chunk by chunk (a power cut may have lost pages
that the journal counts as written) and only wrong chunks are sent again.
"""

from __future__ import annotations

import contextlib
import hashlib
import queue
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO

import msgspec
import paramiko

from starsd_deploy.device import DeviceShell
from starsd_deploy.ssh import NoChannelError, write_limit
from starsd_edge.errors import DeployError, StarSDError

__all__ = ["Blob", "TransferReport", "send_blobs"]

CHUNK_MIB = 4
CHUNK_BYTES = CHUNK_MIB * 1024 * 1024
# Each has a window of its own, so six carry 12 MiB a round trip; sshd allows ten sessions on a connection
# (MaxSessions), and the hashing, the heartbeat and one that is still closing need one each.
CHANNELS = 6
SLACK_BYTES = 256 * 1024 * 1024  # left free on the device's disk
HASH_TIMEOUT_S = 1800.0  # an SD card reads 4 GB in two minutes; emulated boards are slower


class Blob(msgspec.Struct, frozen=True):
    """A file by content: its hash and size, and where this machine has it."""

    sha256: str
    size: int
    source: str


class TransferReport(msgspec.Struct, frozen=True):
    """What a transfer did."""

    sent_bytes: int
    resumed_bytes: int
    repaired_bytes: int


class _Chunk(msgspec.Struct, frozen=True):
    blob: Blob
    index: int

    @property
    def offset(self) -> int:
        return self.index * CHUNK_BYTES

    @property
    def size(self) -> int:
        return min(CHUNK_BYTES, self.blob.size - self.offset)


def send_blobs(
    shell: DeviceShell,
    blobs: tuple[Blob, ...],
    *,
    channels: int = CHANNELS,
    progress: Callable[[int], None] | None = None,
) -> TransferReport:
    """Bring blobs to the device; those it has must not be in the list.

    `progress` is called with counts of bytes as they are settled, resumed ones included.

    Raises:
        DeployError: a source file changed, the disk is too small, or the device's copy stays wrong.
        UnreachableError: the connection was lost; calling again goes on where it ended.
    """
    note = progress or (lambda count: None)
    chunks = [_Chunk(blob, index) for blob in blobs for index in range(_count(blob))]

    def resume() -> _Split:
        done = _begin(shell, blobs)
        split = _Split(chunks, frozenset(c for c in chunks if c.index in done[c.blob.sha256]))
        note(_bytes(split.there))
        return split

    first = _Pass(shell, blobs, chunks, note)
    bad = first.run(channels, resume)
    wrong = frozenset(chunk for blob in bad for chunk in _wrong_chunks(shell, blob))
    if bad:
        again = [chunk for chunk in chunks if chunk.blob in bad]
        second = _Pass(shell, bad, again, lambda count: None)
        bad = second.run(channels, lambda: _Split(again, frozenset(again) - wrong))
    if bad:
        sources = ", ".join(blob.source for blob in bad)
        raise DeployError(
            f"{shell.connection.name}: the copy of {sources} does not match its hash after a second try: "
            "the file changed while it was sent (plan again), or the device's disk is failing"
        )
    sent = first.split.todo
    return TransferReport(_bytes(sent) + _bytes(wrong), _bytes(first.split.there), _bytes(wrong))


def _begin(shell: DeviceShell, blobs: tuple[Blob, ...]) -> dict[str, frozenset[int]]:
    """Finished chunks of each blob; parts are made in their full size, so that ranges can be written."""
    counts = {blob.sha256: _count(blob) for blob in blobs}
    words = [word for blob in blobs for word in (blob.sha256, str(blob.size))]
    output = shell.do("parts", *words)
    done = {}
    for line in output.splitlines():
        sha256, *indices = line.split()
        done[sha256] = frozenset(int(i) for i in indices if i.isdigit() and int(i) < counts[sha256])
    return done


class _Split:
    """Which chunks the device has, and which are to be sent, in order."""

    def __init__(self, chunks: list[_Chunk], there: frozenset[_Chunk]) -> None:
        self.there = there
        self.todo = [chunk for chunk in chunks if chunk not in there]


class _Pass:
    """One go over all chunks: channels that send, and a command on the device that hashes what arrives."""

    def __init__(
        self,
        shell: DeviceShell,
        blobs: tuple[Blob, ...],
        chunks: list[_Chunk],
        note: Callable[[int], None],
    ) -> None:
        self._shell, self._blobs, self._chunks, self._note = shell, blobs, chunks, note
        self._work: queue.SimpleQueue[_Chunk | None] = queue.SimpleQueue()
        self._arrivals: queue.SimpleQueue[_Chunk | None] = queue.SimpleQueue()
        self._failed = threading.Event()
        self.split = _Split([], frozenset())

    def run(self, channels: int, split: Callable[[], _Split]) -> tuple[Blob, ...]:
        """Send what `split` says while channels are being opened already; blobs whose copy is wrong.

        The first error ends all workers. A channel that the server refuses is no error while others work.
        """
        count = min(channels, len(self._chunks))
        with ThreadPoolExecutor(count + 2, thread_name_prefix="sftp") as pool:
            verified = pool.submit(_verify_along, self._shell, self._blobs, self._arrivals)
            outcomes = [pool.submit(self._fill, split, count)]
            outcomes += [pool.submit(self._work_off) for _ in range(count)]
            errors = [error for outcome in outcomes if (error := outcome.exception()) is not None]
            self._arrivals.put(None)
        refused = [error for error in errors if isinstance(error, NoChannelError)]
        if refused and len(refused) == len(errors) < count:
            errors = []
        # a worker's own failure says more than that the connection then went away
        for error in sorted(errors, key=lambda error: not isinstance(error, StarSDError)):
            raise error
        return verified.result()

    def _fill(self, split: Callable[[], _Split], count: int) -> None:
        try:
            self.split = split()
        except BaseException:
            self._failed.set()
            raise
        finally:
            for chunk in self.split.there:
                self._arrivals.put(chunk)
            for work in (*self.split.todo, *[None] * count):
                self._work.put(work)

    def _work_off(self) -> None:
        try:
            with self._shell.connection.sftp() as sftp, contextlib.ExitStack() as files:
                writer = _Writer(self._shell, sftp, files, self._note)
                while not self._failed.is_set() and (chunk := self._work.get()) is not None:
                    writer.write(chunk)
                    self._arrivals.put(chunk)
        except NoChannelError:
            raise
        except BaseException:
            self._failed.set()
            raise


def _verify_along(
    shell: DeviceShell, blobs: tuple[Blob, ...], arrivals: queue.SimpleQueue[_Chunk | None]
) -> tuple[Blob, ...]:
    """Tell the device of chunks in their order as they arrive; None is the last arrival."""
    arrived: set[tuple[str, int]] = set()
    with shell.fed("blob_stream", str(CHUNK_MIB), *(blob.sha256 for blob in blobs)) as running:
        for blob in blobs:
            for index in range(_count(blob)):
                while (blob.sha256, index) not in arrived:
                    chunk = arrivals.get()
                    if chunk is None:  # the sender failed and says why
                        return ()
                    arrived.add((chunk.blob.sha256, chunk.index))
                running.feed(f"{index}\n".encode())
            running.feed(b"end\n")
        output = shell.output_of("blob_stream", running, HASH_TIMEOUT_S)
    bad = {line.split()[1] for line in output.splitlines() if line.startswith("bad ")}
    return tuple(blob for blob in blobs if blob.sha256 in bad)


class _Writer:
    """One SFTP channel with the files it has open; a new blob closes the one before."""

    def __init__(
        self,
        shell: DeviceShell,
        sftp: paramiko.SFTPClient,
        files: contextlib.ExitStack,
        note: Callable[[int], None],
    ) -> None:
        self._shell, self._sftp, self._files, self._note = shell, sftp, files, note
        self._write_bytes = write_limit(sftp)
        self._blob = ""

    def write(self, chunk: _Chunk) -> None:
        """Write one chunk; the device has it when this returns."""
        if chunk.blob.sha256 != self._blob:
            self._open(chunk.blob)
        self._write(chunk)
        if self._journal:
            self._journal.write(f"{chunk.index}\n".encode())

    def _open(self, blob: Blob) -> None:
        self._files.close()
        self._blob = blob.sha256
        self._source: BinaryIO = self._files.enter_context(Path(blob.source).open("rb"))  # noqa: SIM115 (the stack closes it)
        self._part = self._files.enter_context(self._sftp.open(_part(self._shell, blob), "r+b"))
        self._part.MAX_REQUEST_SIZE = self._write_bytes
        self._journal = None
        if _count(blob) > 1:
            self._journal = self._files.enter_context(self._sftp.open(_journal(self._shell, blob), "ab"))
            self._journal.set_pipelined(True)  # its answers may wait until the file is closed

    def _write(self, chunk: _Chunk) -> None:
        """All but the last write run without waiting for their answers; the last one collects them all."""
        self._source.seek(chunk.offset)
        self._part.seek(chunk.offset)
        left = chunk.size
        while left:
            data = self._source.read(min(self._write_bytes, left))
            if not data:
                raise DeployError(f"{chunk.blob.source} became shorter while it was sent; plan again")
            left -= len(data)
            self._part.set_pipelined(left > 0)
            self._part.write(data)
            self._shell.connection.count_sent(len(data))
            self._note(len(data))


def _wrong_chunks(shell: DeviceShell, blob: Blob) -> list[_Chunk]:
    indices = [str(index) for index in range(_count(blob))]
    output = shell.do("chunk_hashes", blob.sha256, str(CHUNK_MIB), *indices, timeout_s=HASH_TIMEOUT_S)
    remote = dict(line.split() for line in output.splitlines())
    wrong = []
    with open(blob.source, "rb") as source:
        for index in range(_count(blob)):
            if hashlib.sha256(source.read(CHUNK_BYTES)).hexdigest() != remote.get(str(index)):
                wrong.append(_Chunk(blob, index))
    return wrong


def _bytes(chunks: Iterable[_Chunk]) -> int:
    return sum(chunk.size for chunk in chunks)


def _count(blob: Blob) -> int:
    """Chunks of a blob; an empty file has none."""
    return -(-blob.size // CHUNK_BYTES)


def _part(shell: DeviceShell, blob: Blob) -> str:
    return f"{shell.root}/parts/{blob.sha256}.part"


def _journal(shell: DeviceShell, blob: Blob) -> str:
    return f"{shell.root}/parts/{blob.sha256}.journal"


def hash_file(path: Path) -> str:
    """SHA-256 of a file, hex."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()
