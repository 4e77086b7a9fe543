"""Who is on the other end of the gateway's socket, and who may be."""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import zmq

from starsd_edge.errors import ResourceError
from starsd_edge.link.keys import KeyPair
from starsd_edge.link.sockets import ZAP_DOMAIN, SyncSocket, check_private, service_socket
from starsd_edge.link.trust import TrustStore
from starsd_edge.link.zap import Authenticator, FullError, Knock, check_stranger_is_refused
from starsd_edge.monitor.publish import SnapshotPublisher
from starsd_edge.protocol.messages import Hello
from starsd_edge.protocol.telemetry import RefusedPeer
from starsd_server.config import ServiceConfig
from starsd_server.connections import Connections
from starsd_server.refusals import Refusals

__all__ = ["REFRESH_S", "Farewell", "KeyedPeers", "LocalPeers", "Peers", "open_peers"]

log = logging.getLogger("starsd.gateway")

REFRESH_S = 0.25  # a revoked key is noticed well within a second
MAX_ROUTES = 4096  # connections remembered; the one unused for longest is forgotten first
UNNAMED = "local"
SERVICE_KEY, TRUSTED = "service.key", "trusted"  # in the keys folder


@dataclass(frozen=True, slots=True)
class Farewell:
    """A device that was trusted and is not, or not with the keys it came with, and its connections."""

    device: str
    keys: set[str]  # Z85, those that are trusted no more
    routes: list[bytes]


class Peers(Protocol):
    """Decides which device a connection belongs to."""

    def open_socket(self) -> SyncSocket:
        """The ROUTER, not bound yet."""
        ...

    def open_publisher(self, endpoint: str) -> SnapshotPublisher: ...

    def device_of(self, route: bytes, frame: zmq.Frame) -> str | None:
        """The device that sent `frame`; None when it may not speak (any more)."""
        ...

    def greeted(self, route: bytes, hello: Hello, device: str) -> str:
        """The name of the device from here on, after its HELLO."""
        ...

    def may_hear(self, route: bytes) -> bool:
        """Whether a reply may still go there."""
        ...

    def refresh(self) -> list[Farewell]:
        """Look whether somebody was trusted or revoked; whoever was revoked must be told. Called every
        REFRESH_S. Raises ResourceError when nobody decides any more who is let in."""
        ...

    def fingerprint(self, device: str) -> str: ...

    def refused(self) -> list[RefusedPeer]: ...

    def close(self) -> None:
        """End what is of its own. The socket is closed before."""
        ...


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

    def greeted(self, route: bytes, hello: Hello, device: str) -> str:
        name = hello.body.device or UNNAMED
        remember(self._names, route, name)
        return name

    def may_hear(self, route: bytes) -> bool:
        return True

    def refresh(self) -> list[Farewell]:
        return []

    def fingerprint(self, device: str) -> str:
        return ""

    def refused(self) -> list[RefusedPeer]:
        return []

    def close(self) -> None:
        pass


def remember(routes: OrderedDict[bytes, str], route: bytes, value: str) -> None:
    routes[route] = value
    routes.move_to_end(route)
    if len(routes) > MAX_ROUTES:
        routes.popitem(last=False)


class KeyedPeers:
    """Devices by their CURVE keys. Trust is asked for with every message and every reply, not only at the
    handshake; whoever loses it is told, spoken to no more, and their sessions end.

    Raises ConfigError when the service's key is missing, AuthenticationError when the self-test lets a
    stranger in: then nothing is opened.
    """

    def __init__(self, context: zmq.Context[SyncSocket], folder: Path) -> None:
        self._context = context
        self._own = KeyPair.load(folder / SERVICE_KEY)
        self._trust = TrustStore(folder / TRUSTED)
        self._refusals = Refusals()
        self._stranger = KeyPair.generate("stranger")  # the self-test's
        self._connections = Connections()
        self._zap = Authenticator(context, self._find, self._on_knock, self._connections.look)
        self._zap.start()
        self._keys: OrderedDict[bytes, str] = OrderedDict()  # of each connection
        self._looked = self._trust.changes
        self._devices = self._names_now()

    def open_socket(self) -> SyncSocket:
        socket = service_socket(self._context, self._own)
        self._connections.watch(socket)
        check_stranger_is_refused(self._context, socket, self._own.key.public, self._stranger)
        return socket

    def open_publisher(self, endpoint: str) -> SnapshotPublisher:
        secret = self._own.secret.encode()
        return SnapshotPublisher(
            self._context,
            endpoint,
            secret_key=secret,
            zap_domain=ZAP_DOMAIN,
            watch=self._connections.watch,
        )

    def device_of(self, route: bytes, frame: zmq.Frame) -> str | None:
        public = str(frame.get("User-Id"))
        device = self._name_of(public, self._trust.device_of)
        if device is not None:
            if route not in self._keys:
                self._connections.spoke(frame.get(zmq.SRCFD), public)
            remember(self._keys, route, public)
        return device

    def greeted(self, route: bytes, hello: Hello, device: str) -> str:
        return device  # what the key says, whatever the message does

    def may_hear(self, route: bytes) -> bool:
        return route in self._keys

    def refresh(self) -> list[Farewell]:
        if not self._zap.alive():
            raise ResourceError("the thread that decides who is let in has ended")
        self._refusals.look(time.monotonic())
        self._trust.refresh()
        if self._looked == self._trust.changes:
            return []
        self._looked = self._trust.changes
        before, self._devices = self._devices, self._names_now()
        log.info("trusted devices changed: %s", ", ".join(sorted(set(self._devices.values()))) or "none")
        gone = {public: name for public, name in before.items() if self._devices.get(public) != name}
        farewells = {name: Farewell(name, set(), []) for name in gone.values()}
        for public, name in gone.items():
            farewells[name].keys.add(public)
        for route, public in list(self._keys.items()):
            if public in gone:
                farewells[gone[public]].routes.append(route)
                del self._keys[route]
        return list(farewells.values())

    def _find(self, public: str) -> str | None:
        device = self._name_of(public, self._trust.find)
        if device is not None and not self._connections.admit(public):
            raise FullError(f"{device} has as many connections as it may")
        return device

    def _name_of(self, public: str, look_up: Callable[[str], str | None]) -> str | None:
        """Whoever holds the service's own key could be the service: it watches and tries itself with it."""
        return self._own.key.name if public == self._own.key.public else look_up(public)

    def _names_now(self) -> dict[str, str]:
        """Device names by public key, those under rotation twice."""
        keys = self._trust.devices()
        return {key.previous: key.name for key in keys if key.previous} | {
            key.public: key.name for key in keys
        }

    def fingerprint(self, device: str) -> str:
        return next((key.fingerprint for key in self._trust.devices() if key.name == device), "")

    def refused(self) -> list[RefusedPeer]:
        return self._refusals.peers(time.monotonic())

    def close(self) -> None:
        self._zap.stop()
        self._connections.close()

    def _on_knock(self, knock: Knock) -> None:
        """On the ZAP thread."""
        if knock.device is None and knock.public != self._stranger.key.public:
            self._refusals.note(knock, time.monotonic())
