"""The process that owns the socket: it lets in, decodes, checks and passes on, and holds nothing else.

A peer, even an authenticated one, can make a ZeroMQ ROUTER process grow or die. So this one is small: its
memory is capped, it is restarted at once when it goes, and no session notices more than a lost message.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import resource
import select
import sys
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path

import zmq

from starsd_edge.errors import RemoteProtocolError, ResourceError, StarSDError, UsageError
from starsd_edge.link.sockets import is_readable, make_context, receive_now, seed_libc, send_now
from starsd_edge.link.zap import IPV4_IN_IPV6
from starsd_edge.protocol.codec import Buffer, decode, encode, kind_of
from starsd_edge.protocol.messages import (
    Busy,
    BusyReason,
    Error,
    ErrorCode,
    Head,
    Hello,
    Message,
    MessageKind,
    WireError,
)
from starsd_edge.protocol.telemetry import GatewaySnapshot, decode_snapshot
from starsd_server import child
from starsd_server.config import ServiceConfig
from starsd_server.ipc import (
    DeviceLink,
    GatewayState,
    pack_from_edge,
    pack_revoked,
    pack_state,
    unpack_in_gateway,
)
from starsd_server.local_stream import READ, WRITE, AwayError, FullError, GatewayEnd
from starsd_server.peers import REFRESH_S, Farewell, open_peers

__all__ = ["main"]

log = logging.getLogger("starsd.gateway")

STATE_S = 0.5
WORDS_S = 10.0  # between two accounts of what was dropped
LAST_REPLIES_MS = 200
MESSAGES_AT_ONCE = 16  # from one side before the other is looked at
RETRY_STARTING_MS = 500  # the engine process is back within seconds
# A worker that takes nothing for so long hangs, whatever its engine does; then edges are told, one and all.
WORKER_PATIENCE_S = 2.0
MAX_ADDRESSES = 1024  # devices whose counters are kept


class Gateway:
    """ROUTER on one side, the worker on the other. `clock` gives monotonic seconds."""

    def __init__(self, config: ServiceConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._ready_said = False
        self._context = make_context()
        self._peers = open_peers(self._context, config)
        self._router = self._peers.open_socket()
        self._address = bind(self._router, config.bind)
        self._monitor = self._peers.open_publisher(config.monitor) if config.monitor else None
        self._without_worker = BusyReason.STARTING  # what it means that there is none
        # A plain poller: ZeroMQ's asks its socket before it waits and after, at a message's price.
        self._poller = select.poll()
        self._doorbell = self._router.FD
        self._listening = False
        self._crowded_since_s: float | None = None
        self._worker = GatewayEnd(Path(config.folder), self._poller)
        self._commands = sys.stdin.fileno()
        self._poller.register(self._commands, READ)
        self._counts = GatewaySnapshot()
        self._said: dict[str, int] = {}  # of each reason, drops that the log knows of
        self._devices: OrderedDict[str, DeviceLink] = OrderedDict()
        self._routes: dict[bytes, tuple[str, DeviceLink]] = {}  # who is there, by what was counted last
        self._next_state_s = self._next_refresh_s = self._next_words_s = self._next_s = 0.0

    @property
    def address(self) -> str:
        return self._address

    @property
    def monitor_address(self) -> str:
        return "" if self._monitor is None else self._monitor.endpoint

    @property
    def has_worker(self) -> bool:
        return self._worker.connected

    def run(self) -> None:
        """Pass messages until the service is gone; says that it is ready once there is a worker."""
        while self.turn():
            pass

    def turn(self) -> bool:
        """Wait for something to do, and do a bounded part of it; False when the service is gone."""
        more = False
        if self._may_listen():
            # The doorbell rings once for all that has come, and whatever is done with the socket silences it:
            # so nothing is done with it between this look and the wait.
            more = self._from_edges()
            self._worker.flush()
        for ready, event in self._poller.poll(0 if more else self.idle_ms()):
            if ready == self._worker.fileno:
                if event & WRITE:
                    self._worker.flush()
                if event & ~WRITE:
                    self._from_worker()
            elif ready == self._commands and not self._obey():
                return False
        now_s = self._clock()
        if now_s >= self._next_s:
            self._keep_house(now_s)
        return True

    def close(self) -> None:
        """Let the last replies leave, and end."""
        self._router.close(linger=LAST_REPLIES_MS)
        self._worker.close()
        if self._monitor is not None:
            self._monitor.close()
        self._peers.close()
        self._context.term()

    # ------------------------------------------------------------------------------------------- up

    def _obey(self) -> bool:
        """Read a command; False when the service is gone."""
        command = child.read_command()
        if command is None:
            self._from_worker()  # its last replies
        if command == child.DRAIN:
            self._without_worker = BusyReason.DRAINING
        return command is not None

    def _may_listen(self) -> bool:
        """The line before a slow worker is everybody's. Whoever fills it must not have others' messages
        refused: while it is crowded none is taken in, and then ZeroMQ takes from one peer after the other."""
        listen = True
        if not self._worker.crowded:
            self._crowded_since_s = None
        elif self._crowded_since_s is None:
            self._crowded_since_s = self._clock()
            listen = False
        else:
            listen = self._clock() - self._crowded_since_s >= WORKER_PATIENCE_S
        if listen is not self._listening:
            self._listening = listen
            if listen:
                self._poller.register(self._doorbell, READ)
            else:
                self._poller.unregister(self._doorbell)
        return listen

    def _from_edges(self) -> bool:
        """Take in what has come, a bounded part of it; whether there may be more."""
        for _ in range(MESSAGES_AT_ONCE):
            if not is_readable(self._router):
                return False
            route, *frames = receive_now(self._router)
            self._pass_up(route.bytes, frames, time.monotonic_ns())
        return True

    def _pass_up(self, route: bytes, parts: list[zmq.Frame], arrived_ns: int) -> None:
        if not parts:
            self._drop("empty")
            return
        device = self._peers.device_of(route, parts[0])
        if device is None:
            self._drop("revoked")
            self._send(route, REVOKED)
            return
        frames = [part.bytes for part in parts]
        try:
            message = decode(frames)
        except WireError as error:
            self._drop(error.code.name.lower(), f"{device}: {error}")
            self._send(route, encode(Error(error.head or Head(0), error.code, str(error))))
            return
        if isinstance(message, Hello):
            device = self._peers.greeted(route, message, device)
        self._count_up(device, route, parts[0], sum(map(len, frames)))
        try:
            self._worker.put(pack_from_edge(route, device, arrived_ns, frames))
        except AwayError:
            self._refuse(route, message, "no engine", self._without_worker)
        except FullError:
            self._refuse(route, message, "full queue", BusyReason.LOAD)

    def _refuse(self, route: bytes, message: Message, drop: str, reason: BusyReason) -> None:
        self._drop(drop)
        if kind_of(message) in WANT_AN_ANSWER:
            self._send(route, encode(Busy(message.head, RETRY_STARTING_MS, reason)))

    # ----------------------------------------------------------------------------------------- down

    def _from_worker(self) -> None:
        for message in self._worker.receive():
            outgoing = unpack_in_gateway(message)
            if isinstance(outgoing, bytes):
                self._publish(outgoing)
            elif self._peers.may_hear(outgoing.route):
                self._send(outgoing.route, outgoing.frames)
            else:
                self._drop("revoked")

    def _send(self, route: bytes, frames: Sequence[Buffer]) -> None:
        """Never waits: a peer that does not read loses the message, and asks again when it does."""
        try:
            send_now(self._router, [route, *frames])
        except zmq.Again:
            self._drop("slow peer")
            return
        except zmq.ZMQError as error:
            if error.errno != errno.EHOSTUNREACH:
                raise
            self._drop("gone peer")
            return
        size = sum(map(len, frames))
        counts = self._counts
        counts.messages_down += 1
        counts.bytes_down += size
        self._routes.get(route, NOBODY)[1].bytes_down += size

    def _publish(self, payload: bytes) -> None:
        if self._monitor is not None:
            try:
                snapshot = decode_snapshot(payload)
            except RemoteProtocolError as error:  # nobody could read it
                self._drop("snapshot", str(error))
            else:
                self._monitor.publish(snapshot)

    # ------------------------------------------------------------------------------------- counting

    def _count_up(self, device: str, route: bytes, frame: zmq.Frame, size: int) -> None:
        counts = self._counts
        counts.messages_up += 1
        counts.bytes_up += size
        known, link = self._routes.get(route, NOBODY)
        if known != device:
            link = self._link_of(device, route, frame)
        link.bytes_up += size

    def _link_of(self, device: str, route: bytes, frame: zmq.Frame) -> DeviceLink:
        """The counters of `device`, which speaks for the first time on this route."""
        link = self._devices.get(device)
        if link is None:
            link = self._devices[device] = DeviceLink(self._peers.fingerprint(device))
            if len(self._devices) > MAX_ADDRESSES:
                self._devices.popitem(last=False)
                self._routes.clear()  # so that its counters begin anew, should it speak again
        if len(self._routes) >= 4 * MAX_ADDRESSES:
            self._routes.clear()
        self._routes[route] = device, link
        with contextlib.suppress(zmq.ZMQError):
            link.address = str(frame.get("Peer-Address")).removeprefix(IPV4_IN_IPV6)
        return link

    def _drop(self, reason: str, detail: str = "") -> None:
        self._counts.dropped[reason] = count = self._counts.dropped.get(reason, 0) + 1
        if count == 1:
            self._said[reason] = 1
            log.warning("dropped, %s: %s", reason, detail or "the first of its kind")

    def _say_drops(self) -> None:
        """One line a reason: a peer must not be able to fill the disk."""
        for reason, count in self._counts.dropped.items():
            if count > self._said[reason]:
                log.warning("dropped, %s: %d more, %d in all", reason, count - self._said[reason], count)
                self._said[reason] = count

    # ------------------------------------------------------------------------------------- the house

    def idle_ms(self) -> int:
        self._next_s = min(self._next_state_s, self._next_refresh_s, self._worker.next_try_s)
        return max(0, int((self._next_s - self._clock()) * 1e3) + 1)

    def _keep_house(self, now_s: float) -> None:
        self._worker.look(now_s)
        if not self._ready_said and self._worker.connected:
            child.tell_ready(address=self.address, monitor=self.monitor_address)
            self._ready_said = True
        if now_s >= self._next_refresh_s:
            self._next_refresh_s = now_s + REFRESH_S
            for farewell in self._peers.refresh():
                self._part_from(farewell)
        if now_s >= self._next_state_s:
            self._next_state_s = now_s + STATE_S
            self._tell_state()
        if now_s >= self._next_words_s:
            self._next_words_s = now_s + WORDS_S
            self._say_drops()

    def _part_from(self, farewell: Farewell) -> None:
        """Tell a device that its key is not trusted any more, let it watch no more, and end its sessions."""
        log.warning("%s: revoked, %d connections told", farewell.device, len(farewell.routes))
        for route in farewell.routes:
            self._drop("revoked")
            self._send(route, REVOKED)
        if self._monitor is not None:
            self._monitor.cut(farewell.keys)
        with contextlib.suppress(AwayError):  # it has no sessions
            self._worker.put(pack_revoked(farewell.device), must_go=True)

    def _tell_state(self) -> None:
        self._counts.refused_peers = self._peers.refused()
        watched = self._monitor is not None and self._monitor.wanted
        state = GatewayState(self._counts, dict(self._devices), watched)
        with contextlib.suppress(AwayError, FullError):
            self._worker.put(pack_state(state))


NOBODY = "", DeviceLink()  # what is counted there is not shown
REVOKED = encode(
    Error(
        Head(0),
        ErrorCode.REVOKED,
        "the draft service does not trust this device's key any more: `starsd keys trust` it there",
    )
)
WANT_AN_ANSWER = (MessageKind.HELLO, MessageKind.OPEN, MessageKind.PREFILL, MessageKind.UPDATE)


def bind(socket: zmq.Socket[bytes], endpoint: str) -> str:
    """The endpoint, with the port that 0 became.

    Raises ResourceError when the port is taken, UsageError when the endpoint is none."""
    try:
        socket.bind(endpoint)
    except zmq.ZMQError as error:
        if error.errno == errno.EADDRINUSE:
            raise ResourceError(
                f"{endpoint} is in use: stop what listens there or choose another port"
            ) from error
        raise UsageError(f"{endpoint} cannot be bound: {error.strerror}") from error
    if not endpoint.startswith("tcp://"):
        return endpoint
    # ZeroMQ tells 127.0.0.1 as [::ffff:127.0.0.1]: keep what the user wrote, and take the port alone.
    port = socket.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2]
    return f"{endpoint.rpartition(':')[0]}:{port}"


def set_limits(memory_mib: int) -> None:
    """Whatever a peer sends, this process takes no more memory: it dies and is started again, and leaves no
    dump with a key in it. Connections are bounded by the system, not by the low limit that shells set."""
    resource.setrlimit(resource.RLIMIT_AS, (memory_mib * 2**20, memory_mib * 2**20))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _, most_files = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most_files, most_files))


def main() -> None:
    config = child.read_config(ServiceConfig)
    child.set_log_level(config.log_level)
    set_limits(config.memory_mib)
    seed_libc()
    try:
        gateway = Gateway(config)
    except StarSDError as error:
        child.tell_failed(error)
        return
    try:
        gateway.run()
    except StarSDError as error:
        log.error("%s: another process takes over", error)
        sys.exit(1)
    gateway.close()


if __name__ == "__main__":
    main()
