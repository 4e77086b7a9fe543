"""Both ends of the protocol joined in memory, with a service that answers at once and a clock we turn."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np

from starsd_edge.decoding.roles import RoundHints
from starsd_edge.decoding.roles import Update as CommittedRows
from starsd_edge.decoding.tree import DraftTree
from starsd_edge.protocol.codec import Frames, decode
from starsd_edge.protocol.edge_connection import EdgeConnection
from starsd_edge.protocol.edge_events import Connect, LinkEvent, TreeArrived
from starsd_edge.protocol.greeting import HelloBody, Identity
from starsd_edge.protocol.limits import DEFAULT_TIMING, EdgeTiming
from starsd_edge.protocol.messages import Message
from starsd_edge.protocol.server_connection import (
    HeadOffer,
    Opened,
    Pinged,
    Reply,
    RowsArrived,
    ServerConnection,
    ServerEvent,
    ServiceOffer,
)
from starsd_edge.protocol.session_table import SessionTable

WIDTH, VOCAB = 8, 1000
IDENTITY = Identity(
    target="tiny",
    target_hash="aa",
    vocab_size=VOCAB,
    tokenizer_hash="bb",
    hidden_size=WIDTH,
    feature_size=WIDTH,
)


def hello(dtypes: list[str] | None = None) -> HelloBody:
    return HelloBody(
        identity=IDENTITY,
        digest=IDENTITY.digest(),
        device="jet1",
        software="0.1.0",
        dtypes=dtypes or ["fp16"],
        max_len=4000,
        max_nodes=60,
    )


def offer(boot_id: int = 1, max_len: int = 4000, chunk_bytes: int = 64 * 2 * WIDTH) -> ServiceOffer:
    """Chunks of 64 rows, so that a prompt of a few hundred tokens takes several."""
    return ServiceOffer(
        "bench", "0.1.0", boot_id, (HeadOffer("tiny-head", IDENTITY, max_len, 60),), chunk_bytes
    )


def token_at(position: int) -> int:
    """The text every context of these tests has."""
    return (position * 7 + 3) % VOCAB


def tokens(start: int, stop: int) -> np.ndarray:
    return np.array([token_at(position) for position in range(start, stop)], np.int32)


def committed(start: int, stop: int, hints: RoundHints | None = None) -> CommittedRows:
    """Rows for features of positions [start, stop): tokens at start + 1 .. stop."""
    features = np.repeat(np.arange(start, stop, dtype=np.float16)[:, None], WIDTH, axis=1)
    return CommittedRows(start, tokens(start + 1, stop + 1), features, hints or RoundHints())


@dataclass
class Service:
    """Answers everything at once. `rows` is what its draft KV would hold: (feature, token) by position."""

    table: SessionTable = field(default_factory=lambda: SessionTable(offer()))
    rows: list[tuple[int, int]] = field(default_factory=list)
    rows_received: int = 0
    depth: int = 3
    hung: bool = False
    connection: ServerConnection | None = None

    def receive(self, frames: Frames, now_s: float) -> list[Frames]:
        if self.hung:
            return []
        self.connection, events = self.table.receive("jet1", decode(frames), now_s)
        return [reply for event in events for reply in self.answer(event)]

    def answer(self, event: ServerEvent) -> list[Frames]:
        assert self.connection is not None
        match event:
            case Reply(frames):
                return [frames]
            case Opened():
                self.rows.clear()
                return [self.connection.send_ack(event.round_id)]
            case Pinged():
                return [self.connection.send_pong(event.nonce, 0)]
            case RowsArrived():
                self.take(event)
                if event.hints is None:
                    return [self.connection.send_ack(event.round_id)]
                positions = range(event.base_len - 1, event.base_len + self.depth)
                tree = DraftTree.chain([token_at(p) for p in positions], event.base_len)
                answer = drafted(self.connection, event.round_id, tree, 100, 200)
                return [answer, *self.ahead(event)]
        return []

    def ahead(self, event: RowsArrived) -> list[Frames]:
        """What is drafted ahead, where that is wanted: two tokens more."""
        assert self.connection is not None
        assert event.hints is not None
        if event.hints.ahead_nodes == 0:
            return []
        tree = tokens(event.base_len, event.base_len + self.depth + 2)
        parents = np.arange(len(tree), dtype=np.int32)
        return [self.connection.send_ahead(event.round_id, tree, parents, draft_us=900)]

    def take(self, event: RowsArrived) -> None:
        assert event.start <= len(self.rows), "rows behind a gap reached the engine"
        del self.rows[event.start :]
        for feature, token in zip(event.features[:, 0].tolist(), event.tokens.tolist(), strict=True):
            self.rows.append((int(feature), token))
        self.rows_received += len(event.tokens)
        assert len(self.rows) == event.base_len - 1


class Pair:
    """An edge and a service on a perfect line. `step` lets everything that is under way arrive."""

    def __init__(
        self,
        *,
        dtypes: list[str] | None = None,
        timing: EdgeTiming = DEFAULT_TIMING,
        max_history_bytes: int = 1 << 20,
        session: int = 5,
        boot_id: int = 1,
    ) -> None:
        self.now_s = 0.0
        self.edge = EdgeConnection(
            session, hello(dtypes), lambda: 0.5, timing=timing, max_history_bytes=max_history_bytes
        )
        self.service = Service(SessionTable(offer(boot_id)))
        self.reachable = True
        self.connections = 0
        self.trees: deque[DraftTree] = deque()
        self.sent: list[Message] = []
        self.lose_next = 0  # messages of the edge to be lost

    def obey(self, events: list[LinkEvent]) -> None:
        for event in events:
            if isinstance(event, TreeArrived):
                self.trees.append(event.tree)
            elif isinstance(event, Connect) and self.reachable:
                self.connections += 1
                self.obey(self.edge.connected(self.now_s))

    def step(self) -> None:
        while frames := self.edge.take_frames():
            for message in frames:
                self.sent.append(decode(message))
                if not self.reachable or self.lose_next:
                    self.lose_next = max(0, self.lose_next - 1)
                    continue
                for reply in self.service.receive(message, self.now_s):
                    self.obey(self.edge.receive(reply, self.now_s))

    def wait(self, seconds: float) -> None:
        """Let time pass, with every tick on the way."""
        until_s = self.now_s + seconds
        self.step()
        while (due_s := self.edge.next_wake_s()) is not None and due_s <= until_s:
            self.now_s = max(self.now_s, due_s)
            self.obey(self.edge.tick(self.now_s))
            self.step()
        self.now_s = until_s

    def join(self) -> None:
        """Connect and be welcomed."""
        self.wait(0.0)

    def restart_service(self, boot_id: int = 2) -> None:
        self.service = Service(SessionTable(offer(boot_id)))

    def sent_kinds(self) -> list[str]:
        kinds = [type(message).__name__ for message in self.sent]
        self.sent.clear()
        return kinds


def drafted(
    connection: ServerConnection, round_id: int, tree: DraftTree, queue_us: int, draft_us: int
) -> Frames:
    """The answer with a whole tree, root included."""
    return connection.send_draft(
        round_id, tree.base_len, tree.tokens[1:], tree.parents[1:], queue_us=queue_us, draft_us=draft_us
    )
