"""In which order the loop does things: a real engine, and a line that is told what comes when."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import pytest

from starsd_edge.protocol.messages import Draft
from starsd_server.engine import Engine
from starsd_server.sessions import Sessions
from starsd_server.step import Outcome, WorkItem
from starsd_server.step_loop import run_step

from .test_sessions import HINTS, Room, rows

Coming = Callable[[], None]
"""A message: what it does to the sessions."""


class Told:
    """A Line on which `there` waits. Of `coming` each look takes the first element's messages, each wait the
    next one's."""

    def __init__(
        self, sessions: Sessions, log: list[str], there: list[Coming], coming: list[list[Coming]]
    ) -> None:
        self._sessions, self._log, self._coming = sessions, log, deque(coming)
        self._inbox: deque[Coming] = deque(there)
        self.crowded = False

    @property
    def num_waiting(self) -> int:
        return 0 if self.crowded else len(self._inbox)

    def look(self) -> None:
        self._log.append("look")
        self._inbox += self._coming.popleft() if self._coming else []

    def wait(self, seconds: float) -> None:
        assert seconds > 0
        self.look()

    def hand_on(self, at_most: int) -> None:
        for _ in range(min(at_most, self.num_waiting)):
            self._log.append("receive")
            self._inbox.popleft()()

    def reply(self) -> None:
        if self._sessions.outbox:
            self._log.append("reply")


class Logged(Engine):
    """Computes in its caller's thread."""

    log: list[str]

    def launch(self, items: list[WorkItem]) -> None:
        self.log.append(f"launch {len(items)}")
        super().launch(items)

    def collect(self) -> list[Outcome]:
        self.log.append("collect")
        return super().collect()


class Accelerated(Logged):
    """Has not ended until it was asked a few times."""

    by_itself = True
    steps = 4
    _asked = 0

    def launch(self, items: list[WorkItem]) -> None:
        self._asked = 0
        super().launch(items)

    def left_s(self) -> float:
        self._asked += 1
        return max(0, self.steps - self._asked) * 1e-3


def drafting_room(engine: type[Logged]) -> tuple[Room, list[str], list[Coming]]:
    """Two devices that have sent their prompts, and the messages that ask for a tree."""
    log: list[str] = []
    engine.log = log
    room = Room(engine=engine)
    edges = [room.prompted(name, seed=seed) for seed, name in enumerate(("first", "second"))]
    log.clear()
    return room, log, [lambda edge=edge: edge.update(*rows(1, 2), HINTS) for edge in edges]  # type: ignore[misc]


def test_what_comes_in_while_an_accelerator_computes_is_in_the_next_step() -> None:
    room, log, (first, second) = drafting_room(Accelerated)
    line = Told(room.sessions, log, [first], [[second]])
    assert run_step(room.sessions, line, room.clock)
    assert ["receive", "launch 1", "look", "receive", "look", "look", "collect"] == log
    log.clear()
    assert run_step(room.sessions, line, room.clock)
    assert ["launch 2", "look", "look", "look", "look", "collect"] == log


def test_a_tree_that_goes_on_does_not_wait_for_what_is_there() -> None:
    """However long the host takes to receive it, and it is received in time for the step after."""
    room, log, (first, second) = drafting_room(Accelerated)
    line = Told(room.sessions, log, [first], [[], [], [], [second, second]])
    assert run_step(room.sessions, line, room.clock)
    line.look()
    log.clear()
    Accelerated.steps = 0  # it has ended as soon as it is launched
    try:
        assert run_step(room.sessions, line, room.clock)
    finally:
        Accelerated.steps = 4
    assert ["launch 1", "look", "receive", "receive", "collect"] == log


def test_an_engine_in_the_loops_own_thread_is_given_what_is_there_and_not_looked_away_from() -> None:
    room, log, (first, second) = drafting_room(Logged)
    line = Told(room.sessions, log, [first], [[second]])
    assert run_step(room.sessions, line, room.clock)
    assert ["receive", "launch 1", "collect"] == log
    line.look()
    log.clear()
    assert run_step(room.sessions, line, room.clock)
    assert ["receive", "launch 2", "collect"] == log


@pytest.mark.parametrize("engine", [Logged, Accelerated])
def test_a_tree_is_sent_while_the_next_step_runs(engine: type[Logged]) -> None:
    room, log, (first, second) = drafting_room(engine)
    line = Told(room.sessions, log, [first], [])
    while run_step(room.sessions, line, room.clock):
        assert "reply" not in log
        log.clear()
    assert "reply" in log
    assert [Draft] == [type(message) for message in room.heard("first")]
    second()
    assert run_step(room.sessions, line, room.clock)


def test_what_may_not_be_handed_on_is_not_waited_for() -> None:
    """The other end of the line is slow: the loop turned around what it could not take."""
    room, log, (first, second) = drafting_room(Accelerated)
    line = Told(room.sessions, log, [first], [[second, second]])
    hand_on = line.hand_on

    def crowded_from_now_on(at_most: int) -> None:
        hand_on(at_most)
        line.crowded = log.count("receive") >= 2

    line.hand_on = crowded_from_now_on  # type: ignore[method-assign]
    assert run_step(room.sessions, line, room.clock)
    assert 2 == log.count("receive")
