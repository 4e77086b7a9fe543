"""The service without sockets: what comes in while a step is under way."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest

from starsd_edge.protocol.codec import Frames, decode
from starsd_edge.protocol.greeting import Identity
from starsd_edge.protocol.messages import (
    Busy,
    BusyReason,
    Draft,
    Hints,
    Message,
    NeedPrefill,
    PrefillAck,
    Welcome,
)
from starsd_edge.protocol.server_connection import HeadOffer, ServiceOffer
from starsd_edge.protocol.telemetry import GatewaySnapshot
from starsd_server.emulate.edge import EdgeSide
from starsd_server.engine import Engine
from starsd_server.heads.head import HeadKind
from starsd_server.ipc import GatewayState
from starsd_server.rows import Precision, RowHead
from starsd_server.scheduling import Limits, Policy
from starsd_server.sessions import Sessions
from starsd_server.step import StepEngine

from .hand_queue import queued
from .heads import HIDDEN, VOCAB, random_head

MAX_LEN = 256


def identity(name: str) -> Identity:
    return Identity(
        target=name,
        target_hash=name,
        vocab_size=VOCAB,
        tokenizer_hash="1",
        hidden_size=HIDDEN,
        feature_size=HIDDEN,
    )


@dataclass
class Room:
    """Sessions over real engines, and edges that speak to them in the same process."""

    limits: Limits = field(default_factory=Limits)
    heads: tuple[str, ...] = ("toy",)
    now_s: float = 0.0
    engine: Callable[[RowHead, int, int], StepEngine] = Engine
    ahead: bool = False

    def __post_init__(self) -> None:
        offers = tuple(HeadOffer(f"{name}-head", identity(name), MAX_LEN, 32) for name in self.heads)
        engines = {
            offer.name: self.engine(
                RowHead(random_head(HeadKind.EAGLE1, seed), Precision.FLOAT32),
                self.limits.max_sessions,
                MAX_LEN,
            )
            for seed, offer in enumerate(offers)
        }
        service = ServiceOffer("test", "0", 1, offers)
        self.sessions = Sessions(service, dict(engines), self.limits, Policy.BATCHED, ahead=self.ahead)
        self.edges: dict[bytes, EdgeSide] = {}

    def clock(self) -> float:
        return self.now_s

    def edge(self, device: str, target: str = "toy") -> EdgeSide:
        route = device.encode()

        def send(frames: Frames) -> None:
            self.sessions.receive(device, route, decode(frames), self.now_s)

        self.edges[route] = EdgeSide(send, identity(target), device, max_nodes=16)
        self.edges[route].hello()
        assert isinstance(self.heard(device)[0], Welcome)
        return self.edges[route]

    def heard(self, device: str) -> list[Message]:
        """What the service has said to a device since it was asked last."""
        route = device.encode()
        own = [reply.frames for reply in self.sessions.outbox if reply.route == route]
        self.sessions.outbox = [reply for reply in self.sessions.outbox if reply.route != route]
        return [self.edges[route].take(frames) for frames in own]

    def prompted(self, device: str, target: str = "toy", seed: int = 0) -> EdgeSide:
        edge = self.edge(device, target)
        edge.open(1)
        edge.prefill(*rows(seed, 20))
        self.settle()
        assert [PrefillAck, PrefillAck] == [type(message) for message in self.heard(device)]
        return edge

    def settle(self) -> None:
        while self.sessions.step(self.clock) or self.sessions.waiting:
            pass


def rows(seed: int, n: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return rng.integers(0, VOCAB, n).astype(np.int32), rng.standard_normal((n, HIDDEN)).astype(np.float16)


HINTS = Hints(max_nodes=16)


def drafts(room: Room, device: str) -> list[tuple[list[int], list[int]]]:
    messages = room.heard(device)
    assert all(isinstance(message, Draft) for message in messages), messages
    return [(m.tokens.tolist(), m.parents.tolist()) for m in messages if isinstance(m, Draft)]


def test_a_device_that_is_there_and_wants_nothing_keeps_its_rows() -> None:
    """Somebody reads an answer; after a minute of that the whole context had to be sent again."""
    room = Room()
    edge = room.prompted("reading")
    silent = room.prompted("gone", seed=1)
    for now_s in range(5, 100, 5):
        room.now_s = now_s
        edge.ping(now_s)
        room.sessions.tick(now_s)
    room.heard("reading")
    for each in (edge, silent):
        each.update(*rows(1, 2), HINTS)
    room.settle()
    assert [Draft] == [type(message) for message in room.heard("reading")]
    assert [NeedPrefill] == [type(message) for message in room.heard("gone")]


@pytest.mark.parametrize("engine", [Engine, queued])
def test_a_slot_given_up_while_a_step_writes_to_it_is_nobodys_until_the_step_has_ended(
    engine: Callable[[RowHead, int, int], StepEngine],
) -> None:
    room = Room(Limits(max_sessions=1), engine=engine)
    leaving = room.prompted("leaving")
    coming = room.edge("coming")
    leaving.update(*rows(1, 2), HINTS)
    assert room.sessions.begin(room.clock)
    leaving.leave()
    coming.open(1)
    (busy,) = room.heard("coming")
    assert isinstance(busy, Busy)
    assert BusyReason.MEMORY is busy.reason
    assert busy.retry_after_ms <= 100
    room.sessions.finish(room.clock)
    room.sessions.answer()
    assert [] == room.heard("leaving")
    coming.open(1)
    coming.prefill(*rows(0, 20))
    coming.update(*rows(1, 2), HINTS)
    room.settle()
    *acks, draft = room.heard("coming")
    assert [PrefillAck, PrefillAck] == [type(ack) for ack in acks]
    other = Room(Limits(max_sessions=1))
    other.prompted("alone").update(*rows(1, 2), HINTS)
    other.settle()
    assert isinstance(draft, Draft)
    assert drafts(other, "alone") == [(draft.tokens.tolist(), draft.parents.tolist())]


@pytest.mark.parametrize("engine", [Engine, queued])
def test_a_context_begun_anew_while_a_step_runs_gets_nothing_of_the_old_one(
    engine: Callable[[RowHead, int, int], StepEngine],
) -> None:
    room = Room(Limits(max_sessions=2), engine=engine)
    edge = room.prompted("d")
    edge.update(*rows(1, 2), HINTS)
    assert room.sessions.begin(room.clock)
    edge.open(7)
    room.settle()
    assert [PrefillAck] == [type(message) for message in room.heard("d")]
    edge.prefill(*rows(5, 30))
    edge.update(*rows(6, 1), HINTS)
    room.settle()
    ack, draft = room.heard("d")
    assert isinstance(ack, PrefillAck)
    assert isinstance(draft, Draft)
    assert 32 == draft.head.base_len


@pytest.mark.parametrize("engine", [Engine, queued])
def test_rows_that_come_in_while_a_tree_grows_overtake_it_and_miss_nothing(
    engine: Callable[[RowHead, int, int], StepEngine],
) -> None:
    """The tree of the older prefix is not sent; that of the newer one is that of a session left in peace."""
    room = Room(engine=engine)
    hasty, patient = (room.prompted(device) for device in ("hasty", "patient"))
    hasty.update(*rows(1, 2), HINTS)
    assert room.sessions.begin(room.clock)
    hasty.update(*rows(2, 1), HINTS)
    room.settle()
    (only,) = drafts(room, "hasty")
    patient.update(*rows(1, 2), HINTS)
    room.settle()
    patient.update(*rows(2, 1), HINTS)
    room.settle()
    _, last = drafts(room, "patient")
    assert last == only


def test_two_heads_draft_side_by_side_what_each_drafts_alone() -> None:
    """A service of two targets: each session has its own head, slots and answers; one step serves both."""
    alone = []
    for target in ("small", "large"):
        room = Room(heads=("small", "large"))
        room.prompted("d", target, seed=3).update(*rows(4, 2), HINTS)
        room.settle()
        alone += drafts(room, "d")
    room = Room(Limits(max_sessions=1), heads=("small", "large"))
    edges = [room.prompted(f"on-{target}", target, seed=3) for target in ("small", "large")]
    for edge in edges:
        edge.update(*rows(4, 2), HINTS)
    room.settle()
    together = drafts(room, "on-small") + drafts(room, "on-large")
    assert alone == together
    assert together[0] != together[1]


@pytest.mark.parametrize(
    ("limits", "reason"),
    [
        (Limits(device_queue_rows=30), BusyReason.QUEUE),
        (Limits(queue_rows=30), BusyReason.LOAD),
        (Limits(rows_per_s=10.0), BusyReason.LOAD),
        (Limits(device_rows_per_s=10.0), BusyReason.RATE),
    ],
)
def test_more_rows_than_a_limit_allows_are_refused_and_taken_later(
    limits: Limits, reason: BusyReason
) -> None:
    """BUSY takes nothing; the same rows again, after the time it names, are served."""
    room = Room(limits)
    edge = room.edge("greedy")
    edge.open(1)
    edge.prefill(*rows(0, 25))
    edge.prefill(*rows(1, 26))
    _, busy = room.heard("greedy")
    assert isinstance(busy, Busy)
    assert reason is busy.reason
    assert 26 == busy.head.base_len
    room.settle()
    room.heard("greedy")
    room.now_s += busy.retry_after_ms / 1e3 + 0.001
    edge.tokens = edge.tokens[:26]
    edge.prefill(*rows(1, 26))
    room.settle()
    (ack,) = room.heard("greedy")
    assert isinstance(ack, PrefillAck)
    assert 52 == ack.head.base_len


class Accelerator(Engine):
    """Computes by itself, as far as the sessions are told."""

    by_itself = True


@pytest.mark.parametrize(("busy_s", "engine"), [(0.0, Engine), (4.0, Accelerator)])
def test_what_is_done_before_an_engine_computes_counts_as_work_of_none_but_an_accelerator(
    busy_s: float, engine: type[Engine]
) -> None:
    """A step is chosen at 1 s and waited for from 5 s on; its rows came in at 0 s."""
    room = Room(engine=engine)
    edge = room.prompted("device")
    edge.update(*rows(1, 2), HINTS)
    room.now_s = 1.0
    assert room.sessions.begin(room.clock)
    room.now_s = 5.0
    room.sessions.finish(room.clock)
    room.sessions.answer()
    counted = room.sessions.recorder.engine
    assert (busy_s, 5.0) == (counted.busy_s, counted.demand_s)


@pytest.mark.parametrize("engine", [Engine, Accelerator])
def test_an_accelerator_whose_trees_go_on_is_not_kept_waiting_for_what_else_comes_in(
    engine: type[Engine],
) -> None:
    room = Room(engine=engine)
    edge = room.prompted("device")
    assert not room.sessions.hurried  # a prompt is over, and nobody is ready
    edge.update(*rows(1, 2), HINTS)
    assert not room.sessions.hurried  # at rest
    assert room.sessions.begin(room.clock)
    room.sessions.finish(room.clock)
    assert room.sessions.waiting
    assert room.sessions.hurried is engine.by_itself
    assert room.sessions.begin(room.clock)
    assert not room.sessions.hurried
    room.sessions.finish(room.clock)
    room.settle()
    assert not room.sessions.hurried


def test_rows_of_a_session_that_ends_before_they_are_counted_are_counted() -> None:
    """Arrivals are counted while a step runs; an edge may leave before there is one."""
    room = Room()
    edge = room.prompted("device")
    edge.update(*rows(1, 2), HINTS)
    edge.leave()
    room.settle()
    snapshot = room.sessions.recorder.snapshot(
        0.0, room.sessions.facts(), GatewayState(GatewaySnapshot()), False
    )
    assert [(20, 2)] == [(device.work.prompt_tokens, device.work.tokens) for device in snapshot.devices]
