"""Steps of the engines, one at a time: launched for whom the scheduler chooses, and finished.

Nothing of this waits for anything but the engine, and all that can wait is left for later: between two steps
an accelerator idles.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeAlias

from starsd_edge.protocol.session_table import SessionKey
from starsd_server.scheduler import Scheduler
from starsd_server.scheduling import Action, EngineFree, Phase, RunStep, StepEnded, Turn
from starsd_server.session import Block, Ended, Flight, Part, Session
from starsd_server.step import (
    Advanced,
    Extend,
    GoAhead,
    Grow,
    Outcome,
    Refused,
    SessionRows,
    StepEngine,
    TreeReady,
    WorkItem,
)

__all__ = ["Clock", "Steps"]

Clock: TypeAlias = Callable[[], float]
"""Monotonic seconds."""

GROW, AHEAD = Phase.GROW, Phase.AHEAD  # a member is slow to look up
NOBODY: frozenset[SessionKey] = frozenset()
ENGINE_FREE = EngineFree()
NO_ROWS: Mapping[SessionKey, int] = {}


class Steps:
    """The step under way, and those that have ended and are not answered yet."""

    def __init__(
        self,
        engines: Mapping[str, StepEngine],
        scheduler: Scheduler,
        sessions: Mapping[SessionKey, Session],
        tell_narrowed: Callable[[], None],
        *,
        ahead: bool,
    ) -> None:
        """Engines by head. `tell_narrowed` hears of every tree that lost rows for `price`, once; `ahead`:
        trees that are done may go on."""
        self._engines, self._scheduler, self._sessions = engines, scheduler, sessions
        self.by_itself = all(engine.by_itself for engine in engines.values())
        self._tell_narrowed = tell_narrowed
        self._ahead = ahead
        self._flight: Flight | None = None
        self._ended: list[Ended] = []
        self._last_step_s = 0.0  # when the newest step ended
        self.price = 0.0  # what a row of a tree has to bring
        # An engine that computes by itself has ended a step, and somebody goes on: whatever else has come in
        # is better received while the next one runs.
        self.hurried = False

    @property
    def under_way(self) -> bool:
        return self._flight is not None

    def begin(self, clock: Clock) -> list[Action]:
        """Launch a step if anyone is ready; none may be under way. What else the scheduler wants done."""
        self.hurried = False
        others: list[Action] = []
        for action in self._scheduler.handle(ENGINE_FREE):
            if isinstance(action, RunStep):
                self._launch(action.turns, clock)
            else:
                others.append(action)
        return others

    def left_s(self) -> float:
        """Seconds until the step under way is done; not above zero when it is, or when there is none."""
        if self._flight is None:
            return 0.0
        return max([self._engines[head].left_s() for head in self._flight.heads])

    def finish(self, clock: Clock) -> list[tuple[Part, Refused]]:
        """Wait for the step under way, if there is one, so that the next can begin; whose rows were
        refused."""
        flight = self._flight
        if flight is None:
            return []
        late_s = max(0.0, -self.left_s())
        self._flight = None
        began_s = flight.started_s if self.by_itself else clock()
        outcomes = self._collect(flight)
        ended_s = self._last_step_s = clock() - late_s
        if self.price > 0.0:
            self._narrow(flight, outcomes)
        beams: list[int] = []
        refused: list[tuple[Part, Refused]] = []
        for part, outcome in zip(flight.parts, outcomes, strict=True):
            if isinstance(outcome, Advanced):
                beams.append(outcome.beams if part.going_on else 0)
                continue
            beams.append(0)
            if isinstance(outcome, Refused):
                refused.append((part, outcome))
        failed = frozenset([part.turn.key for part, _ in refused]) if refused else NOBODY
        ahead = going_ahead(flight.parts, outcomes) if self._ahead else NO_ROWS
        self._scheduler.handle(StepEnded(tuple(beams), failed, ahead))
        self.hurried = self.by_itself and self._scheduler.num_waiting > 0
        self._ended.append(Ended(flight, outcomes, began_s, ended_s))
        return refused

    def take_ended(self) -> list[Ended]:
        """Those that have ended since the last time."""
        ended, self._ended = self._ended, []
        return ended

    def _launch(self, turns: tuple[Turn, ...], clock: Clock) -> None:
        """One engine step per head."""
        sessions = [self._sessions[turn.key] for turn in turns]
        items: list[WorkItem] = []
        blocks: list[Block | None] = []
        for turn, session in zip(turns, sessions, strict=True):
            rows = session.rows
            assert rows is not None
            if turn.phase is GROW:
                items.append(Grow(rows))
                blocks.append(session.drafting)
            elif turn.phase is AHEAD:
                items.append(GoAhead(rows))
                blocks.append(session.going_ahead)
            else:
                block = session.blocks[0]
                items.append(self._extension(session, rows, block, turn))
                blocks.append(block)
        started_s = clock()
        heads = self._launch_items(items, sessions)
        # What is left to do is done while the engine runs.
        parts = [
            Part(turn, session, head, item.session, block)
            for turn, session, head, item, block in zip(turns, sessions, heads, items, blocks, strict=True)
        ]
        waited_s = started_s - max(self._last_step_s, self._begin_blocks(parts, started_s))
        self._flight = Flight(parts, tuple(dict.fromkeys(heads)), started_s, waited_s)

    def _launch_items(self, items: list[WorkItem], sessions: list[Session]) -> list[str]:
        """Each engine gets its items; whose, by item."""
        if len(self._engines) == 1:
            ((head, engine),) = self._engines.items()
            engine.launch(items)
            return [head] * len(items)
        heads = [session.head.name for session in sessions]
        for head in dict.fromkeys(heads):
            self._engines[head].launch([item for item, its in zip(items, heads, strict=True) if its == head])
        return heads

    def _begin_blocks(self, parts: list[Part], started_s: float) -> float:
        """Since when the first of them could have run, had nothing been in its way."""
        ready_s = started_s
        for part in parts:
            block = part.block
            if block is not None and block.started_s is None:
                block.started_s = started_s
                ready_s = min(ready_s, block.arrived_s)
            elif part.turn.phase is not AHEAD:  # for which nobody waits
                ready_s = min(ready_s, self._last_step_s)
        return ready_s

    def _collect(self, flight: Flight) -> list[Outcome]:
        """What became of each part."""
        if len(flight.heads) == 1:
            return self._engines[flight.heads[0]].collect()
        collected = {head: iter(self._engines[head].collect()) for head in flight.heads}
        return [next(collected[part.head]) for part in flight.parts]

    def _narrow(self, flight: Flight, outcomes: list[Outcome]) -> None:
        """Where the engine is saturated, trees go on as far as their rows are worth its time."""
        for place, part in enumerate(flight.parts):
            outcome = outcomes[place]
            if isinstance(outcome, Advanced) and outcome.beams and part.going_on:
                engine = self._engines[part.head]
                outcomes[place] = engine.narrow(part.rows, self.price / part.session.trust.ratio)
                if outcomes[place] != outcome:
                    self._narrowed(part.block)

    def _narrowed(self, block: Block | None) -> None:
        """The tree on `block` lost rows; it is counted once."""
        if block is not None and not block.narrowed:
            block.narrowed = True
            self._tell_narrowed()

    def _extension(self, session: Session, rows: SessionRows, block: Block, turn: Turn) -> Extend:
        """The next rows of `block`, and the tree on them if it is time for that."""
        arrived, done = block.rows, block.done
        if turn.ends_block:
            session.blocks.popleft()
        limits = None
        if turn.starts_tree:
            session.drafting, limits = block, block.limits
        if turn.ends_block and done == 0:  # all of them
            return Extend(rows, arrived.tokens, arrived.features, arrived.start, limits)
        block.done = end = done + turn.rows
        return Extend(
            rows, arrived.tokens[done:end], arrived.features[done:end], arrived.start + done, limits
        )


def going_ahead(parts: list[Part], outcomes: list[Outcome]) -> dict[SessionKey, int]:
    """Sessions whose trees are done and may go on, or go on already, and the rows of their next step."""
    rows: dict[SessionKey, int] = {}
    for part, outcome in zip(parts, outcomes, strict=True):
        if isinstance(outcome, TreeReady) and outcome.ahead and part.going_on:
            part.session.going_ahead = part.block
            rows[part.turn.key] = outcome.ahead
        elif isinstance(outcome, Advanced) and outcome.beams and part.turn.phase is AHEAD:
            rows[part.turn.key] = outcome.beams
    return rows
