"""Connections are counted when they are accepted: before TLS's handshake, which a silent one never ends."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
import socket
import ssl
import sys
from collections.abc import Callable

from uvicorn.server import ServerState

from starsd_edge.endpoint.connection import Connection
from starsd_edge.endpoint.places import Places, party

__all__ = ["MAX_CONNECTIONS", "Acceptor", "connections_within", "max_connections"]

MAX_CONNECTIONS = 256  # the queue takes far fewer requests; a system's usual bound is 1,024 open files
RESERVED_FILES = 128  # model, libraries, link to a draft service, boards' gauges, log
HANDSHAKE_TIMEOUT_S = 10.0  # as long as the head of a request
GOODBYE_TIMEOUT_S = 5.0  # for a client's end of TLS
RETRY_S = 1.0  # after an accept that found no file free
WARN_EVERY_S = 60.0

log = logging.getLogger(__name__)


def connections_within(max_files: int) -> int:
    """How many connections a process that may open `max_files` serves at a time.

    As many again are open for a moment, to be told that there is no room.
    """
    return max(1, min(MAX_CONNECTIONS, (max_files - RESERVED_FILES) // 2))


def max_connections() -> int:
    """How many connections this process serves at a time."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MAX_CONNECTIONS if soft == resource.RLIM_INFINITY else connections_within(soft)


class Acceptor:
    """Takes connections from `listener`, from `start` to `close`; uvicorn's shutdown sees an asyncio.Server.

    make  a protocol for a new connection, given why it is refused ("" when it is not)
    most  connections that are served at a time; where they are all taken, an address with many of them loses
          one that nothing is asked on to an address with fewer
    """

    def __init__(
        self,
        listener: socket.socket,
        tls: ssl.SSLContext | None,
        state: ServerState,
        make: Callable[[str], Connection],
        most: int,
    ) -> None:
        self._listener = listener
        self._tls = tls
        self._state = state
        self._make = make
        self._places: Places[Connection] = Places(most)
        self._coming: dict[Connection, asyncio.Task[None]] = {}
        self._retry: asyncio.TimerHandle | None = None
        self._warned_s = -WARN_EVERY_S
        self._loop = asyncio.get_running_loop()

    def start(self, backlog: int) -> None:
        self._listener.setblocking(False)
        self._listener.listen(backlog)
        self._listen()

    def close(self) -> None:
        """Take no more, and hang up on those whose handshake has not ended."""
        self._loop.remove_reader(self._listener)
        if self._retry is not None:
            self._retry.cancel()
        for task in self._coming.values():
            task.cancel()

    async def wait_closed(self) -> None:
        await asyncio.gather(*self._coming.values(), return_exceptions=True)

    def _listen(self) -> None:
        self._loop.add_reader(self._listener, self._accept)

    def _accept(self) -> None:
        try:
            client, address = self._listener.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return
        except OSError as error:
            self._pause(error)
            return
        alive = self._state.connections | self._coming.keys()
        most = self._places.most
        if len(alive) >= 2 * most:
            client.close()  # those that are told why take a place for a moment, too
            return
        self._places.keep(alive)
        who = party(address[0])
        if self._places.is_full and (one := self._places.who_yields(who, self._waits)) is not None:
            self._hang_up(one)
        refusal = f"all {most} connections of this server are in use" if self._places.is_full else ""
        connection = self._make(refusal)
        if not refusal:
            self._places.take(connection, who)
        task = self._loop.create_task(self._open(client, connection))
        self._coming[connection] = task
        task.add_done_callback(lambda _: self._coming.pop(connection))

    def _waits(self, connection: Connection) -> bool:
        return connection.waits if connection in self._state.connections else True  # for TLS's handshake

    def _hang_up(self, connection: Connection) -> None:
        self._places.leave(connection)
        if connection in self._state.connections:
            connection.hang_up()
        else:
            self._coming[connection].cancel()

    async def _open(self, client: socket.socket, connection: Connection) -> None:
        timeouts: dict[str, float] = {}
        if self._tls is not None:
            timeouts["ssl_handshake_timeout"] = HANDSHAKE_TIMEOUT_S
            if sys.version_info >= (3, 11):
                timeouts["ssl_shutdown_timeout"] = GOODBYE_TIMEOUT_S
        with contextlib.suppress(OSError):  # it went away, spoke no TLS or said nothing: no fault of ours
            await self._loop.connect_accepted_socket(lambda: connection, client, ssl=self._tls, **timeouts)

    def _pause(self, error: OSError) -> None:
        """The system has no file or memory for one more; the listener stays ready, and would spin."""
        self._loop.remove_reader(self._listener)
        self._retry = self._loop.call_later(RETRY_S, self._listen)
        if self._loop.time() - self._warned_s >= WARN_EVERY_S:
            self._warned_s = self._loop.time()
            log.warning("cannot take a connection for now: %s", error.strerror)
