"""Many edges in one loop: each replays a recorded conversation and takes its profile's time to verify.

Real are sockets, messages, trees, and which of their nodes the target accepts. Emulated are the time of a
verification and the delay of the line. An emulated edge always waits for its tree, as in the StarSD paper, so
that the service is what limits it.
"""

from __future__ import annotations

import heapq
import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import zmq

from starsd_edge.decoding.costs import DeviceProfile
from starsd_edge.decoding.tree import NO_PARENT, DraftTree
from starsd_edge.errors import UnreachableError
from starsd_edge.link.sockets import SyncSocket, edge_socket
from starsd_edge.protocol.codec import Frames
from starsd_edge.protocol.features import FeatureDtype
from starsd_edge.protocol.greeting import Identity
from starsd_edge.protocol.limits import MAX_CHUNK_BYTES
from starsd_edge.protocol.messages import (
    Busy,
    Draft,
    Error,
    GoAway,
    Hints,
    Message,
    NeedPrefill,
    PrefillAck,
    Welcome,
)
from starsd_edge.types import TokenArray
from starsd_server.emulate.edge import EdgeSide
from starsd_server.emulate.trace import Conversation, Trace

__all__ = ["FleetPlan", "Players", "Round", "SocketFleet", "tree_of"]

MAX_CHUNK_ROWS = 400  # of a prompt in one message, where its bytes allow as many
START_PATIENCE_S = 60.0


@dataclass(frozen=True, slots=True)
class Round:
    """One round of one device, for the measurement. Seconds on the local clock."""

    device: int
    ended_s: float
    tokens: int  # committed by it, bonus included
    nodes: int
    queue_s: float
    draft_s: float


@dataclass(slots=True)
class _Device:
    """One emulated edge and where it is in its conversation."""

    number: int
    edge: EdgeSide
    conversations: Iterator[Conversation]
    conversation: Conversation | None = None
    sent_rows: int = 0
    verify_s: float = 0.0
    num_accepted: int = 0


class Timers:
    """What is due when; the caller's clock decides when that is."""

    def __init__(self) -> None:
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()

    def at(self, due_s: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._due, (due_s, next(self._order), action))

    @property
    def next_s(self) -> float:
        """When the next is due; infinity when nothing is."""
        return self._due[0][0] if self._due else math.inf

    def run(self, now_s: float) -> None:
        """Do what is due by now."""
        while self._due and self._due[0][0] <= now_s:
            heapq.heappop(self._due)[2]()


@dataclass(frozen=True, slots=True)
class FleetPlan:
    """What the devices of a fleet have in common.

    wait_s  what a device is taken to wait for a tree, when the tree's size is chosen by cost
    rtt_s   emulated delay of the line, there and back
    dtype   of the features on the line
    """

    identity: Identity
    trace: Trace
    profile: DeviceProfile
    max_nodes: int
    wait_s: float
    rtt_s: float = 0.0
    dtype: FeatureDtype = FeatureDtype.FP16


class Players:
    """The devices, without what carries their messages: tell them what arrives and let the timers run."""

    def __init__(self, plan: FleetPlan, clock: Callable[[], float]) -> None:
        self._plan, self._clock = plan, clock
        self._devices: list[_Device] = []
        self.timers = Timers()
        self.rounds: list[Round] = []

    def add(self, send: Callable[[Frames], object], device: str | None = None) -> int:
        """A new edge that sends through `send`; its number. Those of one `device` are its sessions."""
        number = len(self._devices)
        edge = EdgeSide(
            send,
            self._plan.identity,
            device or f"device-{number}",
            curve=self._plan.profile.curve,
            dtype=self._plan.dtype,
            max_nodes=self._plan.max_nodes,
        )
        # Each starts with another conversation, so that no two are in step.
        recorded = self._plan.trace.conversations
        at = number % len(recorded)
        self._devices.append(_Device(number, edge, itertools.cycle(recorded[at:] + recorded[:at])))
        return number

    def hello(self) -> None:
        """All devices greet the service; each goes on by itself from there."""
        for device in self._devices:
            device.edge.hello()

    def name(self, number: int) -> str:
        """The device that an edge says it is."""
        return self._devices[number].edge.device

    def leave(self) -> None:
        for device in self._devices:
            device.edge.leave()

    def arrived(self, number: int, frames: Frames) -> None:
        """The service sent `frames` to a device; they reach it after half a round trip."""
        device = self._devices[number]
        self._after(self._plan.rtt_s / 2, lambda: self._take(device, device.edge.take(frames)))

    @property
    def bytes_up(self) -> int:
        return sum(device.edge.bytes_up for device in self._devices)

    @property
    def bytes_down(self) -> int:
        return sum(device.edge.bytes_down for device in self._devices)

    def _take(self, device: _Device, message: Message) -> None:
        if isinstance(message, Draft):
            self._verify(device, message)
        elif isinstance(message, Welcome):
            self._next_conversation(device)
        elif isinstance(message, Busy):
            self._after(message.retry_after_ms / 1e3, lambda: self._begin(device))
        elif isinstance(message, NeedPrefill):
            self._begin(device)
        elif isinstance(message, Error):
            raise UnreachableError(f"the draft service refuses the devices of the benchmark: {message.text}")
        elif not isinstance(message, PrefillAck | GoAway):
            raise UnreachableError(f"the draft service of the benchmark answered {message}")

    def _next_conversation(self, device: _Device) -> None:
        device.conversation = next(device.conversations)
        self._begin(device)

    def _begin(self, device: _Device) -> None:
        """Open a context and send the prompt; a tree is wanted at its end."""
        conversation = device.conversation
        assert conversation is not None
        device.edge.open(int(conversation.tokens[0]))
        device.sent_rows = device.num_accepted = 0
        chunk_rows = min(MAX_CHUNK_ROWS, MAX_CHUNK_BYTES // (2 * conversation.features.shape[1]))
        while conversation.prompt_len - device.sent_rows > chunk_rows:
            rows = slice(device.sent_rows, device.sent_rows + chunk_rows)
            device.edge.prefill(_tokens_of(conversation, rows), conversation.features[rows])
            device.sent_rows = rows.stop
        self._update(device, conversation.prompt_len)

    def _update(self, device: _Device, end: int) -> None:
        """Send the rows up to `end` and ask for a tree."""
        assert device.conversation is not None
        rows = slice(device.sent_rows, end)
        device.sent_rows = end
        hints = Hints(
            max_nodes=self._plan.max_nodes,
            num_accepted=device.num_accepted,
            verify_us=int(device.verify_s * 1e6),
            wait_us=int(self._plan.wait_s * 1e6),
        )
        device.edge.update(_tokens_of(device.conversation, rows), device.conversation.features[rows], hints)

    def _verify(self, device: _Device, draft: Draft) -> None:
        """Hold the answer back until the profile's verify time has passed."""
        tree = tree_of(draft, int(device.edge.tokens[-1]))
        device.verify_s = self._plan.profile.curve(len(tree))
        self._after(device.verify_s, lambda: self._commit(device, tree, draft))

    def _commit(self, device: _Device, tree: DraftTree, draft: Draft) -> None:
        """Accept what the recorded answer says, and hand it on after half a round trip."""
        conversation = device.conversation
        assert conversation is not None
        node, accepted = 0, 0
        base = len(device.edge.tokens)  # the root is at base - 1
        while base + accepted < len(conversation.tokens):
            child = tree.child(node, int(conversation.tokens[base + accepted]))
            if child is None:
                break
            node, accepted = child, accepted + 1
        device.num_accepted = accepted
        queue_s, draft_s = draft.queue_us / 1e6, draft.draft_us / 1e6
        self.rounds.append(Round(device.number, self._clock(), accepted + 1, len(tree), queue_s, draft_s))
        end = device.sent_rows + accepted + 1
        over = end >= len(conversation.tokens) - 1
        going_on = (lambda: self._next_conversation(device)) if over else (lambda: self._update(device, end))
        self._after(self._plan.rtt_s / 2, going_on)

    def _after(self, seconds: float, action: Callable[[], None]) -> None:
        self.timers.at(self._clock() + seconds, action)


class SocketFleet:
    """Players over real sockets, in real time."""

    def __init__(
        self, context: zmq.Context[SyncSocket], address: str, plan: FleetPlan, devices: Sequence[str | None]
    ) -> None:
        """One edge for each of `devices`; None is a device of its own."""
        self.players = Players(plan, time.monotonic)
        self._poller = zmq.Poller()
        self._numbers: dict[SyncSocket, int] = {}
        for device in devices:
            socket = edge_socket(context, None)
            socket.connect(address)
            self._numbers[socket] = self.players.add(socket.send_multipart, device)
            self._poller.register(socket, zmq.POLLIN)

    def start(self) -> None:
        """Connect and greet. Raises UnreachableError when the service cannot be reached."""
        for socket in self._numbers:
            if not socket.poll(int(START_PATIENCE_S * 1e3), zmq.POLLOUT):
                raise UnreachableError("the draft service of the benchmark cannot be reached")
        self.players.hello()

    def run(self, seconds: float) -> None:
        """Play for `seconds`."""
        end_s = time.monotonic() + seconds
        while (now_s := time.monotonic()) < end_s:
            self.players.timers.run(now_s)
            left_s = min(end_s, self.players.timers.next_s) - time.monotonic()
            for socket, _ in self._poller.poll(max(0, int(left_s * 1e3))):
                while socket.poll(0):
                    self.players.arrived(self._numbers[socket], socket.recv_multipart())

    def close(self) -> None:
        self.players.leave()
        for socket in self._numbers:
            socket.close()


def tree_of(draft: Draft, root: int) -> DraftTree:
    """The tree of a DRAFT, with its root."""
    tokens = np.concatenate([np.array([root], np.int32), draft.tokens])
    parents = np.concatenate([np.array([NO_PARENT], np.int32), draft.parents])
    return DraftTree(tokens, parents, draft.head.base_len)


def _tokens_of(conversation: Conversation, rows: slice) -> TokenArray:
    """Row i carries the token of position i + 1."""
    return conversation.tokens[rows.start + 1 : rows.stop + 1]
