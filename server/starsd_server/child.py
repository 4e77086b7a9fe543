"""How the service and its two processes speak: JSON lines on standard input and output.

Down: the configuration, then commands; the end of input means that the service is gone, and the child goes,
too, so that no kill leaves one behind. Up: ready, failed, or a fact. Logs go to standard error.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from typing import Any, TypeVar

import msgspec

from starsd_edge.errors import StarSDError
from starsd_server.sparing import Sparing

__all__ = [
    "DRAIN",
    "GROUP_SIGNALS",
    "Report",
    "read_command",
    "read_config",
    "set_log_level",
    "tell",
    "tell_failed",
    "tell_ready",
]

DRAIN = "drain"
# What a terminal and systemd send to every process of a group; which is told to stop, is the service.
GROUP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
COMMAND_BYTES = 4096  # commands are one word

C = TypeVar("C")


class Report(msgspec.Struct):
    """A line from a child: what happened, and details."""

    event: str  # "ready", "failed"
    error: str = ""  # failed: the class in starsd_edge.errors
    text: str = ""
    facts: dict[str, Any] = {}


def read_config(kind: type[C]) -> C:
    """The first line of input; also prepares the process: when to leave is the service's business."""
    for number in GROUP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, GROUP_SIGNALS)
    logging.basicConfig(
        level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(name)s: %(message)s", datefmt="%H:%M:%S"
    )
    for handler in logging.getLogger().handlers:
        handler.addFilter(Sparing())
    line = b""
    while not line.endswith(b"\n"):
        # One byte at a time: what follows the line belongs to `read_command`, which polls.
        byte = os.read(sys.stdin.fileno(), 1)
        if not byte:
            sys.exit(0)
        line += byte
    return msgspec.json.decode(line, type=kind)


def set_log_level(level: str) -> None:
    logging.getLogger("starsd").setLevel(level.upper())


def read_command() -> str | None:
    """The newest command when input is readable; None at its end."""
    data = os.read(sys.stdin.fileno(), COMMAND_BYTES)
    return data.decode().split("\n")[-2] if data else None


def tell(report: Report) -> None:
    sys.stdout.write(msgspec.json.encode(report).decode() + "\n")
    sys.stdout.flush()


def tell_ready(**facts: Any) -> None:
    tell(Report("ready", facts=facts))


def tell_failed(error: StarSDError) -> None:
    tell(Report("failed", type(error).__name__, str(error)))
