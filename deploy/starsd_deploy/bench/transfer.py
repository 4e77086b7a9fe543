"""`starsd bench transfer`: our upload beside OpenSSH's own sftp, same file, same server, same round trip.

A private sshd on loopback behind a proxy that delays every byte. Methods take turns, so that what else the
machine does hits all of them alike. Ours includes what sftp leaves out: the journal, the hash on the device
and the rename. Both ends and the link share this machine's cores: where they use nearly all of them, the
machine is what limits.
"""

from __future__ import annotations

import os
import secrets
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import click
import msgspec

from starsd_deploy.bench.delay_proxy import DelayProxy
from starsd_deploy.bench.private_sshd import PrivateSshd
from starsd_deploy.bench.process_tree import tree_cpu_s
from starsd_deploy.blobs import Blob, hash_file
from starsd_deploy.lease import Lease, this_holder
from starsd_deploy.ssh import Connection, connect
from starsd_deploy.ssh_config import Hop, Route
from starsd_deploy.transfer import CHANNELS, MOST_CHANNELS, send_blobs
from starsd_edge.bench.report import json_option, write_json
from starsd_edge.errors import DeployError
from starsd_edge.machine import cpu_name
from starsd_edge.ranges import FiniteRange

__all__ = ["command"]

MEGA = 1_000_000
SFTP = "OpenSSH sftp put"
OURS = "starsd, {channels} channels"
ONE = "starsd, 1 channel"


class Row(msgspec.Struct, frozen=True):
    """One method at one round trip. Megabytes a second: median and all runs.

    cores_used   CPU seconds a second of both ends and the link, mean over the runs
    """

    rtt_ms: float
    method: str
    mb_per_s: float
    runs_mb_per_s: tuple[float, ...]
    cores_used: float


class _Run(msgspec.Struct, frozen=True):
    """One upload; and, with what is around it (lease, clearing up), its wall clock and the CPU of all."""

    taken_s: float
    wall_s: float
    cpu_s: float


@click.command()
@click.option("--size-mb", type=click.IntRange(1), default=256, show_default=True)
@click.option("--rtt-ms", type=FiniteRange(0), multiple=True, default=(0.0, 20.0, 100.0), show_default=True)
@click.option("--repeat", type=click.IntRange(1), default=3, show_default=True)
@click.option("--channels", type=click.IntRange(1, MOST_CHANNELS), default=CHANNELS, show_default=True)
@json_option
def command(
    size_mb: int, rtt_ms: tuple[float, ...], repeat: int, channels: int, json_file: Path | None
) -> None:
    """Upload speed to a device, ours and OpenSSH's, at several round trips."""
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="starsd-bench-") as name:
        folder = Path(name)
        source = folder / "content"
        source.write_bytes(secrets.token_bytes(size_mb * MEGA))
        with PrivateSshd(folder) as server:
            for rtt in rtt_ms:
                with DelayProxy(server.port, rtt / 2000) as proxy:
                    rows += _measure(server, proxy.port, source, rtt, repeat, channels)
    click.echo(f"{size_mb} MB over loopback with a delay; {os.cpu_count()} cores of {cpu_name()}")
    click.echo(f"{'RTT ms':>8}  {'method':<24}{'MB/s':>8}{'cores used':>12}")
    for row in rows:
        click.echo(f"{row.rtt_ms:>8g}  {row.method:<24}{row.mb_per_s:>8.1f}{row.cores_used:>12.2f}")
    ratios = {rtt: _ratio(rows, rtt, channels) for rtt in rtt_ms}
    for rtt, ratio in ratios.items():
        click.echo(f"at {rtt:g} ms: {ratio:.2f} times OpenSSH's sftp")
    ratio_to_sftp = {f"{rtt:g}": ratio for rtt, ratio in ratios.items()}
    write_json(
        json_file, {"size_mb": size_mb, "rows": msgspec.to_builtins(rows), "ratio_to_sftp": ratio_to_sftp}
    )


def _measure(
    server: PrivateSshd, port: int, source: Path, rtt_ms: float, repeat: int, channels: int
) -> list[Row]:
    blob = Blob(sha256=hash_file(source), size=source.stat().st_size, source=str(source))
    methods: dict[str, Callable[[], float]] = {
        SFTP: lambda: _sftp(server, port, source),
        ONE: lambda: _starsd(server, port, blob, 1),
        OURS.format(channels=channels): lambda: _starsd(server, port, blob, channels),
    }
    runs: dict[str, list[_Run]] = {method: [] for method in methods}
    for _ in range(repeat):
        for method, run in methods.items():
            begun_s, before_s = time.monotonic(), tree_cpu_s()
            taken_s = run()
            cpu_s = tree_cpu_s() - before_s
            runs[method].append(_Run(taken_s, time.monotonic() - begun_s, cpu_s))
    return [_row(rtt_ms, method, blob.size / MEGA, of_method) for method, of_method in runs.items()]


def _row(rtt_ms: float, method: str, size_mb: float, runs: list[_Run]) -> Row:
    times = [run.taken_s for run in runs]
    return Row(
        rtt_ms=rtt_ms,
        method=method,
        mb_per_s=size_mb / statistics.median(times),
        runs_mb_per_s=tuple(round(size_mb / one, 2) for one in times),
        cores_used=round(sum(run.cpu_s for run in runs) / sum(run.wall_s for run in runs), 2),
    )


def _ratio(rows: list[Row], rtt_ms: float, channels: int) -> float:
    speed = {row.method: row.mb_per_s for row in rows if row.rtt_ms == rtt_ms}
    return speed[OURS.format(channels=channels)] / speed[SFTP]


def _sftp(server: PrivateSshd, port: int, source: Path) -> float:
    """Seconds from log-in to the end, as for ours."""
    target = server.folder / "by-sftp"
    options = {
        "IdentityFile": server.folder / "id_ed25519",
        "UserKnownHostsFile": server.folder / "known_hosts",
        "StrictHostKeyChecking": "accept-new",
        "BatchMode": "yes",
        "Port": port,
    }
    words = [word for key, value in options.items() for word in ("-o", f"{key}={value}")]
    command = ["sftp", "-q", *words, "-b", "-", f"{server.user}@127.0.0.1"]
    begun_s = time.monotonic()
    done = subprocess.run(
        command, input=f"put {source} {target}\n".encode(), capture_output=True, check=False
    )
    taken_s = time.monotonic() - begun_s
    if done.returncode:
        raise DeployError(f"sftp failed: {done.stderr.decode(errors='replace').strip()}")
    target.unlink()
    return taken_s


def _starsd(server: PrivateSshd, port: int, blob: Blob, channels: int) -> float:
    root = server.folder / "device"
    begun_s = time.monotonic()
    with _log_in(server, port) as connection:
        opened_s = time.monotonic() - begun_s
        with Lease(connection, str(root), this_holder("bench")) as shell:
            shell.do("prepare")
            begun_s = time.monotonic()
            send_blobs(shell, (blob,), channels=channels)
            taken_s = time.monotonic() - begun_s
            (root / "blobs" / blob.sha256).unlink()
    return opened_s + taken_s


def _log_in(server: PrivateSshd, port: int) -> Connection:
    hop = Hop(
        alias="bench",
        host="127.0.0.1",
        port=port,
        user=server.user,
        identities=(str(server.folder / "id_ed25519"),),
        identities_only=True,
        agent_socket="",
        known_hosts=(str(server.folder / "known_hosts"),),
        host_key_name="127.0.0.1",
    )
    return connect(Route((hop,)))
