"""How trees share an engine that has too little time for all of them. Pure; `now` is monotonic seconds.

While the engine has room, trees grow as they were asked for. Saturated, every second given to one session is
taken from the others, and a second brings what all rounds together bring in one. A row is run only while what
it is likely to bring is worth its time at that price, whosever it is: all trees get narrower and shallower,
and nobody queues for the rows that would have brought least. docs/policy.md has the model.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from starsd_server.scheduling import Phase, Turn

__all__ = ["Sharing", "Trust"]

GROW = Phase.GROW  # a member is slow to look up

MEMORY_S = 1.0  # what happened so long ago counts 1/e
# The engine is saturated when steps carry more rows than come free, so that a row delays all others', and it
# is in a step for this part of the time or more: devices that are in step with each other leave pauses.
BUSY = 0.5
# It stays so, narrower trees taking less time, until a row's time is worth clearly less than when it began.
RELAXED = 0.8
# Trees of a session: what a new one is believed, in tokens, and how long old ones count, in trees.
PRIOR_TOKENS = 8.0
MEMORY_TREES = 64


class Sharing:
    """Prices the time of an engine that carries `free_rows` in a step for hardly more than one row costs."""

    def __init__(self, free_rows: int) -> None:
        self._free_rows = free_rows
        # What there was lately of each, older things counting less.
        self._tokens = self._seconds = self._rows = self._steps = 0.0
        self._at = -math.inf  # when they were brought up to date
        self._began: float | None = None  # the price when the engine got saturated; None: there is room

    def brought(self, tokens: int, now: float) -> None:
        """A round is over that committed `tokens`, the bonus included."""
        self._fade(now)
        self._tokens += tokens

    def stepped(self, turns: Iterable[Turn], seconds: float, now: float) -> float:
        """A step has ended. Returns the price: tokens that a row of the next one has to bring to be worth its
        time. 0 while there is room, and while only one tree grows: its time is nobody else's."""
        trees = rows = tree_rows = 0
        for turn in turns:
            rows += turn.rows
            if turn.starts_tree or turn.phase is GROW:
                trees += 1
                tree_rows += turn.rows
        self._fade(now)
        if tree_rows:
            # Of a step that prompts share, the trees' part.
            self._seconds += seconds * tree_rows / rows
            self._rows += tree_rows
            self._steps += 1
        price = self._price()
        return price if trees > 1 else 0.0

    def _fade(self, now: float) -> None:
        if now > self._at:
            kept = math.exp((self._at - now) / MEMORY_S)
            self._tokens *= kept
            self._seconds *= kept
            self._rows *= kept
            self._steps *= kept
            self._at = now

    def _price(self) -> float:
        # By the second.
        busy, rows = self._seconds / MEMORY_S, self._rows / MEMORY_S
        free_rows = self._free_rows * self._steps / MEMORY_S
        if free_rows <= 0.0:
            return 0.0
        row_s = busy / max(rows, free_rows)
        price = self._tokens / MEMORY_S * row_s
        if self._began is not None and price < RELAXED * self._began:
            self._began = None
        if self._began is None and rows > free_rows and busy >= BUSY:
            self._began = price
        return price if self._began is not None else 0.0


class Trust:
    """How far a head's word is good for one session: tokens that its trees brought over those it expected."""

    def __init__(self) -> None:
        self._expected = self._brought = PRIOR_TOKENS
        self._latest: float | None = None  # expected of the tree that is being verified

    @property
    def ratio(self) -> float:
        return self._brought / self._expected

    def sent(self, expected: float) -> None:
        """A tree left whose nodes' probabilities, without the root's, add up to `expected`."""
        self._latest = expected

    def brought(self, accepted: int) -> None:
        """The round is over."""
        if self._latest is None:
            return  # told already
        keep = 1.0 - 1.0 / MEMORY_TREES
        self._expected = keep * self._expected + self._latest
        self._brought = keep * self._brought + accepted
        self._latest = None
