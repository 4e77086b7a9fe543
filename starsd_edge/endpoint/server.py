"""The socket and the loop around the application."""

from __future__ import annotations

import ipaddress
import socket

import uvicorn

from starsd_edge.endpoint.app import Endpoint, create_app
from starsd_edge.errors import ConfigError, ResourceError

__all__ = ["check_exposure", "open_socket", "serve"]

BACKLOG = 64
DRAIN_S = 10  # for answers under way when the server is told to stop


def check_exposure(host: str, api_key: str) -> None:
    """Raises ConfigError for an address that others reach, without an API key."""
    if not api_key and not _is_loopback(host):
        raise ConfigError(
            f"{host} can be reached from other machines: set an API key (--api-key-file, or STARSD_API_KEY), "
            "or stay on 127.0.0.1"
        )


def open_socket(host: str, port: int) -> socket.socket:
    """A bound socket that does not listen yet. Raises ResourceError when the port is taken."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
    except socket.gaierror as error:
        raise ConfigError(f"{host} is no address of this machine: {error.strerror}") from error
    opened = socket.socket(family, socket.SOCK_STREAM)
    opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        opened.bind((host, port))
    except OSError as error:
        opened.close()
        raise ResourceError(f"cannot use {host}:{port} ({error.strerror}): choose another --port") from error
    return opened


def serve(endpoint: Endpoint, listener: socket.socket) -> None:
    """Answer requests until SIGINT or SIGTERM; then let running answers end."""
    make_server(endpoint).run(sockets=[listener])


def make_server(endpoint: Endpoint) -> uvicorn.Server:
    """A server that can also be run in a thread, and stopped with `should_exit`."""
    return uvicorn.Server(
        uvicorn.Config(
            create_app(endpoint),
            backlog=BACKLOG,
            log_level="warning",
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=DRAIN_S,
            lifespan="off",
        )
    )


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
