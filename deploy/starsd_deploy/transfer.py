"""Content to a device: many files, several SFTP channels on one connection, resumable, verified.

One SSH channel is limited by its window (2 MiB a round trip), so several take turns to write a file into
`parts/<sha256>.part`. A file is counted in chunks; those that the device has are listed in a journal beside
the part, and a transfer that was cut goes on from there. The part's name is the content's hash, so a part
can never be continued with other content. The device hashes each file while it is being written, chunk after
chunk, and moves it to `blobs/<sha256>`; one that does not match is looked through chunk by chunk (a power cut
may have lost pages that the journal counts as written) and only wrong chunks are sent again.
"""

from __future__ import annotations

import contextlib
import hashlib
import queue
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor

import msgspec

from starsd_deploy.blobs import CHUNK_BYTES, CHUNK_MIB, Blob, Chunk, chunk_count, chunks_of
from starsd_deploy.device import DeviceShell
from starsd_deploy.sender import Sender
from starsd_deploy.sftp_lane import SftpLane
from starsd_deploy.ssh import CLOSING_S, Connection, NoChannelError, Running
from starsd_deploy.throttle import NO_LIMIT, Pacer
from starsd_edge.errors import DeployError

__all__ = ["CHANNELS", "MOST_CHANNELS", "SLACK_BYTES", "TransferReport", "send_blobs"]

# Each has a window of its own in sshd, so six carry 12 MiB a round trip; it allows ten sessions on a
# connection (MaxSessions), and the hashing, the heartbeat and one that is still closing need one each.
CHANNELS = 6
MOST_CHANNELS = 8
WINDOW_BYTES = 2 * 1024 * 1024
SLACK_BYTES = 256 * 1024 * 1024  # left free on the device's disk
HASH_TIMEOUT_S = 1800.0  # an SD card reads 4 GB in two minutes; emulated boards are slower


class TransferReport(msgspec.Struct, frozen=True):
    """What a transfer did."""

    sent_bytes: int
    resumed_bytes: int
    repaired_bytes: int
    channels: int


def send_blobs(
    shell: DeviceShell,
    blobs: tuple[Blob, ...],
    *,
    channels: int = CHANNELS,
    progress: Callable[[int], None] | None = None,
    pacer: Pacer = NO_LIMIT,
) -> TransferReport:
    """Bring blobs to the device; those it has must not be in the list.

    `progress` is called with counts of bytes as they are settled, resumed ones included.

    Raises:
        DeployError: a source file changed, the disk is too small, or the device's copy stays wrong.
        UnreachableError: the connection was lost; calling again goes on where it ended.
    """
    note = progress or (lambda count: None)
    chunks = chunks_of(blobs)

    def resume() -> _Split:
        done = _begin(shell, blobs)
        return _Split(chunks, frozenset(c for c in chunks if c.index in done[c.blob.sha256]))

    first = _Pass(shell, blobs, chunks, note, pacer)
    bad = first.run(channels, resume)
    wrong = frozenset(chunk for blob in bad for chunk in _wrong_chunks(shell, blob))
    if bad:
        again = [chunk for chunk in chunks if chunk.blob in bad]
        second = _Pass(shell, bad, again, lambda count: None, pacer)
        bad = second.run(channels, lambda: _Split(again, frozenset(again) - wrong))
    if bad:
        sources = ", ".join(blob.source for blob in bad)
        raise DeployError(
            f"{shell.connection.name}: the copy of {sources} does not match its hash after a second try: "
            "the file changed while it was sent (plan again), or the device's disk is failing"
        )
    sent = first.split.todo
    return TransferReport(
        _bytes(sent) + _bytes(wrong), _bytes(first.split.there), _bytes(wrong), first.lane_count
    )


def _begin(shell: DeviceShell, blobs: tuple[Blob, ...]) -> dict[str, frozenset[int]]:
    """Finished chunks of each blob; parts are made in their full size, so that ranges can be written."""
    counts = {blob.sha256: chunk_count(blob) for blob in blobs}
    words = [word for blob in blobs for word in (blob.sha256, str(blob.size))]
    output = shell.do("parts", *words)
    done = {}
    for line in output.splitlines():
        sha256, *indices = line.split()
        done[sha256] = frozenset(int(i) for i in indices if i.isdigit() and int(i) < counts[sha256])
    return done


class _Split:
    """Which chunks the device has, and which are to be sent, in order."""

    def __init__(self, chunks: list[Chunk], there: frozenset[Chunk]) -> None:
        self.there = there
        self.todo = [chunk for chunk in chunks if chunk not in there]


class _Pass:
    """One go over all chunks: lanes that carry them, and a command on the device that hashes what arrives."""

    def __init__(
        self,
        shell: DeviceShell,
        blobs: tuple[Blob, ...],
        chunks: list[Chunk],
        note: Callable[[int], None],
        pacer: Pacer,
    ) -> None:
        self._shell, self._blobs, self._chunks, self._note = shell, blobs, chunks, note
        self._pacer = pacer
        self.split = _Split([], frozenset())
        self.lane_count = 0

    def run(self, channels: int, split: Callable[[], _Split]) -> tuple[Blob, ...]:
        """Send what `split` says, asked while lanes are being opened already; blobs whose copy is wrong."""
        try:
            return self._run(min(channels, -(-_bytes(self._chunks) // WINDOW_BYTES)), split)
        except NoChannelError:  # of few channels, the lanes took those that the commands need
            return self._run(0, split)

    def _run(self, early: int, split: Callable[[], _Split]) -> tuple[Blob, ...]:
        """The same, with so many lanes that are opened beside the commands; one after them if none was."""
        with contextlib.ExitStack() as stack, ThreadPoolExecutor(early + 1, "sftp") as pool:
            splitting = pool.submit(split)
            opening = [pool.submit(_open_lane, self._shell.connection, stack, 0.0) for _ in range(early)]
            names = (blob.sha256 for blob in self._blobs)
            hashing = stack.enter_context(self._shell.fed("blob_stream", str(CHUNK_MIB), *names))
            self.split = splitting.result()
            lanes = _opened(opening)
            if self.split.todo and not lanes:
                lanes = [_open_lane(self._shell.connection, stack)]
            self.lane_count = len(lanes)
            self._note(_bytes(self.split.there))
            arrivals: queue.SimpleQueue[Chunk | None] = queue.SimpleQueue()
            for chunk in self.split.there:
                arrivals.put(chunk)
            announced = pool.submit(_announce, hashing, self._blobs, arrivals)
            try:
                sender = Sender(self._shell, lanes, self._note, arrivals.put, self._pacer)
                sender.send(self.split.todo)
            finally:
                arrivals.put(None)
            announced.result()
            output = self._shell.output_of("blob_stream", hashing, HASH_TIMEOUT_S)
        bad = {line.split()[1] for line in output.splitlines() if line.startswith("bad ")}
        return tuple(blob for blob in self._blobs if blob.sha256 in bad)


def _open_lane(
    connection: Connection, stack: contextlib.ExitStack, patience_s: float = CLOSING_S
) -> SftpLane:
    return stack.enter_context(connection.sftp_lane(patience_s))


def _opened(opening: list[Future[SftpLane]]) -> list[SftpLane]:
    """The lanes that the server opened; it may refuse some (MaxSessions)."""
    lanes = []
    for future in opening:
        with contextlib.suppress(NoChannelError):
            lanes.append(future.result())
    return lanes


def _announce(hashing: Running, blobs: tuple[Blob, ...], arrivals: queue.SimpleQueue[Chunk | None]) -> None:
    """Tell the device of chunks in their order as they arrive; None is the last arrival."""
    arrived: set[tuple[str, int]] = set()
    for blob in blobs:
        for index in range(chunk_count(blob)):
            while (blob.sha256, index) not in arrived:
                chunk = arrivals.get()
                if chunk is None:  # the sender failed and says why
                    return
                arrived.add((chunk.blob.sha256, chunk.index))
            hashing.feed(f"{index}\n".encode())
        hashing.feed(b"end\n")


def _wrong_chunks(shell: DeviceShell, blob: Blob) -> list[Chunk]:
    indices = [str(index) for index in range(chunk_count(blob))]
    output = shell.do("chunk_hashes", blob.sha256, str(CHUNK_MIB), *indices, timeout_s=HASH_TIMEOUT_S)
    remote = dict(line.split() for line in output.splitlines())
    wrong = []
    with open(blob.source, "rb") as source:
        for index in range(chunk_count(blob)):
            if hashlib.sha256(source.read(CHUNK_BYTES)).hexdigest() != remote.get(str(index)):
                wrong.append(Chunk(blob, index))
    return wrong


def _bytes(chunks: Iterable[Chunk]) -> int:
    return sum(chunk.size for chunk in chunks)
