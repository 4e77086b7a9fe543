"""Both ends under any sequence of commits, losses, restarts and evictions that hypothesis can find."""

from __future__ import annotations

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from starsd_edge.decoding.prefix import prefix_crc
from starsd_edge.decoding.roles import Update as CommittedRows
from starsd_edge.protocol.codec import Frames
from starsd_edge.protocol.edge_connection import EdgeConnection
from starsd_edge.protocol.edge_events import Connect, LinkEvent, TreeArrived
from starsd_edge.protocol.messages import BusyReason
from starsd_edge.protocol.server_connection import RowsArrived, ServerEvent
from starsd_edge.protocol.session_table import SessionKey, SessionTable
from starsd_edge.protocol.states import EdgeState, ServerState
from tests.core.protocol.pair import WIDTH, Service, hello, offer

TOKENS = st.integers(0, 5)  # few, so that contexts that are cut and grown again often look alike
KEY = SessionKey("jet1", 5)


class CheckedService(Service):
    """Says no now and then, and notes every prefix it is asked to draft on."""

    def __init__(self, boot_id: int) -> None:
        super().__init__(SessionTable(offer(boot_id, chunk_bytes=4 * 2 * WIDTH)))
        self.busy_next = False
        self.drafted_on: list[tuple[int, int]] = []  # length, checksum of the tokens behind the first

    def answer(self, event: ServerEvent) -> list[Frames]:
        connection = self.connection
        assert connection is not None
        if isinstance(event, RowsArrived) and self.busy_next:
            self.busy_next = False
            return [connection.send_busy(event.round_id, 300, BusyReason.RATE)]
        if isinstance(event, RowsArrived):
            answers = super().answer(event)
            tokens = np.array([token for _, token in self.rows], np.int32)
            self.drafted_on.append((event.base_len, prefix_crc(tokens)))
            return answers
        return super().answer(event)


class Link(RuleBasedStateMachine):
    """The edge's context is `text`; messages wait in `up` and `down` until a rule moves them."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self.boot_id = 1
        self.service = CheckedService(1)
        self.edge = EdgeConnection(5, hello(), lambda: 0.5)
        self.text: list[int] = []
        self.had: set[tuple[int, int]] = set()
        self.up: list[Frames] = []
        self.down: list[Frames] = []
        self.reachable = True

    def collect(self) -> None:
        self.up += self.edge.take_frames()

    def obey(self, events: list[LinkEvent]) -> None:
        for event in events:
            if isinstance(event, Connect) and self.reachable:
                self.obey(self.edge.connected(self.now_s))
            if isinstance(event, TreeArrived):
                tree = event.tree
                assert self.text[tree.base_len - 1] == tree.tokens[0], "a tree on another root"
        self.collect()

    def note_text(self) -> None:
        self.had.add((len(self.text), prefix_crc(np.array(self.text[1:], np.int32))))

    @initialize(token=TOKENS)
    def begin(self, token: int) -> None:
        self.start(token)
        self.tick(0.0)

    @rule(token=TOKENS)
    def start(self, token: int) -> None:
        self.text = [token]
        self.note_text()
        self.edge.start(token, self.now_s)
        self.collect()

    @rule(tokens=st.lists(TOKENS, min_size=1, max_size=12))
    def commit(self, tokens: list[int]) -> None:
        start = len(self.text) - 1
        features = np.repeat(np.arange(start, start + len(tokens), dtype=np.float16)[:, None], WIDTH, axis=1)
        self.text += tokens
        self.note_text()
        # Chunks and the rows behind them are prefixes too.
        for length in range(2, len(self.text)):
            self.had.add((length, prefix_crc(np.array(self.text[1:length], np.int32))))
        self.edge.update(CommittedRows(start, np.array(tokens, np.int32), features), self.now_s)
        self.collect()

    @rule(data=st.data())
    def roll_back(self, data: st.DataObject) -> None:
        length = data.draw(st.integers(1, len(self.text)))
        del self.text[length:]
        self.edge.rollback(length, self.now_s)
        self.collect()

    @precondition(lambda self: self.up)
    @rule(data=st.data())
    def deliver_up(self, data: st.DataObject) -> None:
        frames = self.up.pop(data.draw(st.integers(0, min(2, len(self.up) - 1))))
        if self.reachable:
            self.down += self.service.receive(frames, self.now_s)

    @precondition(lambda self: self.down)
    @rule(data=st.data())
    def deliver_down(self, data: st.DataObject) -> None:
        frames = self.down.pop(data.draw(st.integers(0, min(2, len(self.down) - 1))))
        if self.reachable:
            self.obey(self.edge.receive(frames, self.now_s))

    @precondition(lambda self: self.up or self.down)
    @rule(data=st.data())
    def double(self, data: st.DataObject) -> None:
        way = data.draw(st.sampled_from([w for w in (self.up, self.down) if w]))
        way.append(way[0])

    @precondition(lambda self: self.up or self.down)
    @rule(data=st.data())
    def lose(self, data: st.DataObject) -> None:
        del data.draw(st.sampled_from([w for w in (self.up, self.down) if w]))[0]

    @rule(seconds=st.sampled_from([0.0, 0.1, 2.5, 13.0]))
    def tick(self, seconds: float) -> None:
        self.now_s += seconds
        self.obey(self.edge.tick(self.now_s))

    @rule()
    def break_connection(self) -> None:
        self.obey(self.edge.lost("reset", self.now_s))

    @rule(up=st.booleans())
    def plug(self, up: bool) -> None:
        self.reachable = up

    @rule()
    def restart(self) -> None:
        self.boot_id += 1
        drafted_on = self.service.drafted_on
        self.service = CheckedService(self.boot_id)
        self.service.drafted_on = drafted_on

    @rule()
    def evict(self) -> None:
        connection = self.service.table.get(KEY)
        if connection is not None:
            connection.evicted()
            self.service.rows.clear()

    @rule()
    def refuse_next(self) -> None:
        self.service.busy_next = True

    @invariant()
    def only_what_the_edge_had_is_drafted_on(self) -> None:
        assert set(self.service.drafted_on) <= self.had

    @invariant()
    def little_is_under_way(self) -> None:
        assert len(self.edge._uplink.in_flight) <= 4
        assert self.edge._uplink.acked_len <= self.edge._uplink.sent_len <= len(self.text)

    @invariant()
    def nobody_was_blamed(self) -> None:
        assert self.edge.counters.violations == 0, self.edge.reason
        assert self.edge.state is not EdgeState.REFUSED
        connection = self.service.table.get(KEY)
        assert connection is None or connection.state is not ServerState.CLOSED

    def teardown(self) -> None:
        """In peace the service soon holds exactly the edge's text, and says so with a tree."""
        if not self.text:
            return
        self.reachable, self.service.busy_next = True, False
        self.commit([1])
        for _ in range(400):
            if self.up:
                self.deliver(self.up.pop(0))
            elif self.down:
                self.obey(self.edge.receive(self.down.pop(0), self.now_s))
            elif [token for _, token in self.service.rows] == self.text[1:]:
                break
            else:
                due_s = self.edge.next_wake_s()
                self.now_s = max(self.now_s, due_s or 0.0)
                self.obey(self.edge.tick(self.now_s))
                # What is held back for a tree that still leads on leaves with the next token.
                if self.edge._holds_tree:
                    self.commit([1])
        assert [token for _, token in self.service.rows] == self.text[1:], self.edge.reason

    def deliver(self, frames: Frames) -> None:
        self.down += self.service.receive(frames, self.now_s)


TestLink = Link.TestCase
TestLink.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
