"""ZeroMQ endpoints, as far as the monitor must understand them."""

from __future__ import annotations

from dataclasses import dataclass

from starsd_edge.errors import UsageError

__all__ = ["TcpAddress", "tcp_address"]


@dataclass(frozen=True, slots=True)
class TcpAddress:
    """Host and port of a tcp:// endpoint."""

    host: str
    port: int


def tcp_address(endpoint: str) -> TcpAddress | None:
    """Host and port of a tcp endpoint; None for the others. Raises UsageError when the port is no number."""
    scheme, _, rest = endpoint.partition("://")
    if scheme != "tcp":
        return None
    host, _, port = rest.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise UsageError(f"{endpoint} names no host and port; an example is tcp://workstation:7731")
    return TcpAddress(host.strip("[]"), int(port))
