"""Who is let in: the ZAP handler (ZeroMQ RFC 27) of the service's context.

A handshake is answered by asking a function for the device that holds the public key. Whatever goes wrong
answers "no" and the handler lives on: one that has died leaves every later device waiting for ever.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass

import zmq
from zmq.utils import z85

from starsd_edge.errors import AuthenticationError, LinkError
from starsd_edge.link.diagnose import FULL_STATUS
from starsd_edge.link.keys import KeyPair, fingerprint
from starsd_edge.link.sockets import ZAP_DOMAIN, EdgeKeys, SyncSocket, edge_socket, monitor_event

__all__ = ["IPV4_IN_IPV6", "Authenticator", "FullError", "Knock", "check_stranger_is_refused"]

log = logging.getLogger(__name__)

ZAP_ADDRESS = "inproc://zeromq.zap.01"  # fixed by the RFC: one handler per context
ZAP_VERSION = b"1.0"
IPV4_IN_IPV6 = "::ffff:"  # how a socket for both tells an IPv4 address
ZAP_REQUEST_FRAMES = 7  # version, request id, domain, address, routing id, mechanism, one credential
REFUSED_STATUS = 400
POLL_MS = 200
JOIN_S = 2.0
SELF_TEST_MS = 3_000


class FullError(LinkError):
    """Raised by whoever is asked for a device: it is known, and has as many connections as it may."""


@dataclass(frozen=True, slots=True)
class Knock:
    """Somebody who asked to come in."""

    public: str  # Z85, or "" when no CURVE key came
    address: str
    device: str | None  # None: not let in
    reason: str
    status: int = REFUSED_STATUS  # where not let in

    @property
    def fingerprint(self) -> str:
        return fingerprint(self.public) if self.public else ""


class Authenticator:
    """Answers ZAP requests on a thread of its own. Start it before the socket is bound.

    `device_of` gives the device of a Z85 key or None, or raises FullError. `on_knock` hears of every
    decision. `look` is called a few times a second. All are called on that thread, and may raise: that is
    logged, and refuses the peer.
    """

    def __init__(
        self,
        context: zmq.Context[SyncSocket],
        device_of: Callable[[str], str | None],
        on_knock: Callable[[Knock], None] = lambda knock: None,
        look: Callable[[], None] = lambda: None,
    ) -> None:
        self._device_of = device_of
        self._on_knock = on_knock
        self._look = look
        self._stop = threading.Event()
        self._socket = context.socket(zmq.REP)
        self._socket.linger = 0
        self._socket.bind(ZAP_ADDRESS)
        self._thread = threading.Thread(target=self._run, name="starsd-zap", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def alive(self) -> bool:
        """For the watchdog of whoever runs it."""
        return self._thread.is_alive()

    def stop(self) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(JOIN_S)

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                if self._socket.poll(POLL_MS):
                    self._serve(self._socket.recv_multipart())
                else:
                    self._look_around()
        except zmq.ContextTerminated:
            pass
        finally:
            self._socket.close(0)

    def _look_around(self) -> None:
        try:
            self._look()
        except zmq.ContextTerminated:
            raise
        except Exception:
            log.exception("looking after the connections failed")

    def _serve(self, request: list[bytes]) -> None:
        """One request, one reply, whatever happens in between."""
        request_id = request[1] if len(request) > 1 else b""
        try:
            knock = self._decide(request)
            self._on_knock(knock)
        except Exception:
            log.exception("a peer is refused because deciding on it failed")
            knock = Knock("", "", None, "internal error")
        if knock.device is None:
            status = str(knock.status).encode()
            reply = [ZAP_VERSION, request_id, status, knock.reason.encode("ascii", "replace"), b"", b""]
        else:
            reply = [ZAP_VERSION, request_id, b"200", b"OK", knock.public.encode(), b""]
        self._socket.send_multipart(reply)

    def _decide(self, request: list[bytes]) -> Knock:
        if len(request) != ZAP_REQUEST_FRAMES:
            return Knock("", "", None, "no CURVE key")
        version, _, domain, address, _, mechanism, credential = request
        where = address.decode("ascii", "replace").removeprefix(IPV4_IN_IPV6)
        if (version, domain, mechanism) != (ZAP_VERSION, ZAP_DOMAIN, b"CURVE") or len(credential) != 32:
            return Knock("", where, None, "no CURVE key")
        public = z85.encode(credential).decode()
        try:
            device = self._device_of(public)
        except FullError as error:
            return Knock(public, where, None, str(error), FULL_STATUS)
        return Knock(public, where, device, "" if device else "unknown key")


def check_stranger_is_refused(
    context: zmq.Context[SyncSocket], service: SyncSocket, server_public: str, stranger: KeyPair
) -> None:
    """Knock as `stranger`, whom nobody knows, before the service opens: `service` is bound to a passing
    loopback port.

    Raises AuthenticationError when the stranger gets in, LinkError when the handshake does not end at all.
    """
    port = service.bind_to_random_port("tcp://127.0.0.1")
    endpoint = f"tcp://127.0.0.1:{port}"
    peer = edge_socket(context, EdgeKeys(stranger, server_public))
    peer.reconnect_ivl = -1
    monitor = peer.get_monitor_socket(
        zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    )
    try:
        peer.connect(endpoint)
        event = monitor_event(monitor.recv_multipart())[0] if monitor.poll(SELF_TEST_MS) else None
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            raise AuthenticationError(
                "the self-test of the draft service failed: a stranger's key was accepted; it does not open"
            )
        if event != zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            raise LinkError("the self-test of the draft service failed: nobody decides who is let in (ZAP)")
    finally:
        peer.disable_monitor()
        monitor.close(0)
        peer.close(0)
        service.unbind(endpoint)
