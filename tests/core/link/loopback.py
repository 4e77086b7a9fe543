"""A draft service over real sockets whose drafts are always right: what the link's tests talk to."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable

import zmq

from starsd_edge.link.keys import KeyPair
from starsd_edge.link.sockets import make_context, service_socket
from starsd_edge.link.zap import Authenticator
from starsd_edge.protocol.codec import decode
from starsd_edge.protocol.messages import ErrorCode, WireError
from starsd_edge.protocol.server_connection import refusal
from starsd_edge.protocol.session_table import SessionTable
from tests.core.protocol.pair import Service, offer


class LoopbackService:
    """Runs on a thread. `trusted` maps public keys to devices; None serves plain text on loopback."""

    def __init__(
        self,
        key: KeyPair | None = None,
        trusted: Callable[[str], str | None] | None = None,
        *,
        port: int = 0,
        boot_id: int = 1,
        table: SessionTable | None = None,
    ) -> None:
        self.core = Service(SessionTable(offer(boot_id)) if table is None else table)
        self.hang = threading.Event()
        self.refuse: tuple[ErrorCode, str] | None = None  # the error that answers the next message
        self._boot_id = boot_id
        self._stop = threading.Event()
        self._context = make_context()
        self._authenticator = None
        if trusted is not None:
            self._authenticator = Authenticator(self._context, trusted)
            self._authenticator.start()
        self._socket = service_socket(self._context, key)
        if port:
            self._socket.bind(f"tcp://127.0.0.1:{port}")
            self.port = port
        else:
            self.port = self._socket.bind_to_random_port("tcp://127.0.0.1")
        self.address = f"tcp://127.0.0.1:{self.port}"
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.is_set():
            if self._socket.poll(20) and not self.hang.is_set():
                self._serve(*self._socket.recv_multipart())
        self._socket.close(0)

    def _serve(self, peer: bytes, *frames: bytes) -> None:
        try:
            if self.refuse is not None:
                (code, text), self.refuse = self.refuse, None
                raise WireError(code, text, decode(frames).head)
            replies = self.core.receive(list(frames), 0.0) if decode(frames) else []
        except WireError as error:
            replies = [refusal(error, self._boot_id)]
        for reply in replies:
            with contextlib.suppress(zmq.ZMQError):  # the peer has left: it will ask again
                self._socket.send_multipart([peer, *reply], zmq.NOBLOCK)

    def stop(self) -> None:
        """As a kill would: nobody is told."""
        self._stop.set()
        self._thread.join(5)
        if self._authenticator is not None:
            self._authenticator.stop()
        self._context.destroy(linger=0)
