"""What watching costs: the real monitor on a terminal of its own, fed by a made-up service over a socket.

The devices are made up, and the snapshots as large as real ones: every stage of every device has times that
wander, so that every line of the table changes with every snapshot.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import random
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import zmq

from starsd_edge.errors import ResourceError
from starsd_edge.latency import Histogram
from starsd_edge.monitor.publish import SnapshotPublisher
from starsd_edge.protocol.telemetry import (
    DeviceSnapshot,
    EngineSnapshot,
    Mode,
    ServiceSnapshot,
    SessionSnapshot,
    SessionState,
    Stage,
    Work,
)

__all__ = ["MonitorCost", "bench_monitor"]

PUBLISH_EVERY_S = 0.5
ROUNDS_A_SNAPSHOT = 6  # of a device: twelve a second
TYPICAL_S = {
    Stage.LINK: 0.004,
    Stage.QUEUE: 0.001,
    Stage.DRAFT: 0.006,
    Stage.VERIFY: 0.045,
    Stage.SAMPLE: 0.0004,
}
TREE_NODES = 16
START_PATIENCE_S = 120.0
SETTLE_S = 3.0  # the first windows fill, the interpreter has loaded what it needs


@dataclass(frozen=True, slots=True)
class MonitorCost:
    """Of one monitor while it shows `devices` devices on a terminal of `columns` x `lines`.

    cpu_share             of one core: CPU time of the monitor's process over the time watched
    link_bytes_per_s      snapshots it received
    terminal_bytes_per_s  what it wrote to its terminal
    publish_ms            CPU time the service's side spends on one snapshot
    """

    devices: int
    columns: int
    lines: int
    seconds: float
    cpu_share: float
    link_bytes_per_s: float
    terminal_bytes_per_s: float
    publish_ms: float


def bench_monitor(devices: int, columns: int, lines: int, seconds: float) -> MonitorCost:
    """Run the monitor and watch it for `seconds`. Raises ResourceError when it shows nothing."""
    fleet = Fleet(devices)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    publisher = SnapshotPublisher(context, "tcp://127.0.0.1:*")
    try:
        with watching(publisher.endpoint, columns, lines) as monitor:
            started_s = time.monotonic()
            while b"edge-0" not in monitor.written:
                if time.monotonic() - started_s > START_PATIENCE_S or monitor.process.poll() is not None:
                    raise ResourceError("the monitor shows nothing: does `starsd monitor` run here?")
                serve(fleet, publisher, monitor, PUBLISH_EVERY_S)
            serve(fleet, publisher, monitor, SETTLE_S)
            monitor.written.clear()
            cpu_s, start_s = cpu_seconds(monitor.process.pid), time.monotonic()
            sent = serve(fleet, publisher, monitor, seconds)
            watched_s = time.monotonic() - start_s
            return MonitorCost(
                devices,
                columns,
                lines,
                watched_s,
                (cpu_seconds(monitor.process.pid) - cpu_s) / watched_s,
                sent.num_bytes / watched_s,
                len(monitor.written) / watched_s,
                1e3 * sent.cpu_s / sent.snapshots,
            )
    finally:
        publisher.close()
        context.term()


class Fleet:
    """Devices that all draft, with times that wander."""

    def __init__(self, devices: int) -> None:
        self._random = random.Random(1)  # noqa: S311  # made-up times, no secrets
        self._works = [Work() for _ in range(devices)]
        self._sequence = 0

    def snapshot(self) -> ServiceSnapshot:
        """The next one, PUBLISH_EVERY_S later by the service's clock."""
        self._sequence += 1
        uptime_s = self._sequence * PUBLISH_EVERY_S
        return ServiceSnapshot(
            "bench",
            self._sequence,
            uptime_s,
            service="bench",
            engine=EngineSnapshot(busy_s=0.4 * uptime_s, demand_s=0.5 * uptime_s, steps=self._sequence * 50),
            devices=[self._device(number, work, uptime_s) for number, work in enumerate(self._works)],
        )

    def _device(self, number: int, work: Work, uptime_s: float) -> DeviceSnapshot:
        for _ in range(ROUNDS_A_SNAPSHOT):
            accepted = self._random.randint(0, 4)
            work.num_drafts += 1
            work.draft_tokens += TREE_NODES - 1
            work.accepted_tokens += accepted
            work.tokens += accepted + 1
            work.tree_nodes.add(TREE_NODES)
            for stage, typical_s in TYPICAL_S.items():
                times = work.stages.setdefault(stage, Histogram())
                times.add(typical_s * self._random.lognormvariate(0.0, 0.3))
        work.bytes_up += ROUNDS_A_SNAPSHOT * 1400
        work.bytes_down += ROUNDS_A_SNAPSHOT * 180
        session = SessionSnapshot(
            f"{number:016x}", "head", SessionState.VERIFYING, Mode.DRAFTING, work=work, age_s=uptime_s
        )
        return DeviceSnapshot(
            f"edge-{number:02d}",
            "aaaa-bbbb-cccc",
            f"192.168.1.{number + 1}",
            connected=True,
            quiet_s=0.1,
            jitter_s=0.0005,
            plain_tokens_per_s=20.0,
            work=work,
            sessions=[session],
        )


@dataclass(slots=True)
class Sent:
    """What the service's side did."""

    snapshots: int = 0
    num_bytes: int = 0
    cpu_s: float = 0.0


def serve(fleet: Fleet, publisher: SnapshotPublisher, monitor: Monitor, seconds: float) -> Sent:
    """Publish on the beat for so long, and take what the monitor writes."""
    sent, due_s = Sent(), time.monotonic()
    end_s = due_s + seconds
    while due_s < end_s:
        snapshot = fleet.snapshot()
        before_s = time.process_time()
        sent.num_bytes += publisher.publish(snapshot)
        sent.cpu_s += time.process_time() - before_s
        sent.snapshots += 1
        due_s += PUBLISH_EVERY_S
        while (left_s := due_s - time.monotonic()) > 0:
            monitor.read(left_s)
    return sent


class Monitor:
    """A monitor on a terminal; `written` is what came from it."""

    def __init__(self, process: subprocess.Popen[bytes], terminal: int) -> None:
        self.process, self._terminal = process, terminal
        self.written = bytearray()

    def read(self, timeout_s: float) -> None:
        """Take what it writes within `timeout_s`, the first of it."""
        if not select.select([self._terminal], [], [], timeout_s)[0]:
            return
        try:
            self.written += os.read(self._terminal, 1 << 16)
        except OSError:  # how Linux says that the other end is closed
            time.sleep(timeout_s)


@contextlib.contextmanager
def watching(endpoint: str, columns: int, lines: int) -> Iterator[Monitor]:
    """`starsd monitor ENDPOINT` on a terminal of that size."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
    process = subprocess.Popen(
        [sys.executable, "-m", "starsd_edge", "monitor", endpoint],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env={**os.environ, "TERM": "xterm-256color", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        start_new_session=True,
    )
    os.close(theirs)
    try:
        yield Monitor(process, ours)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        os.close(ours)
        process.wait()


def cpu_seconds(pid: int) -> float:
    """CPU time of a process so far, all threads, to the nanosecond (Linux)."""
    tasks = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(task.read_text().split()[0]) for task in tasks) / 1e9
