"""What the benchmark's processes took of this machine, and whether they got it when they wanted it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = ["MachineUse", "machine_use", "resident_mib"]

PROC = Path("/proc")


@dataclass(frozen=True, slots=True)
class MachineUse:
    """Of some processes, since they started; index by index.

    cpu_s   processor time
    wait_s  the longest that one of a process's threads stood in line for a processor; 0 where the system does
            not tell
    """

    cpu_s: tuple[float, ...]
    wait_s: tuple[float, ...]

    def since(self, earlier: MachineUse) -> MachineUse:
        return MachineUse(
            tuple(now - then for now, then in zip(self.cpu_s, earlier.cpu_s, strict=True)),
            tuple(now - then for now, then in zip(self.wait_s, earlier.wait_s, strict=True)),
        )


def machine_use(pids: Sequence[int]) -> MachineUse:
    """How it stands with the processes `pids`. Raises OSError when one is gone."""
    ticks = os.sysconf("SC_CLK_TCK")
    cpu_s = []
    for pid in pids:
        fields = (PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
        cpu_s.append((int(fields[11]) + int(fields[12])) / ticks)  # utime, stime
    return MachineUse(tuple(cpu_s), tuple(max(map(_wait_s, _threads(pid))) for pid in pids))


def _threads(pid: int) -> list[Path]:
    return list((PROC / str(pid) / "task").iterdir())


def _wait_s(thread: Path) -> float:
    try:
        return int((thread / "schedstat").read_text().split()[1]) / 1e9
    except (OSError, IndexError):  # it has ended, or the system keeps no such counts
        return 0.0


def resident_mib(pid: int | None = None) -> float:
    """Anonymous memory of a process, this one by default: what is mapped from files can be dropped."""
    for line in (PROC / str(pid or os.getpid()) / "status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) / 1024
    raise OSError("this system does not tell a process's memory")
