"""Addresses of draft services as people write them: HOST, HOST:PORT, tcp://HOST:PORT, ipc://PATH."""

from __future__ import annotations

from starsd_edge.defaults import DRAFT_PORT
from starsd_edge.errors import UsageError

__all__ = [
    "MONITOR_PORT",
    "bind_address",
    "draft_address",
    "is_port",
    "monitor_address",
    "monitor_of",
]

MONITOR_PORT = DRAFT_PORT + 1  # `starsd draft serve` publishes at the port after its own
LAST_PORT = 65535
LOCAL = ("ipc://", "inproc://")


def draft_address(text: str) -> str:
    """Where a service drafts, as ZeroMQ takes it. Raises UsageError."""
    return endpoint(text, DRAFT_PORT)


def monitor_address(text: str) -> str:
    """Where a service publishes what `starsd monitor` shows. Raises UsageError."""
    return endpoint(text, MONITOR_PORT)


def monitor_of(address: str) -> str:
    """Where the service that drafts at `address` publishes. Raises UsageError."""
    host, _, port = draft_address(address).rpartition(":")
    if not port.isdigit() or int(port) == LAST_PORT:
        raise UsageError(f"{address} does not tell where its monitor is: give HOST:PORT of that")
    return f"{host}:{int(port) + 1}"


def bind_address(text: str, port: int = DRAFT_PORT) -> str:
    """Where a service takes connections; port 0 is any free one. Raises UsageError."""
    return endpoint(text, port, first_port=0)


def endpoint(text: str, port: int, first_port: int = 1) -> str:
    """`text` with what was left out; `port` is the one of a service that was not told another.

    Ports are bounded here, because libzmq takes 99999 for 34463.
    """
    if text.startswith(LOCAL):
        return text
    rest = text.removeprefix("tcp://")
    if rest.count(":") > 1 and "[" not in rest:
        rest = f"[{rest}]"  # IPv6 without its brackets
    host, named = rest, str(port)
    if ":" in rest.rpartition("]")[2]:
        host, _, named = rest.rpartition(":")
    if not host.strip("[]") or "/" in host or not is_port(named, first_port):
        raise UsageError(
            f"{text!r} is no address of a draft service: HOST, HOST:PORT or tcp://HOST:PORT, "
            f"port {first_port} to {LAST_PORT}"
        )
    return f"tcp://{host}:{named}"


def is_port(text: str, first: int) -> bool:
    """Whether `text` is a port from `first` on."""
    # Figures of ASCII: others are digits to Python and none to a socket.
    return text.isascii() and text.isdigit() and first <= int(text[:6]) <= LAST_PORT
