"""The device's readings, kept fresh by one thread: tegrastats where it is installed, /proc and /sys
otherwise.

    board = BoardTelemetry()       # starts the thread
    board.latest()                 # BoardReading, or None before the first one
    board.joules()                 # used since the start, None where the board reports no power
    board.close()

Needs no root. What tegrastats does not print (the GPU's load on Thor) is filled in from /sys, what neither
knows stays None. When tegrastats dies or falls silent, /sys takes over.
"""

from __future__ import annotations

import os
import selectors
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from starsd_edge.board import Board, BoardSources, parse_dpkg_versions, read_board
from starsd_edge.protocol.telemetry import BoardReading
from starsd_jetson.board.power import EnergyMeter, total_power
from starsd_jetson.board.sysfs import Sysfs
from starsd_jetson.board.tegrastats import Tegrastats, parse_tegrastats

__all__ = ["BoardTelemetry", "find_board", "reading_of"]

INTERVAL_S = 0.5  # fine enough for the energy of one answer
SILENCE_S = 5.0  # after so long without a line tegrastats is given up
COMMAND_TIMEOUT_S = 5.0  # for nvpmodel and dpkg-query
IDENTITY_EVERY_S = 60.0  # the power mode can be changed while we run
DEVICE_TREE = "sys/firmware/devicetree/base"  # what /proc/device-tree points to
PACKAGES = ("nvidia-l4t-core", "nvidia-jetpack", "nvidia-jetpack-runtime")


class BoardTelemetry:
    """Readings of this device. `root` and `tegrastats` are for trying it on a recorded device.

    root        where /proc, /sys and /etc are found
    tegrastats  command whose lines are read; None: the one on PATH if there is one
    """

    def __init__(
        self,
        *,
        root: Path = Path("/"),
        tegrastats: Sequence[str] | None = None,
        interval_s: float = INTERVAL_S,
    ) -> None:
        self._root = root
        self._command = list(tegrastats) if tegrastats else _tegrastats_command(interval_s)
        self._interval_s = interval_s
        self._sysfs = Sysfs(root)
        self._meter = EnergyMeter()
        self._has_power = False
        self._closed = False
        self._latest: BoardReading | None = None
        self._changed = threading.Condition()
        self._stop_read, self._stop_write = os.pipe()
        self._thread = threading.Thread(target=self._run, name="board-telemetry", daemon=True)
        self._thread.start()

    def latest(self) -> BoardReading | None:
        """The newest reading; None before the first."""
        with self._changed:
            return self._latest

    def wait(self, until: Callable[[BoardReading], bool], timeout_s: float) -> BoardReading | None:
        """The first reading for which `until` holds; None when there was none in time."""
        with self._changed:
            met = self._changed.wait_for(
                lambda: self._latest is not None and until(self._latest), timeout=timeout_s
            )
            return self._latest if met else None

    def joules(self) -> float | None:
        """Energy since the start, up to now; None where the board reports no power."""
        with self._changed:
            return self._meter.at(time.monotonic()) if self._has_power else None

    def close(self) -> None:
        """Stop the thread and its tegrastats."""
        if self._closed:
            return
        self._closed = True
        os.write(self._stop_write, b"x")
        self._thread.join()
        os.close(self._stop_read)
        os.close(self._stop_write)

    def _run(self) -> None:
        stopped = self._follow_tegrastats() if self._command else False
        identity, read_at = Board(), float("-inf")
        while not stopped:
            if time.monotonic() - read_at >= IDENTITY_EVERY_S:
                identity, read_at = find_board(self._root), time.monotonic()
            self._publish(_with_identity(self._sysfs.read(), identity, self._root))
            stopped = self._wait(self._interval_s)

    def _follow_tegrastats(self) -> bool:
        """Publish its lines until it ends or falls silent (False), or until `close` (True)."""
        environment = {**os.environ, "LC_ALL": "C"}
        try:
            process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=environment,
            )
        except OSError:
            return False
        assert process.stdout is not None
        identity, read_at = find_board(self._root), time.monotonic()
        pending = b""
        try:
            with selectors.DefaultSelector() as selector:
                selector.register(self._stop_read, selectors.EVENT_READ)
                selector.register(process.stdout, selectors.EVENT_READ)
                while True:
                    ready = [key.fd for key, _ in selector.select(SILENCE_S)]
                    if self._stop_read in ready:
                        return True
                    chunk = os.read(process.stdout.fileno(), 65536) if ready else b""
                    if not chunk:
                        return False
                    *lines, pending = (pending + chunk).split(b"\n")
                    if time.monotonic() - read_at >= IDENTITY_EVERY_S:
                        identity, read_at = find_board(self._root), time.monotonic()
                    for line in lines[-1:]:
                        self._take(line.decode("utf-8", "replace"), identity)
        finally:
            process.kill()
            process.stdout.close()
            process.wait()

    def _take(self, line: str, identity: Board) -> None:
        try:
            stats = parse_tegrastats(line)
        except ValueError:
            return  # a warning on stdout, or the rest of a line that was cut
        reading = _filled(reading_of(stats), self._sysfs.read())
        self._publish(_with_identity(reading, identity, self._root))

    def _publish(self, reading: BoardReading) -> None:
        with self._changed:
            self._latest = reading
            self._has_power = self._has_power or reading.power_w is not None
            self._meter.add(time.monotonic(), reading.power_w)
            self._changed.notify_all()

    def _wait(self, seconds: float) -> bool:
        with selectors.DefaultSelector() as selector:
            selector.register(self._stop_read, selectors.EVENT_READ)
            return bool(selector.select(seconds))


def reading_of(stats: Tegrastats) -> BoardReading:
    """A reading from one line of tegrastats."""
    rails_w = {name: rail.now_mw / 1000 for name, rail in stats.rails.items()}
    total = total_power(rails_w)
    bus = stats.engines.get("EMC")
    return BoardReading(
        source=f"tegrastats ({stats.dialect.value})",
        ram_used_bytes=stats.ram.used_bytes if stats.ram else None,
        ram_total_bytes=stats.ram.total_bytes if stats.ram else None,
        swap_used_bytes=stats.swap.used_bytes if stats.swap else None,
        swap_total_bytes=stats.swap.total_bytes if stats.swap else None,
        cpu_loads=[core.load for core in stats.cores],
        cpu_mhz=[core.mhz for core in stats.cores],
        gpu_load=stats.gpu_load,
        gpu_mhz=stats.gpu_mhz,
        memory_bus_load=bus.load if bus else None,
        temperatures_c=stats.temperatures_c,
        rails_w=rails_w,
        power_w=total.watts if total else None,
        power_rails=list(total.rails) if total else [],
        other={name[:80]: value[:80] for name, value in stats.other.items()},
    )


def find_board(root: Path = Path("/")) -> Board:
    """Which board this is; all fields empty on anything that says nothing."""
    return read_board(
        BoardSources(
            tegra_release=_text(root / "etc/nv_tegra_release"),
            model=_text(root / DEVICE_TREE / "model"),
            compatible=_text(root / DEVICE_TREE / "compatible"),
            nvpmodel=_output(["nvpmodel", "-q"], root),
            dpkg_versions=parse_dpkg_versions(
                _output(["dpkg-query", "-W", "-f", "${Package} ${Version}\\n", *PACKAGES], root)
            ),
        )
    )


def _tegrastats_command(interval_s: float) -> list[str]:
    program = shutil.which("tegrastats")
    return [program, "--interval", str(round(interval_s * 1000))] if program else []


def _filled(reading: BoardReading, more: BoardReading) -> BoardReading:
    """What `reading` does not say, from `more`."""
    gaps = {
        name: getattr(more, name)
        for name in reading.__struct_fields__
        if getattr(reading, name) in (None, [], {}, "")
    }
    return msgspec.structs.replace(reading, **gaps)


def _with_identity(reading: BoardReading, board: Board, root: Path) -> BoardReading:
    return msgspec.structs.replace(
        reading,
        model=(board.model or _text(root / "sys/class/dmi/id/product_name"))[:80],
        l4t=board.l4t,
        jetpack=board.jetpack or board.jetpack_line,
        power_mode=board.power_mode,
    )


def _text(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8", "replace").strip("\n")
    except OSError:
        return ""


def _output(command: list[str], root: Path) -> str:
    """What a program of this device prints; "" where it is missing, fails or hangs, or another root is
    read."""
    program = shutil.which(command[0]) if root == Path("/") else str(root / "usr/sbin" / command[0])
    try:
        return subprocess.run(
            [program or command[0], *command[1:]],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=COMMAND_TIMEOUT_S,
            check=False,
            text=True,
            errors="replace",
        ).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""
