"""In which order messages are received, steps run and answers leave: the worker's loop, and any other's.

An engine that computes by itself must not idle for the host. So a step is launched before the one before it
is answered, and what comes in while it runs is received for the next one.
"""

from __future__ import annotations

from typing import Protocol

from starsd_server.sessions import Sessions
from starsd_server.stepping import Clock

__all__ = ["MESSAGES_AT_ONCE", "Line", "run_step"]

MESSAGES_AT_ONCE = 256  # received between two steps: the loop stays responsive whatever comes in


class Line(Protocol):
    """Where the messages of the edges come in, and replies go out."""

    @property
    def num_waiting(self) -> int:
        """Messages that have come in and may be handed on now."""
        ...

    def look(self) -> None:
        """Take in what has come, and do what else there is to do now and then. Does not wait."""
        ...

    def wait(self, seconds: float) -> None:
        """The same, once something has come or so much time has passed."""
        ...

    def hand_on(self, at_most: int) -> None:
        """Let the sessions receive the next messages."""
        ...

    def reply(self) -> None:
        """Send what the sessions have in their outbox."""
        ...


def run_step(sessions: Sessions, line: Line, clock: Clock) -> bool:
    """Receive what waits in line, and run a step if anyone is ready; whether one was run.

    What the step before has done is answered while this one runs."""
    if not sessions.hurried:
        line.hand_on(MESSAGES_AT_ONCE)
    begun = sessions.begin(clock)
    sessions.answer()
    line.reply()
    if begun and sessions.by_itself:
        receive_during_step(sessions, line)
    sessions.finish(clock)
    return begun


def receive_during_step(sessions: Sessions, line: Line) -> None:
    """Until it is done, and until what was there when it began has been received, however late that makes
    it."""
    line.look()
    due = line.num_waiting
    while (left_s := sessions.left_s()) > 0 or due > 0:
        if line.num_waiting:
            due -= 1
            line.hand_on(1)
            line.reply()
        else:
            due = 0  # what is left of it may not be handed on now
            line.wait(left_s)
