"""The real service without processes and without a neural network: sessions, scheduler, and an engine whose
KV is a list that is checked row by row."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from msgspec.structs import replace

from starsd_edge.errors import RemoteProtocolError
from starsd_edge.protocol.codec import Frames, decode
from starsd_edge.protocol.greeting import Identity
from starsd_edge.protocol.server_connection import HeadOffer, ServiceOffer
from starsd_edge.protocol.session_table import SessionKey
from starsd_server.scheduling import EvictReason, Limits, Policy
from starsd_server.sessions import Sessions
from starsd_server.step import Advanced, Extend, GoAhead, Outcome, SessionRows, TreeReady, WorkItem
from starsd_server.telemetry import Recorder
from tests.e2e.simulator.target import FEATURE_SIZE, LOGITS, MAX_LEN, VOCAB_SIZE
from tests.e2e.simulator.world import World

__all__ = ["IDENTITY", "SimulatedService"]

IDENTITY = Identity(
    target="table",
    target_hash="0a",
    vocab_size=VOCAB_SIZE,
    tokenizer_hash="0b",
    hidden_size=FEATURE_SIZE,
    feature_size=FEATURE_SIZE,
)
STEP_S = (0.004, 0.004, 0.06)  # one of them
TICK_S = 1e-9  # what sums of floats are off by
TREE_LEVELS = 1  # engine steps that a tree takes after the rows are in
DEPTH = 3
AHEAD_DEPTH = 7
RIGHT = 0.75  # share of drafted tokens that are the target's likeliest


@dataclass(slots=True)
class Kv:
    """Of each slot: the token at each position, as rows told it."""

    slots: dict[int, list[int]] = field(default_factory=dict)

    def truncate(self, slot: int, rows: int) -> None:
        del self.slots.setdefault(slot, [])[rows:]


class ListEngine:
    """Takes the place of starsd_server.engine.Engine: same calls, no arithmetic.

    `by_itself`: a step takes its time from `launch` on, and its rows are in the slots from then on, as on an
    accelerator.

    Row i of a slot pairs a feature (of a token and its position) with the token that follows. Rows that do
    not join what is held, or whose feature is not of the token before, must never come through.
    """

    def __init__(self, world: World, step_s: float, *, by_itself: bool) -> None:
        self.kv = Kv()
        self.by_itself = by_itself
        self._step_s = step_s
        self._world = world
        self._launched: list[WorkItem] = []
        self._outcomes: list[Outcome] = []
        self._done_s = 0.0
        self._levels_left: dict[int, int] = {}
        self._goes_ahead: dict[int, bool] = {}

    def reset(self, slot: int) -> SessionRows:
        assert all(item.session.slot != slot for item in self._launched), "a step still writes to the slot"
        self.kv.truncate(slot, 0)
        return SessionRows(slot)

    def rewind(self, session: Any, committed: int) -> None:
        self.kv.truncate(session.slot, committed)
        session.committed = committed

    def launch(self, items: list[WorkItem]) -> None:
        self._launched, self._done_s = items, self._world.now_s + self._step_s
        if self.by_itself:
            self._outcomes = [self._run(item) for item in items]

    def left_s(self) -> float:
        return self._done_s - self._world.now_s if self.by_itself else 0.0

    def collect(self) -> list[Outcome]:
        items, self._launched = self._launched, []
        if self.by_itself:
            assert self.left_s() <= TICK_S, "a step was waited for that is not done"
            return self._outcomes
        return [self._run(item) for item in items]

    def narrow(self, session: SessionRows, floor: float) -> Outcome:
        """All rows are as likely as can be."""
        return Advanced(beams=1)

    def _run(self, item: WorkItem) -> Outcome:
        session = item.session
        if isinstance(item, Extend):
            self._extend(item)
            if item.limits is None:
                return Advanced()
            self._levels_left[session.slot] = TREE_LEVELS
            self._goes_ahead[session.slot] = item.limits.ahead is not None
            return Advanced(beams=1)
        if isinstance(item, GoAhead):
            return self._tree(session.slot, AHEAD_DEPTH)
        self._levels_left[session.slot] -= 1
        if self._levels_left[session.slot]:
            return Advanced(beams=1)
        return replace(self._tree(session.slot, DEPTH), ahead=int(self._goes_ahead[session.slot]))

    def _extend(self, item: Extend) -> None:
        session = item.session
        assert item.start <= session.committed, "rows behind a gap reached the engine"
        self.rewind(session, item.start)
        rows = self.kv.slots[session.slot]
        for feature, token in zip(item.features, item.tokens.tolist(), strict=True):
            of_token, of_position = int(feature[0]), int(feature[1])
            assert of_position == len(rows), "a feature of another position"
            assert not rows or of_token == rows[-1], "a feature of a token that is not the one before"
            rows.append(token)
        session.committed = len(rows)

    def _tree(self, slot: int, depth: int) -> TreeReady:
        """A chain of likely tokens with a sibling each, best first."""
        rows = self.kv.slots[slot]
        tokens: list[int] = []
        parents: list[int] = []
        last, node = (rows[-1] if rows else 0), 0
        for position in range(len(rows), min(len(rows) + depth, MAX_LEN)):
            order = np.argsort(-LOGITS[position, last])
            right = self._world.chance.random() < RIGHT
            last = int(order[0] if right else order[2])
            tokens += [last, int(order[1])]
            parents += [node, node]
            node = len(tokens) - 1
        return TreeReady(
            np.array(tokens, np.int32), np.array(parents, np.int32), np.ones(len(tokens), np.float32)
        )


class Evictions(Recorder):
    """Counts them through restarts."""

    def __init__(
        self, service: SimulatedService, offer: ServiceOffer, limits: Limits, policy: Policy
    ) -> None:
        super().__init__(offer, limits, policy)
        self._service = service

    def evicted(self, key: SessionKey, reason: EvictReason) -> None:
        self._service.evictions += 1
        super().evicted(key, reason)


class SimulatedService:
    """One service at one address, through its restarts. `route` numbers stand for connections."""

    def __init__(self, world: World, limits: Limits) -> None:
        self.world = world
        self.hung = False
        self._unread: list[tuple[str, int, Frames]] | None = None  # what came while it hung; None: it is lost
        self.evictions = 0  # of sessions, to make room for others
        self.generation = 0  # of the engine: what it held is gone with it
        self.replies: dict[int, Callable[[Frames], None]] = {}
        self._limits = limits
        self._step_s = world.chance.choice(STEP_S)
        self._by_itself = world.chance.random() < 0.5  # an accelerator: messages come in while a step runs
        self.in_flight = 0  # messages that did
        self._busy = self._overdue = False  # a step runs; it has ended while the loop hung
        self.restart()

    def restart(self) -> None:
        """The engine's process ends and another begins: another boot, and nothing held."""
        self.generation += 1
        self._busy = self._overdue = False
        if self._unread:
            self._unread.clear()
        offer = ServiceOffer(
            "simulated",
            "0",
            self.world.chance.getrandbits(64),
            (HeadOffer("table-head", IDENTITY, MAX_LEN, 32),),
            chunk_bytes=16 * 2 * FEATURE_SIZE,
            idle_lease_s=30.0,
        )
        engines: dict[str, Any] = {
            "table-head": ListEngine(self.world, self._step_s, by_itself=self._by_itself)
        }
        recorder = Evictions(self, offer, self._limits, Policy.BATCHED)
        self._sessions = Sessions(offer, engines, self._limits, Policy.BATCHED, recorder=recorder, ahead=True)

    def drain(self) -> None:
        self._sessions.drain(self.world.now_s, 1000)
        self._reply()

    def hang(self, *, keeps: bool) -> None:
        """Its loop stands. What arrives is lost, or waits in the sockets and comes all at once."""
        self.hung = True
        self._unread = [] if keeps else None

    def go_on(self) -> None:
        self.hung = False
        if self._overdue:
            self._finish(self.generation)
        unread, self._unread = self._unread or [], None
        for device, route, frames in unread:
            self.receive(device, route, frames)

    def receive(self, device: str, route: int, frames: Frames) -> None:
        if self.hung:
            if self._unread is not None:
                self._unread.append((device, route, frames))
            return
        try:
            message = decode(frames)
        except RemoteProtocolError as error:
            raise AssertionError(f"an edge sent what does not decode: {error}") from error
        self.in_flight += self._busy and self._by_itself
        self._sessions.receive(device, route.to_bytes(8, "big"), message, self.world.now_s)
        self._reply()
        self._step()

    def tick(self) -> None:
        if not self.hung:
            self._sessions.tick(self.world.now_s)
            self._step()

    def _step(self) -> None:
        if self._busy or self.hung:
            return
        if self._by_itself:
            self._launch()
        else:
            self._compute()

    def _launch(self) -> None:
        """One engine step, which is answered when it has ended and the next one was launched."""
        self._busy = self._sessions.begin(self.world.clock)
        self._sessions.answer()
        self._reply()
        if self._busy:
            generation = self.generation
            self.world.after(self._step_s, lambda: self._finish(generation))

    def _finish(self, generation: int) -> None:
        if generation != self.generation:
            return
        self._overdue = self.hung
        if not self.hung:
            self._sessions.finish(self.world.clock)
            self._launch()

    def _compute(self) -> None:
        """One engine step in the loop's own time, whose answers leave when it has ended."""
        # launched, begun, ended
        times = iter((self.world.now_s, self.world.now_s, self.world.now_s + self._step_s))
        if not self._sessions.step(lambda: next(times)):
            self._reply()
            return
        self._busy = True
        generation, answers = self.generation, self._take()
        self.world.after(self._step_s, lambda: self._ended(generation, answers))

    def _ended(self, generation: int, answers: list[tuple[int, Frames]]) -> None:
        if generation != self.generation:
            return
        self._busy = False
        self._send(answers)
        self._step()

    def _take(self) -> list[tuple[int, Frames]]:
        answers = [
            (int.from_bytes(reply.route, "big"), list(reply.frames)) for reply in self._sessions.outbox
        ]
        self._sessions.outbox.clear()
        return answers

    def _reply(self) -> None:
        self._send(self._take())

    def _send(self, answers: list[tuple[int, Frames]]) -> None:
        for route, frames in answers:
            if route in self.replies:
                self.replies[route](frames)
