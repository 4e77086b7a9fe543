"""How many connections each key holds, and whether it may have another.

A device that is trusted and broken could open connections without an end. ZeroMQ closes none of them for us,
so they are bounded where they begin: in the handshake. What is known: which key knocks (ZAP), which
descriptors are open (the sockets' monitors), and whose a descriptor is once it has spoken. A key holds its
descriptors that spoke, and its handshakes that have not spoken yet; of these there are never more than silent
descriptors, so that what ended without a word is noticed by their number.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from typing import TypeAlias

import zmq

from starsd_edge.link.sockets import SyncSocket, monitor_event

__all__ = ["MAX_CONNECTIONS", "Connections"]

MAX_CONNECTIONS = 64  # of one key: a device's few programs, their reconnects, and watchers, many times over
MAX_EVENTS_A_LOOK = 10_000  # strangers who connect without end must not keep others waiting to be let in
MONITOR_ADDRESS = "inproc://connections-{}"
EVENTS = zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED

Key: TypeAlias = str  # Z85


class Connections:
    """`watch` and `spoke` are for the thread that owns the sockets; the rest for the one that answers ZAP."""

    def __init__(self, most: int = MAX_CONNECTIONS) -> None:
        self._most = most
        self._monitors: list[SyncSocket] = []
        self._spoken: deque[tuple[int, Key]] = deque()  # from one thread to the other
        self._open: set[int] = set()  # descriptors, strangers' too
        self._speakers: dict[int, Key] = {}
        self._silent: OrderedDict[int, Key] = OrderedDict()  # handshakes by their number, the oldest first
        self._handshakes = 0

    def watch(self, socket: SyncSocket) -> None:
        """Count the connections of `socket`, which is not bound yet."""
        address = MONITOR_ADDRESS.format(len(self._monitors))
        socket.monitor(address, EVENTS)
        monitor = socket.context.socket(zmq.PAIR)
        monitor.rcvhwm = 0  # one that is full stops the thread that does everybody's input and output
        monitor.linger = 0
        monitor.connect(address)
        self._monitors.append(monitor)

    def spoke(self, descriptor: int, key: Key) -> None:
        """The first message of a connection came on `descriptor`."""
        self._spoken.append((descriptor, key))

    def admit(self, key: Key) -> bool:
        """Whether `key` may have one more connection, which then counts."""
        self.look()
        self._forget_the_gone(
            len(self._open) - len(self._speakers) - 1
        )  # the knocker's own is open, and not in
        if self.held(key) >= self._most:
            return False
        self._handshakes += 1
        self._silent[self._handshakes] = key
        return True

    def held(self, key: Key) -> int:
        return Counter(self._speakers.values())[key] + Counter(self._silent.values())[key]

    def look(self) -> None:
        """Take in what happened. Called now and then: what is not taken in piles up."""
        spoken = len(self._spoken)  # before the monitors, which so have told of these descriptors
        for monitor in self._monitors:
            for _ in range(MAX_EVENTS_A_LOOK):
                if not monitor.poll(0):
                    break
                self._note(*monitor_event(monitor.recv_multipart()))
        for _ in range(spoken):
            self._know(*self._spoken.popleft())
        self._forget_the_gone(len(self._open) - len(self._speakers))

    def _forget_the_gone(self, most_silent: int) -> None:
        while len(self._silent) > max(most_silent, 0):
            self._silent.popitem(last=False)

    def close(self) -> None:
        for monitor in self._monitors:
            monitor.close(0)

    def _note(self, event: int, descriptor: int) -> None:
        self._speakers.pop(descriptor, None)
        if event == zmq.EVENT_ACCEPTED:
            self._open.add(descriptor)
        else:
            self._open.discard(descriptor)

    def _know(self, descriptor: int, key: Key) -> None:
        if descriptor not in self._open or self._speakers.get(descriptor) == key:
            return  # gone meanwhile, or known
        self._speakers[descriptor] = key
        number = next((number for number, whose in self._silent.items() if whose == key), None)
        if number is not None:
            del self._silent[number]
