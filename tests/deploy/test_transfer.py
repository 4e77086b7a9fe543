"""Content arrives whole, is never sent twice, and goes on after every kind of cut. Against a real sshd."""

from __future__ import annotations

import hashlib
import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from starsd_deploy.blobs import CHUNK_BYTES, Blob
from starsd_deploy.device import DeviceShell
from starsd_deploy.lease import Holder, Lease
from starsd_deploy.ssh import Connection
from starsd_deploy.transfer import send_blobs
from starsd_edge.errors import DeployError, StarSDError, UnreachableError
from tests.deploy.loopback import LoopbackDevice


@pytest.fixture
def connection(board: LoopbackDevice) -> Iterator[Connection]:
    with board.connect() as connection:
        yield connection


@pytest.fixture
def shell(board: LoopbackDevice, connection: Connection) -> Iterator[DeviceShell]:
    with Lease(connection, str(board.root), Holder("test", "sending")) as shell:
        shell.do("prepare")
        yield shell


def make_blob(folder: Path, size: int, seed: int = 0) -> Blob:
    content = random.Random(seed).randbytes(size)
    path = folder / f"file-{size}-{seed}"
    path.write_bytes(content)
    return Blob(hashlib.sha256(content).hexdigest(), size, str(path))


def arrived(board: LoopbackDevice, blob: Blob) -> bool:
    return (board.root / "blobs" / blob.sha256).read_bytes() == Path(blob.source).read_bytes()


@pytest.mark.parametrize("size", [0, 1, 32 * 1024, CHUNK_BYTES, CHUNK_BYTES * 5 + 12345])
def test_sizes_around_every_border(
    shell: DeviceShell, board: LoopbackDevice, tmp_path: Path, size: int
) -> None:
    blob = make_blob(tmp_path, size)
    seen: list[int] = []
    report = send_blobs(shell, (blob,), progress=seen.append)
    assert (report.sent_bytes, report.resumed_bytes, report.repaired_bytes) == (size, 0, 0)
    assert sum(seen) == size
    assert arrived(board, blob)
    assert not list((board.root / "parts").iterdir())


def test_many_small_files_share_the_channels(
    shell: DeviceShell, board: LoopbackDevice, tmp_path: Path
) -> None:
    blobs = tuple(make_blob(tmp_path, 1000 + seed, seed) for seed in range(30))
    assert send_blobs(shell, blobs).sent_bytes == sum(blob.size for blob in blobs)
    assert all(arrived(board, blob) for blob in blobs)


def cut_after(connection: Connection, count: int) -> Callable[[int], None]:
    """A progress callback that pulls the plug once `count` bytes are on their way."""
    lock, total = threading.Lock(), [0]

    def note(sent: int) -> None:
        with lock:
            total[0] += sent
            if total[0] >= count:
                connection.close()

    return note


def test_cut_connection_resumes_at_the_journal(board: LoopbackDevice, tmp_path: Path) -> None:
    blob = make_blob(tmp_path, CHUNK_BYTES * 12)
    with board.connect() as first:
        shell = DeviceShell(first, str(board.root), "first")
        shell.do("lease_take", "{}")
        shell.do("prepare")
        with pytest.raises(UnreachableError):
            send_blobs(shell, (blob,), progress=cut_after(first, CHUNK_BYTES * 8))
    with board.connect() as second:
        second.run(f"rm {board.root}/lease/beat")  # the lease's time is over
        with Lease(second, str(board.root), Holder("test", "second")) as shell:
            report = send_blobs(shell, (blob,))
    # at most the chunks in flight are sent again
    assert report.resumed_bytes >= CHUNK_BYTES * 3
    assert report.sent_bytes + report.resumed_bytes == blob.size
    assert arrived(board, blob)


def test_pages_lost_in_a_power_cut_are_found_and_sent_again(
    shell: DeviceShell, board: LoopbackDevice, tmp_path: Path
) -> None:
    """The journal claims every chunk, the disk holds zeros in one of them: a file system may do that."""
    blob = make_blob(tmp_path, CHUNK_BYTES * 3 + 7)
    content = bytearray(Path(blob.source).read_bytes())
    content[CHUNK_BYTES : CHUNK_BYTES + 4096] = bytes(4096)
    (board.root / "parts" / f"{blob.sha256}.part").write_bytes(content)
    (board.root / "parts" / f"{blob.sha256}.journal").write_text("0\n1\n2\n3\n")
    report = send_blobs(shell, (blob,))
    assert (report.sent_bytes, report.repaired_bytes) == (CHUNK_BYTES, CHUNK_BYTES)
    assert arrived(board, blob)


def test_half_a_journal_line_is_not_believed(
    shell: DeviceShell, board: LoopbackDevice, tmp_path: Path
) -> None:
    blob = make_blob(tmp_path, CHUNK_BYTES * 12)
    (board.root / "parts" / f"{blob.sha256}.part").write_bytes(bytes(blob.size))
    (board.root / "parts" / f"{blob.sha256}.journal").write_text("x\n99\n1")
    assert send_blobs(shell, (blob,)).resumed_bytes == 0
    assert arrived(board, blob)


def test_part_of_another_size_is_started_again(
    shell: DeviceShell, board: LoopbackDevice, tmp_path: Path
) -> None:
    blob = make_blob(tmp_path, 5000)
    (board.root / "parts" / f"{blob.sha256}.part").write_bytes(b"short")
    (board.root / "parts" / f"{blob.sha256}.journal").write_text("0\n")
    assert send_blobs(shell, (blob,)).resumed_bytes == 0
    assert arrived(board, blob)


def test_source_that_changed_is_named_and_nothing_goes_live(
    shell: DeviceShell, board: LoopbackDevice, tmp_path: Path
) -> None:
    blob = make_blob(tmp_path, 5000)
    Path(blob.source).write_bytes(bytes(5000))
    with pytest.raises(DeployError, match=r"file-5000-0 does not match its hash"):
        send_blobs(shell, (blob,))
    assert not list((board.root / "blobs").iterdir())


def test_source_that_shrank_is_named(shell: DeviceShell, tmp_path: Path) -> None:
    blob = make_blob(tmp_path, 5000)
    Path(blob.source).write_bytes(b"")
    with pytest.raises(DeployError, match="became shorter"):
        send_blobs(shell, (blob,))


def test_full_disk_is_the_devices_error(board: LoopbackDevice, shell: DeviceShell, tmp_path: Path) -> None:
    (board.root / "parts").rmdir()
    (board.root / "parts").write_text("not a folder")
    with pytest.raises(StarSDError, match="board"):
        send_blobs(shell, (make_blob(tmp_path, 5000),))


@pytest.mark.parametrize(("max_sessions", "expected"), [(2, {1}), (4, {1, 2, 3}), (10, {6})])
def test_server_that_opens_few_channels_is_served_with_them(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], max_sessions: int, expected: set[int]
) -> None:
    """Two are the least: one that hashes, one that writes. Nothing of it is told, by paramiko neither."""
    board = LoopbackDevice(tmp_path / "board", max_sessions=max_sessions)
    try:
        with board.connect() as connection:
            with Lease(connection, str(board.root), Holder("test", "sending")) as shell:
                shell.do("prepare")
                blob = make_blob(tmp_path, CHUNK_BYTES * 4)
                report = send_blobs(shell, (blob,))
            assert report.channels in expected
            assert capfd.readouterr().err == ""
            assert arrived(board, blob)
    finally:
        board.close()


def test_server_that_opens_one_channel_only_is_told_what_it_lacks(tmp_path: Path) -> None:
    board = LoopbackDevice(tmp_path / "board", max_sessions=1)
    try:
        with (
            board.connect() as connection,
            Lease(connection, str(board.root), Holder("test", "sending")) as shell,
        ):
            shell.do("prepare")
            with pytest.raises(DeployError, match="MaxSessions"):
                send_blobs(shell, (make_blob(tmp_path, 5000),))
    finally:
        board.close()
