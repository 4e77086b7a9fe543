"""Addresses of draft services as people write them: HOST, HOST:PORT, tcp://HOST:PORT, ipc://PATH."""

from __future__ import annotations

from starsd_edge.errors import UsageError

__all__ = ["DRAFT_PORT", "MONITOR_PORT", "draft_address", "monitor_address", "monitor_of"]

DRAFT_PORT = 7731
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


def endpoint(text: str, port: int) -> str:
    """`text` with what was left out; `port` is the one of a service that was not told another."""
    if text.startswith(LOCAL):
        return text
    rest = text.removeprefix("tcp://")
    if rest.count(":") > 1 and "[" not in rest:
        rest = f"[{rest}]"  # IPv6 without its brackets
    host, named = rest, str(port)
    if ":" in rest.rpartition("]")[2]:
        host, _, named = rest.rpartition(":")
    if not host.strip("[]") or "/" in host or not named.isdigit() or not 0 < int(named) <= LAST_PORT:
        raise UsageError(f"{text!r} is no address of a draft service: HOST, HOST:PORT or tcp://HOST:PORT")
    return f"tcp://{host}:{named}"
