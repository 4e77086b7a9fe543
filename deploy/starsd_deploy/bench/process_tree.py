"""CPU time of this process and all that it started, from /proc (proc(5))."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

__all__ = ["tree_cpu_s"]


def tree_cpu_s() -> float:
    """User and system seconds of this process and its descendants, those that ended included."""
    parents: dict[int, int] = {}
    ticks: dict[int, int] = {}
    for file in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has just ended; its parent counts it then
            # after the name, which may hold anything: state, parent, ...; utime, stime and those of children
            fields = file.read_text().rpartition(")")[2].split()
            pid = int(file.parent.name)
            parents[pid], ticks[pid] = int(fields[1]), sum(map(int, fields[11:15]))
    family, found = {os.getpid()}, 0
    while len(family) > found:
        found = len(family)
        family |= {pid for pid, parent in parents.items() if parent in family}
    return sum(ticks[pid] for pid in family) / os.sysconf("SC_CLK_TCK")
