"""Content to a device: many files, several SFTP channels on one connection, resumable, verified.

One SSH channel is limited by its window (2 MiB a round trip), so a file is cut into chunks that several
channels write at once into `parts/<sha256>.part`. A journal beside it lists finished chunks; a transfer that
was cut goes on from there. The part's name is the content's hash, so a part can never be continued with other
content. At the end the device hashes the whole file and moves it to `blobs/<sha256>`; a file that does not
match is looked through chunk by chunk (a power cut may have lost pages that the journal counts as written)
and only wrong chunks are sent again.
"""

from __future__ import annotations

import contextlib
import hashlib
import queue
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO

import msgspec
import paramiko

from starsd_deploy.device import DeviceShell
from starsd_edge.errors import DeployError, StarSDError

__all__ = ["Blob", "TransferReport", "send_blobs"]

CHUNK_MIB = 4
CHUNK_BYTES = CHUNK_MIB * 1024 * 1024
WRITE_BYTES = 32 * 1024  # the largest write every SFTP server takes in one piece
CHANNELS = 4  # 2.6 to 3.4 times OpenSSH's sftp at 20 to 100 ms; more gain nothing, the cipher is the limit
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
    done = _resume(shell, blobs)
    chunks = [_Chunk(blob, index) for blob in blobs for index in range(_count(blob))]
    resumed = sum(chunk.size for chunk in chunks if chunk.index in done[chunk.blob.sha256])
    note(resumed)
    todo = [chunk for chunk in chunks if chunk.index not in done[chunk.blob.sha256]]
    _send(shell, todo, channels, note)
    repaired = _finish(shell, blobs, channels)
    return TransferReport(sum(chunk.size for chunk in todo) + repaired, resumed, repaired)


def _resume(shell: DeviceShell, blobs: tuple[Blob, ...]) -> dict[str, frozenset[int]]:
    """Finished chunks of each blob; parts are created with their full size, so that ranges can be written."""
    done: dict[str, frozenset[int]] = {}
    with shell.connection.sftp() as sftp:
        for blob in blobs:
            part = _part(shell, blob)
            try:
                size = sftp.stat(part).st_size
            except FileNotFoundError:
                size = None
            if size != blob.size:
                with sftp.open(part, "w"):
                    sftp.truncate(part, blob.size)
                with contextlib.suppress(FileNotFoundError):
                    sftp.remove(_journal(shell, blob))
                done[blob.sha256] = frozenset()
                continue
            done[blob.sha256] = _read_journal(sftp, _journal(shell, blob), _count(blob))
    return done


def _read_journal(sftp: paramiko.SFTPClient, path: str, count: int) -> frozenset[int]:
    """Whole lines only: a cut may have left half of the last one."""
    try:
        with sftp.open(path, "r") as file:
            text = file.read().decode("ascii", "replace")
    except FileNotFoundError:
        return frozenset()
    lines = text.split("\n")[:-1]
    return frozenset(int(line) for line in lines if line.isdigit() and int(line) < count)


def _send(shell: DeviceShell, todo: list[_Chunk], channels: int, note: Callable[[int], None]) -> None:
    """Workers take chunks from one queue; the first error ends them all."""
    work: queue.SimpleQueue[_Chunk] = queue.SimpleQueue()
    for chunk in todo:
        work.put(chunk)
    failed = threading.Event()

    def worker() -> None:
        try:
            with shell.connection.sftp() as sftp, contextlib.ExitStack() as files:
                _Writer(shell, sftp, files, note).drain(work, failed)
        except BaseException:
            failed.set()
            raise

    count = min(channels, len(todo))
    if not count:
        return
    with ThreadPoolExecutor(count, thread_name_prefix="sftp") as pool:
        outcomes = [pool.submit(worker) for _ in range(count)]
    errors = [error for outcome in outcomes if (error := outcome.exception()) is not None]
    # a worker's own failure says more than that the connection then went away
    for error in sorted(errors, key=lambda error: not isinstance(error, StarSDError)):
        raise error


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
        self._blob = ""

    def drain(self, work: queue.SimpleQueue[_Chunk], failed: threading.Event) -> None:
        """Write chunks until there are no more."""
        while not failed.is_set():
            try:
                chunk = work.get_nowait()
            except queue.Empty:
                return
            if chunk.blob.sha256 != self._blob:
                self._open(chunk.blob)
            self._write(chunk)
            self._journal.write(f"{chunk.index}\n".encode())

    def _open(self, blob: Blob) -> None:
        self._files.close()
        self._blob = blob.sha256
        self._source: BinaryIO = self._files.enter_context(Path(blob.source).open("rb"))  # noqa: SIM115 (the stack closes it)
        self._part = self._files.enter_context(self._sftp.open(_part(self._shell, blob), "r+b"))
        self._journal = self._files.enter_context(self._sftp.open(_journal(self._shell, blob), "ab"))
        self._journal.set_pipelined(True)  # its answers may wait until the file is closed

    def _write(self, chunk: _Chunk) -> None:
        """All but the last write run without waiting for their answers; the last one collects them all."""
        self._source.seek(chunk.offset)
        self._part.seek(chunk.offset)
        left = chunk.size
        while left:
            data = self._source.read(min(WRITE_BYTES, left))
            if not data:
                raise DeployError(f"{chunk.blob.source} became shorter while it was sent; plan again")
            left -= len(data)
            self._part.set_pipelined(left > 0)
            self._part.write(data)
            self._shell.connection.count_sent(len(data))
            self._note(len(data))


def _finish(shell: DeviceShell, blobs: tuple[Blob, ...], channels: int) -> int:
    """Verify on the device, repair what is wrong once; bytes sent again."""
    bad = _verify(shell, blobs)
    if not bad:
        return 0
    wrong = [chunk for blob in bad for chunk in _wrong_chunks(shell, blob)]
    _send(shell, wrong, channels, lambda count: None)
    still = _verify(shell, bad)
    if still:
        sources = ", ".join(blob.source for blob in still)
        raise DeployError(
            f"{shell.connection.name}: the copy of {sources} does not match its hash after a second try: "
            "the file changed while it was sent (plan again), or the device's disk is failing"
        )
    return sum(chunk.size for chunk in wrong)


def _verify(shell: DeviceShell, blobs: tuple[Blob, ...]) -> tuple[Blob, ...]:
    output = shell.do("blob_finish", *(blob.sha256 for blob in blobs), timeout_s=HASH_TIMEOUT_S)
    bad = {line.split()[1] for line in output.splitlines() if line.startswith("bad ")}
    return tuple(blob for blob in blobs if blob.sha256 in bad)


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
