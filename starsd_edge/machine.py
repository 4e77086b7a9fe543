"""Which machine, and which versions, a figure was measured with."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from pathlib import Path

__all__ = ["cpu_name", "describe_machine", "software_versions"]

CPU_INFO = Path("/proc/cpuinfo")
BOARD_NAME = Path("/proc/device-tree/model")  # on boards whose /proc/cpuinfo names no processor

# Distributions whose version can move a figure; those that are not installed are left out.
MEASURED_WITH = (
    "starsd-edge",
    "numpy",
    "torch",
    "onnxruntime",
    "onnxruntime-gpu",
    "tensorrt",
    "transformers",
    "llama-cpp-python",
    "pyzmq",
    "paramiko",
)


def cpu_name() -> str:
    """The processor, or the board that it sits on, for people; the architecture where neither is told."""
    for line in _text(CPU_INFO).splitlines():
        label, _, value = line.partition(":")
        if label.strip() == "model name" and value.strip():
            return value.strip()
    return _text(BOARD_NAME).rstrip("\0\n") or platform.processor() or platform.machine()


def software_versions() -> dict[str, str]:
    """Distribution -> version of what is installed of MEASURED_WITH."""
    found = {}
    for name in MEASURED_WITH:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:  # not installed, or run from its sources
            continue
    return found


def describe_machine() -> dict[str, object]:
    """What a reader of a figure must know of the machine; `cores` are those this process may use."""
    return {
        "cpu": cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
        "system": platform.platform(),
        "python": platform.python_version(),
        "versions": software_versions(),
    }


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
