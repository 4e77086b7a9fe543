"""Who is on the other end of the gateway's socket, and who may be."""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from pathlib import Path
from typing import Protocol

import zmq

from starsd_edge.link.keys import KeyPair, fingerprint
from starsd_edge.link.sockets import ZAP_DOMAIN, SyncSocket, check_private, service_socket
from starsd_edge.link.trust import TrustStore
from starsd_edge.link.zap import Authenticator, Knock, check_stranger_is_refused
from starsd_edge.monitor.publish import SnapshotPublisher
from starsd_edge.protocol.messages import Hello, Message
from starsd_edge.protocol.telemetry import RefusedPeer
from starsd_server.config import ServiceConfig

__all__ = ["KeyedPeers", "LocalPeers", "Peers", "open_peers"]

log = logging.getLogger("starsd.gateway")

MAX_ROUTES = 4096  # connections remembered; the one unused for longest is forgotten first
MAX_REFUSED = 32  # strangers remembered, the latest
UNNAMED = "local"
SERVICE_KEY, TRUSTED = "service.key", "trusted"  # in the keys folder


class Peers(Protocol):
    """Decides which device a connection belongs to."""

    def open_socket(self) -> SyncSocket:
        """The ROUTER, not bound yet."""
        ...

    def open_publisher(self, endpoint: str) -> SnapshotPublisher: ...

    def device_of(self, route: bytes, frame: zmq.Frame) -> str | None:
        """The device that sent `frame`; None when it may not speak (any more)."""
        ...

    def noticed(self, route: bytes, message: Message) -> None:
        """A valid message came from `route`."""
        ...

    def refresh(self) -> None:
        """Look whether somebody was trusted or revoked; called twice a second."""
        ...

    def fingerprint(self, device: str) -> str: ...

    def refused(self) -> list[RefusedPeer]: ...


def open_peers(context: zmq.Context[SyncSocket], config: ServiceConfig) -> Peers:
    """Raises ConfigError for endpoints without keys that others than this machine could reach."""
    for endpoint in filter(None, (config.bind, config.monitor)):
        check_private(endpoint, has_key=bool(config.keys))
    return KeyedPeers(context, Path(config.keys)) if config.keys else LocalPeers(context)


class LocalPeers:
    """On this machine, without keys: whoever can reach the socket is trusted, and believed when HELLO gives a
    name."""

    def __init__(self, context: zmq.Context[SyncSocket]) -> None:
        self._context = context
        self._names: OrderedDict[bytes, str] = OrderedDict()

    def open_socket(self) -> SyncSocket:
        return service_socket(self._context, None)

    def open_publisher(self, endpoint: str) -> SnapshotPublisher:
        return SnapshotPublisher(self._context, endpoint)

    def device_of(self, route: bytes, frame: zmq.Frame) -> str | None:
        return self._names.get(route, UNNAMED)

    def noticed(self, route: bytes, message: Message) -> None:
        if isinstance(message, Hello):
            self._names[route] = message.body.device or UNNAMED
            self._names.move_to_end(route)
            if len(self._names) > MAX_ROUTES:
                self._names.popitem(last=False)

    def refresh(self) -> None:
        pass

    def fingerprint(self, device: str) -> str:
        return ""

    def refused(self) -> list[RefusedPeer]:
        return []


class KeyedPeers:
    """Devices by their CURVE keys. A key that is no longer trusted is noticed at its next message.

    Raises ConfigError when the service's key is missing, AuthenticationError when the self-test lets a
    stranger in: then nothing is opened.
    """

    def __init__(self, context: zmq.Context[SyncSocket], folder: Path) -> None:
        self._context = context
        self._own = KeyPair.load(folder / SERVICE_KEY)
        self._trust = TrustStore(folder / TRUSTED)
        self._refused: OrderedDict[str, RefusedPeer] = OrderedDict()
        self._refused_at: dict[str, float] = {}
        self._zap = Authenticator(context, self._trust.device_of, self._on_knock)
        self._zap.start()

    def open_socket(self) -> SyncSocket:
        socket = service_socket(self._context, self._own)
        check_stranger_is_refused(self._context, socket, self._own.key.public)
        self._refused.clear()  # the self-test's own stranger
        return socket

    def open_publisher(self, endpoint: str) -> SnapshotPublisher:
        secret = self._own.secret.encode()
        return SnapshotPublisher(self._context, endpoint, secret_key=secret, zap_domain=ZAP_DOMAIN)

    def device_of(self, route: bytes, frame: zmq.Frame) -> str | None:
        public = frame.get("User-Id")
        return self._trust.device_of(str(public))

    def noticed(self, route: bytes, message: Message) -> None:
        pass

    def refresh(self) -> None:
        if self._trust.refresh():
            log.info(
                "trusted devices changed: %s", ", ".join(k.name for k in self._trust.devices()) or "none"
            )

    def fingerprint(self, device: str) -> str:
        return next((key.fingerprint for key in self._trust.devices() if key.name == device), "")

    def refused(self) -> list[RefusedPeer]:
        now_s = time.monotonic()
        for name, peer in list(self._refused.items()):
            peer.quiet_s = now_s - self._refused_at.get(name, now_s)
        return list(self._refused.values())

    def _on_knock(self, knock: Knock) -> None:
        """On the ZAP thread."""
        if knock.device is not None:
            return
        name = fingerprint(knock.public) if knock.public else "no key"
        peer = self._refused.setdefault(name, RefusedPeer(name, knock.address, knock.reason))
        peer.times += 1
        self._refused_at[name] = time.monotonic()
        self._refused.move_to_end(name)
        while len(self._refused) > MAX_REFUSED:
            self._refused.popitem(last=False)
        if peer.times == 1:
            log.warning("refused %s from %s: %s", name, knock.address, knock.reason)
