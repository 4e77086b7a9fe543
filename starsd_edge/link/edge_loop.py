"""The edge's socket, and the thread that turns what happens to it into calls of EdgeConnection.

The thread makes and closes sockets, receives, and keeps time. But a round's update leaves from the thread
that brings it, and whoever waits for its tree receives it: to wake another thread, or be woken by it, takes
longer. A ZeroMQ socket may be handed from thread to thread where a lock stands between them, so the dealer is
touched with `lock` held and not otherwise, and waited for on its bare descriptor, of `watch.py`. Who touches
it may take the notice of a message that has come: its descriptor does not tell a second time. So whoever has
touched it looks whether there is something to receive, and sees to it that somebody does.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

import zmq

from starsd_edge.link.diagnose import handshake_trouble, why_unreachable
from starsd_edge.link.placement import Placement
from starsd_edge.link.sockets import (
    SyncSocket,
    check_private,
    edge_socket,
    is_readable,
    make_context,
    monitor_event,
    receive_now,
    send_now,
)
from starsd_edge.link.watch import Watch
from starsd_edge.protocol.edge_connection import EdgeConnection
from starsd_edge.protocol.edge_events import Connect, Disconnect, LinkEvent, TreeArrived
from starsd_edge.protocol.states import EdgeState

__all__ = ["EdgeLoop"]

log = logging.getLogger(__name__)

GOODBYE_MS = 100  # how long closing may take to get the last message out
AFTER_ERROR_S = 0.1  # a failure that repeats at once must not spin
JOIN_S = 3.0  # a diagnosis under way takes a second
MAX_MESSAGES_A_TURN = 64  # of each kind: neither the line nor the monitor can starve the other
MONITORED = (
    zmq.EVENT_CONNECT_RETRIED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)


class EdgeLoop:
    """Runs `connection` over a DEALER. `lock` guards it; `changed`, a condition on it, is notified when
    something happened to the link. `on_tree` is called with the lock held.

    One service of `places` is used at a time. Another one is taken when it fails or refuses work; the
    connection gives that one the context again, as it does for a service that has restarted.

    Raises ConfigError for an address off this machine without keys.
    """

    def __init__(
        self,
        places: Placement,
        connection: EdgeConnection,
        on_tree: Callable[[TreeArrived], None],
    ) -> None:
        for place in places:
            check_private(place.address, has_key=place.keys is not None)
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
        self._places = places
        self._connection = connection
        self._on_tree = on_tree
        self._context = make_context(io_threads=1)
        self._dealer: SyncSocket | None = None
        self._monitor: SyncSocket | None = None
        self._watch = Watch()
        self._put_off: list[LinkEvent] = []  # by another thread, for the link's
        self._wake_s = 0.0  # when the thread looks at the connection again, whatever happens
        self._unread = False  # more has come than one turn takes
        self._stalled = False  # the line takes no messages
        self._settled = False  # nothing is lost by changing services now
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="starsd-link", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """The connection has something to send. Call it from any thread; after `stop` it does nothing."""
        with self.lock:
            if not self._watch.closed:
                self._watch.wake()

    def send(self) -> None:
        """Send what the connection has, from this thread. Call it with the lock held."""
        if self._dealer is None or not self._transmit() or is_readable(self._dealer) or self._sooner():
            self.wake()

    def receive(self, done: Callable[[], object], timeout_s: float) -> None:
        """Receive in this thread until `done()`, which is asked with the lock held; call it without. Gives up
        with less than a millisecond left, and at once where another thread does the same."""
        until_s = time.monotonic() + timeout_s
        borrowed = False
        try:  # an interrupt may come at any point, and must not keep the descriptor from the link's thread
            with self.lock:
                if done() or self._watch.lent:
                    return
                borrowed = True
                self._watch.lend()
            while (left_ms := int((until_s - time.monotonic()) * 1e3)) > 0:
                self._watch.wait_as_borrower(left_ms)
                with self.lock:
                    self._receive_here()
                    if done():
                        return
        finally:
            if borrowed:
                with self.changed:
                    self._watch.give_back()
                    if self._stopping.is_set():
                        self.changed.notify_all()

    def _receive_here(self) -> None:
        """One message. More of them, and what follows from it beside trees, are the link's thread's."""
        for event in self._take():
            if isinstance(event, TreeArrived):
                self._on_tree(event)
            else:
                self._put_off.append(event)
        self.changed.notify_all()
        self.send()
        if self._put_off:
            self.wake()

    @property
    def stopped(self) -> bool:
        return self._stopping.is_set()

    @property
    def address(self) -> str:
        """Of the service that is used now."""
        return self._places.current.address

    def settle(self) -> None:
        """Nothing would be lost by changing services now: go back to the one that is meant for this edge, if
        it is to be had again. Call it with `changed` held."""
        if self._places.prefers_another(time.monotonic()):
            self._settled = True
            self.wake()  # the sockets are the thread's

    def stop(self) -> None:
        """Say goodbye and end the thread."""
        if self._stopping.is_set():
            return
        self._stopping.set()
        self.wake()
        self._thread.join(JOIN_S)
        with self.changed:
            self._watch.call()
            left = self.changed.wait_for(lambda: not self._watch.lent, JOIN_S)
        if left and not self._thread.is_alive():
            self._context.destroy(linger=GOODBYE_MS)
            with self.lock:
                self._watch.close()

    # ------------------------------------------------------------------------------- on the thread

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                self._turn()
            except Exception as error:
                # Decoding must not feel it; the breaker paces the next attempt.
                log.exception("the draft link failed")
                self._lost(f"internal error: {error}")
                self._stopping.wait(AFTER_ERROR_S)
        with self.changed:
            self._obey(self._connection.close(time.monotonic()))
            self.changed.notify_all()

    def _turn(self) -> None:
        ready = self._watch.wait(self._timeout_s())
        if self._watch.dealer in ready or self._unread:
            self._receive()
        if self._watch.monitor in ready or self._unread:
            self._heed_monitor()
        with self.changed:
            if self._put_off:
                put_off, self._put_off = self._put_off, []
                self._obey(put_off)
            if self._stalled:
                # Not connected, or a line that stands: this link is of no use.
                self._stalled = False
                self._obey(self._connection.lost(f"{self.address} takes no messages", time.monotonic()))
            if self._settled:
                self._go_back()
            before = self._connection.state
            events = self._connection.tick(time.monotonic())
            if events or self._connection.state is not before:
                self._obey(events)
            self._send()
            self._unread = any(map(is_readable, filter(None, (self._dealer, self._monitor))))
            self._wake_s = self._next_look_s()

    def _go_back(self) -> None:
        self._settled = False
        now_s = time.monotonic()
        if self._places.prefers_another(now_s):
            address = self.address
            self._places.go_back(now_s)
            self._obey(self._connection.lost(f"left {address} for {self.address}", now_s), failed=False)
            self._connection.try_now(now_s)

    def _timeout_s(self) -> float:
        return 0.0 if self._unread or self._stalled else self._wake_s - time.monotonic()

    def _next_look_s(self) -> float:
        """Not later than a request could be late that leaves right now: then sending it wakes nobody."""
        latest_s = time.monotonic() + self._connection.least_patience_s
        due_s = self._connection.next_wake_s()
        return latest_s if due_s is None else min(due_s, latest_s)

    def _sooner(self) -> bool:
        """Whether the connection must be looked at before the thread would."""
        due_s = self._connection.next_wake_s()
        return due_s is not None and due_s < self._wake_s

    def _receive(self) -> None:
        """One message. Whatever else is there is found by the next turn, which also sends the answers."""
        with self.changed:
            self._obey(self._take())
            self._watch.call()

    def _heed_monitor(self) -> None:
        for _ in range(MAX_MESSAGES_A_TURN):
            monitor = self._monitor
            if monitor is None or not monitor.poll(0):
                return
            self._note(*monitor_event(monitor.recv_multipart()))

    def _note(self, event: int, value: int) -> None:
        keys = self._places.current.keys
        fingerprint = keys.own.key.fingerprint if keys else None
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            with self.changed:
                self._obey(self._connection.connected(time.monotonic()))
        elif event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            with self.changed:
                reason = handshake_trouble(event, value, self.address, fingerprint)
                self._obey(self._connection.denied(reason, time.monotonic()))
        elif event == zmq.EVENT_DISCONNECTED:
            if self._connection.state is EdgeState.CONNECTING:  # before the handshake: nobody retries it
                self._lost(why_unreachable(self.address))
            else:
                self._lost(f"the connection to {self.address} broke")
        elif event == zmq.EVENT_CONNECT_RETRIED:
            self._lost(why_unreachable(self.address))
        else:
            self._lost(handshake_trouble(event, value, self.address, fingerprint))

    def _lost(self, reason: str) -> None:
        with self.changed:
            self._obey(self._connection.lost(reason, time.monotonic()))

    # ------------------------------------------------------------------- with `changed` held from here on

    def _take(self) -> list[LinkEvent]:
        """What the message that has come means; the descriptor tells of other things, too."""
        if self._dealer is None:
            return []
        try:
            frames = [frame.bytes for frame in receive_now(self._dealer)]
        except zmq.Again:
            return []
        now_s = time.monotonic()
        events = self._connection.receive(frames, now_s)
        if self._connection.state is EdgeState.PAUSED and self._places.has_spare(now_s):
            # A service that has no room for this edge is left, if another may have.
            events += self._connection.lost(f"{self.address}: {self._connection.reason}", now_s)
        elif self._connection.state is EdgeState.DRAFTING:
            self._places.served()
        return events

    def _obey(self, events: list[LinkEvent], *, failed: bool = True) -> None:
        for event in events:
            match event:
                case TreeArrived():
                    self._on_tree(event)
                case Connect():
                    self._connect()
                case Disconnect():
                    self._send()
                    self._disconnect()
                    if failed and len(self._places) > 1 and self._places.leave(time.monotonic()):
                        self._connection.try_now(time.monotonic())
        self.changed.notify_all()

    def _send(self) -> None:
        if self._dealer is None:
            self._connection.take_frames()  # for nobody
        else:
            self._transmit()

    def _transmit(self) -> bool:
        """Whether the line took all there was to send. The thread gives one up that did not."""
        assert self._dealer is not None
        try:
            for frames in self._connection.take_frames():
                send_now(self._dealer, frames)
        except zmq.Again:
            self._stalled = True
        return not self._stalled

    def _connect(self) -> None:
        """A fresh socket: one that has lost its peer does not always find back."""
        self._disconnect()
        self._dealer = edge_socket(self._context, self._places.current.keys)
        self._monitor = self._dealer.get_monitor_socket(MONITORED)
        self._watch.add(self._dealer.fileno(), self._monitor.fileno())
        try:
            self._dealer.connect(self.address)
        except zmq.ZMQError as error:
            self._obey(self._connection.lost(f"{self.address}: {error.strerror}", time.monotonic()))

    def _disconnect(self) -> None:
        if self._dealer is None:
            return
        assert self._monitor is not None
        self._watch.remove()
        self._unread = self._stalled = False
        self._dealer.disable_monitor()
        self._monitor.close(0)
        self._dealer.close(GOODBYE_MS if self._stopping.is_set() else 0)
        self._dealer = self._monitor = None
