"""One device of a simulated fleet: which service it uses, and what becomes of it when that fails."""

from __future__ import annotations

import abc
import itertools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from starsd_edge.link.placement import Place, Placement
from starsd_edge.protocol.session_table import SessionKey
from starsd_server.capacity.recorded import Played
from starsd_server.scheduling import Phase, Turn

if TYPE_CHECKING:
    from starsd_server.capacity.fleet import Fleet, Service

__all__ = ["Edge", "PlayedEdge"]

RETRY_S = 1.0  # plain steps before a device asks again that found no service with room


class Edge(abc.ABC):
    """A device and its session; `tokens` and `plain_tokens` count since somebody set them to 0.

    context  rows that its service holds
    """

    def __init__(self, fleet: Fleet, number: int, places: Sequence[Place]) -> None:
        self._fleet, self.number = fleet, number
        self._name = f"jet{number}"
        self._key = SessionKey(self._name, number)
        self._placement = Placement(self._name, places)
        self._index = {place.address: place_number for place_number, place in enumerate(places)}
        self._epoch = 0  # counts losses of the service: what was under way then comes no more
        self._level = 0
        self._beams: tuple[int, ...] = ()  # rows of the levels of the tree that is asked for
        self.tokens = self.plain_tokens = 0.0
        self.context = 0

    @abc.abstractmethod
    def begin(self) -> None:
        """Its first moment."""

    @abc.abstractmethod
    def drafted(self) -> None:
        """The service has its tree."""

    @abc.abstractmethod
    def _opened(self) -> None:
        """It has a session, which holds no rows."""

    @abc.abstractmethod
    def _meanwhile(self, seconds: float, action: Callable[[], None]) -> None:
        """`action` after so long without a service."""

    def end(self) -> None:  # noqa: B027
        """The simulation is over."""

    @property
    def _service(self) -> Service:
        return self._fleet.services[self._index[self._placement.current.address]]

    def join(self) -> None:
        """Open a session, here or at the next service that has room."""
        for _ in range(len(self._placement)):
            if not self._service.is_up:
                self.lost()
                return
            if self._service.open(self._key, self):
                self._epoch += 1
                self._opened()
                return
            self._fleet.refused += 1
            if not self._placement.leave(self._fleet.now_s):
                break
            self._fleet.moves += 1
        self._meanwhile(RETRY_S, self.join)

    def lost(self) -> None:
        """The service died: that is certain after a while, then the next one."""
        self._epoch += 1
        self._meanwhile(self._fleet.plan.detect_s, self._move)

    def evicted(self) -> None:
        self._epoch += 1
        self.after(self._fleet.plan.rtt_s, self.join)

    def grown(self, turn: Turn) -> int:
        """Rows of the next level of its tree, after a step it took part in; 0: done, or none was begun."""
        if turn.phase is Phase.EXTEND and not turn.starts_tree:
            return 0
        self._level = 0 if turn.phase is Phase.EXTEND else self._level + 1
        return self._beams[self._level] if self._level < len(self._beams) else 0

    def after(self, seconds: float, action: Callable[[], None]) -> None:
        """Unless its service is lost before."""
        epoch = self._epoch

        def unless_lost() -> None:
            if epoch == self._epoch:
                action()

        self._fleet.after(seconds, unless_lost)

    def _leave_for_the_preferred(self) -> None:
        """Between two conversations: nothing is lost by going back."""
        self._service.close(self._key)
        self.context = 0
        if self._placement.prefers_another(self._fleet.now_s):
            self._placement.go_back(self._fleet.now_s)
            self._fleet.moves += 1

    def _send(self, rows: int) -> None:
        self.after(self._fleet.plan.rtt_s / 2, lambda: self._arrive(rows))

    def _arrive(self, rows: int) -> None:
        # A service that fails tells nobody: its edges find out after `detect_s`.
        if self._key in self._service.members:
            self._service.rows(self._key, rows)

    def _move(self) -> None:
        self._fleet.moves += 1
        if self._placement.leave(self._fleet.now_s):
            self.join()
        else:  # all have failed of late
            self._meanwhile(RETRY_S, self.join)


class PlayedEdge(Edge):
    """Plays recorded rounds: it waits for its tree while it has a service, and decodes plainly while not."""

    def __init__(self, fleet: Fleet, number: int, places: Sequence[Place]) -> None:
        super().__init__(fleet, number, places)
        played = fleet.plan.conversations
        self._conversations = itertools.cycle(
            [*played[number % len(played) :], *played[: number % len(played)]]
        )
        self._rounds: list[Played] = []

    def begin(self) -> None:
        self.join()

    def drafted(self) -> None:
        plan, round_ = self._fleet.plan, self._rounds[0]
        self.after(plan.rtt_s / 2 + plan.curve(round_.nodes), self._verified)

    def _opened(self) -> None:
        """The whole context goes up."""
        if not self._rounds:
            self._next_conversation()
        self._update(self.context + self._rounds[0].new_rows)

    def _verified(self) -> None:
        round_ = self._rounds.pop(0)
        self.tokens += round_.tokens
        self.context += round_.new_rows
        if not self._rounds:
            self._leave_for_the_preferred()
            self._next_conversation()
            self.join()
            return
        self._update(self._rounds[0].new_rows)

    def _update(self, rows: int) -> None:
        self._beams = self._rounds[0].beams
        self._send(rows)

    def _meanwhile(self, seconds: float, action: Callable[[], None]) -> None:
        """The conversation's recorded rounds stay where they are."""
        tokens = seconds / self._fleet.plan.curve.plain_s
        self.tokens += tokens
        self.plain_tokens += tokens
        self.after(seconds, action)

    def _next_conversation(self) -> None:
        self._rounds = list(next(self._conversations))
