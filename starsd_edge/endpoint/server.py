"""The socket and the loop around the application."""

from __future__ import annotations

import asyncio
import ipaddress
import math
import socket
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import uvicorn

from starsd_edge.defaults import DRAIN_S
from starsd_edge.endpoint.accepting import Acceptor, max_connections
from starsd_edge.endpoint.app import Endpoint, create_app
from starsd_edge.endpoint.connection import Connection
from starsd_edge.errors import ConfigError, ResourceError

__all__ = ["Tls", "check_exposure", "check_tls", "make_server", "open_socket", "serve"]

BACKLOG = 64
FAREWELL_S = 2  # then, to tell those without an answer; a supervisor waits 5 s longer than the drain


@dataclass(frozen=True, slots=True)
class Tls:
    """Files of a certificate chain and its key, PEM."""

    certificate: Path
    key: Path


def check_exposure(host: str, api_key: str, tls: Tls | None) -> None:
    """Raises ConfigError for an address that others reach, without an API key or without encryption."""
    if _is_loopback(host):
        return
    wanted = [
        *(["an API key (--api-key-file, or STARSD_API_KEY)"] if not api_key else []),
        *(["a certificate (--tls-cert and --tls-key)"] if tls is None else []),
    ]
    if wanted:
        raise ConfigError(
            f"{host} can be reached from other machines: give {' and '.join(wanted)}, or stay on 127.0.0.1 "
            "and come in through ssh -L"
        )


def check_tls(tls: Tls) -> None:
    """Raises ConfigError that names the file when certificate or key cannot be used."""
    for path in (tls.certificate, tls.key):
        try:
            with path.open("rb"):
                pass
        except OSError as error:
            raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    try:
        # A passphrase would be asked for at every start, on a terminal that may not be there.
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(tls.certificate, tls.key, lambda: b"")
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{tls.certificate} and {tls.key} are no certificate chain and its key without a passphrase, "
            f"both PEM: {error}"
        ) from error


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


def serve(
    endpoint: Endpoint,
    listener: socket.socket,
    tls: Tls | None,
    on_listening: Callable[[], None],
    drain_s: float = DRAIN_S,
) -> None:
    """Answer requests until SIGINT or SIGTERM; then let running answers end, for `drain_s` at most. Who
    has no whole answer by then is told so. A second SIGINT ends at once.

    `on_listening` is called when clients are served, and signals heeded.
    """
    make_server(endpoint, tls, drain_s, on_listening=on_listening).run(sockets=[listener])


class _Server(uvicorn.Server):
    """uvicorn's, with its connections counted from the first moment on, and a last word to its clients."""

    def __init__(
        self,
        config: uvicorn.Config,
        endpoint: Endpoint,
        drain_s: float,
        most: int,
        on_listening: Callable[[], None],
    ) -> None:
        super().__init__(config)
        self._endpoint = endpoint
        self._drain_s = drain_s
        self._most = most
        self._on_listening = on_listening

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        assert sockets is not None
        await self.lifespan.startup()
        acceptors = [
            Acceptor(listener, self.config.ssl, self.server_state, self._connection, self._most)
            for listener in sockets
        ]
        for acceptor in acceptors:
            acceptor.start(BACKLOG)
        self.servers = acceptors  # type: ignore[assignment]  # closed and waited for, no more
        self.started = True
        self._on_listening()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        end = asyncio.get_running_loop().call_later(self._drain_s, self._endpoint.stop)
        try:
            await super().shutdown(sockets)
        finally:
            end.cancel()

    def _connection(self, refusal: str) -> Connection:
        return Connection(self.config, self.server_state, self.lifespan.state, refusal)


def make_server(
    endpoint: Endpoint,
    tls: Tls | None = None,
    drain_s: float = DRAIN_S,
    most: int | None = None,
    on_listening: Callable[[], None] = lambda: None,
) -> uvicorn.Server:
    """A server that can also be run in a thread, and stopped with `should_exit`.

    most  connections that are served at a time; by default what the process may open, within reason
    """
    return _Server(
        uvicorn.Config(
            create_app(endpoint),
            http=Connection,
            log_level="warning",
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=math.ceil(drain_s) + FAREWELL_S,
            lifespan="off",
            ssl_certfile=tls.certificate if tls else None,
            ssl_keyfile=tls.key if tls else None,
        ),
        endpoint,
        drain_s,
        max_connections() if most is None else most,
        on_listening,
    )


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
