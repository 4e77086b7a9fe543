"""Ports for tests that must know theirs before anything listens."""

from __future__ import annotations

import socket

__all__ = ["free_port"]


def free_port() -> int:
    """One of 127.0.0.1 that nobody listened on just now."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])
