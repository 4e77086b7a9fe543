"""Many edges in one loop: each replays a recorded conversation and takes its profile's time to verify.

Real are sockets, messages, trees, and which of their nodes the target accepts. Emulated are the time of a
verification and the delay of the line. An emulated edge always waits for its tree, as in the StarSD paper, so
that the service is what limits it.
"""

from __future__ import annotations

import heapq
import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
import zmq

from starsd_edge.decoding.costs import DeviceProfile
from starsd_edge.decoding.tree import NO_PARENT, DraftTree
from starsd_edge.errors import UnreachableError
from starsd_edge.link.sockets import SyncSocket
from starsd_edge.protocol.greeting import Identity
from starsd_edge.protocol.limits import MAX_CHUNK_BYTES
from starsd_edge.protocol.messages import Busy, Draft, Hints, Message, NeedPrefill, PrefillAck, Welcome
from starsd_edge.types import TokenArray
from starsd_server.emulate.edge import EmulatedEdge
from starsd_server.emulate.trace import Conversation, Trace

__all__ = ["Fleet", "Round", "tree_of"]

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
    edge: EmulatedEdge
    conversations: Iterator[Conversation]
    conversation: Conversation | None = None
    sent_rows: int = 0
    verify_s: float = 0.0
    num_accepted: int = 0
    inbox: list[Message] = field(default_factory=list)


class Fleet:
    """`count` devices of one profile against one service."""

    def __init__(
        self,
        context: zmq.Context[SyncSocket],
        address: str,
        identity: Identity,
        trace: Trace,
        profile: DeviceProfile,
        count: int,
        *,
        max_nodes: int,
        wait_s: float,
        rtt_s: float = 0.0,
    ) -> None:
        self._profile, self._wait_s, self._rtt_s = profile, wait_s, rtt_s
        self._max_nodes = max_nodes
        self._poller = zmq.Poller()
        self._devices: dict[SyncSocket, _Device] = {}
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self.rounds: list[Round] = []
        for number in range(count):
            edge = EmulatedEdge(
                context,
                address,
                identity,
                f"device-{number}",
                curve=profile.curve,
                max_nodes=max_nodes,
            )
            # Each starts with another conversation, so that no two are in step.
            at = number % len(trace.conversations)
            turns = itertools.cycle(trace.conversations[at:] + trace.conversations[:at])
            self._devices[edge.socket] = _Device(number, edge, turns)
            self._poller.register(edge.socket, zmq.POLLIN)

    def start(self) -> None:
        """Greet the service and send the first prompts. Raises UnreachableError when it does not answer."""
        for device in self._devices.values():
            if not device.edge.socket.poll(int(START_PATIENCE_S * 1e3), zmq.POLLOUT):
                raise UnreachableError("the draft service of the benchmark cannot be reached")
            device.edge.hello()
            answer = device.edge.receive(int(START_PATIENCE_S * 1e3))
            if not isinstance(answer, Welcome):
                raise UnreachableError(f"the draft service of the benchmark answered {answer}")
            self._next_conversation(device)

    def run(self, seconds: float) -> None:
        """Play for `seconds`; finished rounds are added to `rounds`."""
        end_s = time.monotonic() + seconds
        while (now_s := time.monotonic()) < end_s:
            while self._due and self._due[0][0] <= now_s:
                heapq.heappop(self._due)[2]()
            next_s = min(end_s, self._due[0][0]) if self._due else end_s
            wait_ms = max(0, int((next_s - time.monotonic()) * 1e3))
            for socket, _ in self._poller.poll(wait_ms):
                device = self._devices[socket]
                while (message := device.edge.receive()) is not None:
                    self._after(self._rtt_s / 2, self._arrived, device, message)

    @property
    def bytes_up(self) -> int:
        return sum(device.edge.bytes_up for device in self._devices.values())

    @property
    def bytes_down(self) -> int:
        return sum(device.edge.bytes_down for device in self._devices.values())

    def close(self) -> None:
        for device in self._devices.values():
            device.edge.close()

    # ----------------------------------------------------------------------------------------- rounds

    def _arrived(self, device: _Device, message: Message) -> None:
        if isinstance(message, Draft):
            self._verify(device, message)
        elif isinstance(message, Busy):
            self._after(message.retry_after_ms / 1e3, self._begin, device)
        elif isinstance(message, NeedPrefill):
            self._begin(device)
        elif not isinstance(message, PrefillAck):
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
            max_nodes=self._max_nodes,
            num_accepted=device.num_accepted,
            verify_us=int(device.verify_s * 1e6),
            wait_us=int(self._wait_s * 1e6),
        )
        device.edge.update(_tokens_of(device.conversation, rows), device.conversation.features[rows], hints)

    def _verify(self, device: _Device, draft: Draft) -> None:
        """Hold the answer back until the profile's verify time has passed."""
        assert device.conversation is not None
        tree = tree_of(draft, int(device.edge.tokens[-1]))
        device.verify_s = self._profile.curve(len(tree))
        self._after(device.verify_s, self._commit, device, tree, draft)

    def _commit(self, device: _Device, tree: DraftTree, draft: Draft) -> None:
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
        self.rounds.append(
            Round(
                device.number,
                time.monotonic(),
                accepted + 1,
                len(tree),
                draft.queue_us / 1e6,
                draft.draft_us / 1e6,
            )
        )
        end = device.sent_rows + accepted + 1
        if end >= len(conversation.tokens) - 1:
            self._after(self._rtt_s / 2, self._next_conversation, device)
        else:
            self._after(self._rtt_s / 2, self._update, device, end)

    def _after(self, seconds: float, action: Callable[..., None], *arguments: object) -> None:
        if seconds <= 0:
            action(*arguments)
            return
        due = (time.monotonic() + seconds, next(self._order), lambda: action(*arguments))
        heapq.heappush(self._due, due)


def tree_of(draft: Draft, root: int) -> DraftTree:
    """The tree of a DRAFT, with its root."""
    tokens = np.concatenate([np.array([root], np.int32), draft.tokens])
    parents = np.concatenate([np.array([NO_PARENT], np.int32), draft.parents])
    return DraftTree(tokens, parents, draft.head.base_len)


def _tokens_of(conversation: Conversation, rows: slice) -> TokenArray:
    """Row i carries the token of position i + 1."""
    return conversation.tokens[rows.start + 1 : rows.stop + 1]
