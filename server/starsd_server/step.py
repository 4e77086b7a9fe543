"""What sessions and a draft head's engine say to each other: the rows of a step, and what became of them."""

from __future__ import annotations

import abc
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, TypeAlias

import numpy as np
from msgspec import Struct
from torch import Tensor

from starsd_edge.types import FeatureArray, Float32Array, TokenArray
from starsd_server.heads.ahead import AheadGrowth
from starsd_server.heads.grow import GrowthLimits, TreeGrowth

__all__ = [
    "NO_TREE",
    "Advanced",
    "Extend",
    "GoAhead",
    "Grow",
    "Outcome",
    "OwnThread",
    "Refused",
    "SessionRows",
    "StepEngine",
    "TreeReady",
    "WorkItem",
]


@dataclass(slots=True)
class SessionRows:
    """A session as the engine knows it: a slot, and the tree that is being grown on top of it.

    committed  rows of committed tokens in the slot; whatever lies behind them is the tree's
    """

    slot: int
    committed: int = 0
    growth: TreeGrowth | None = None
    tip: Tensor | None = field(default=None, repr=False)  # [1, H] output of the last committed row
    # The step before: its output, and where this session's rows begin in it.
    output: Tensor | None = field(default=None, repr=False)
    output_start: int = 0
    # [b, t] -inf where a row of the tree's newest level does not see a tree row
    blocked: Float32Array | None = field(default=None, repr=False)
    ahead: AheadGrowth | None = None  # the tree that was answered, going on
    outputs: list[Tensor] = field(default_factory=list, repr=False)  # [b, H] of all rows of such a tree

    @property
    def tree(self) -> TreeGrowth:
        """The tree that grows; only while one does."""
        assert self.growth is not None
        return self.growth

    @property
    def beams(self) -> list[int]:
        """Rows of the tree's next level, by their places; only while one grows."""
        return self.tree.beams

    @property
    def goes_ahead(self) -> bool:
        """Whether its tree may go on once it is answered, or does."""
        return self.ahead is not None or (self.growth is not None and self.growth.limits.ahead is not None)

    def drop_tree(self) -> None:
        self.growth = self.output = self.blocked = self.ahead = None
        self.outputs = []


class Extend(NamedTuple):
    """Append committed rows; with `limits`, the last one is also the root of a new tree.

    Without rows, `limits` asks for a tree on what is held.

    tokens    int32 [n] of the target's vocabulary; row i follows the feature of the same row
    features  float16 or float32 [n, H]
    start     rows to keep of the session before these: what lies behind is replaced
    """

    session: SessionRows
    tokens: TokenArray
    features: FeatureArray
    start: int
    limits: GrowthLimits | None = None

    @property
    def num_rows(self) -> int:
        return len(self.tokens)


class Grow(NamedTuple):
    """Run the beams of the session's tree: one level more."""

    session: SessionRows

    @property
    def num_rows(self) -> int:
        return len(self.session.beams)


class GoAhead(Struct, frozen=True):
    """Run the next rows of a tree that was answered and goes on. Takes part in steps of its kind only."""

    session: SessionRows

    @property
    def growth(self) -> AheadGrowth:
        """The tree."""
        assert self.session.ahead is not None
        return self.session.ahead

    @property
    def num_rows(self) -> int:
        return len(self.growth.beams)


WorkItem: TypeAlias = Extend | Grow | GoAhead


class Advanced(Struct, frozen=True):
    """The rows are in; a tree that grows wants a step with `beams` rows, 0 when none grows."""

    beams: int = 0


class TreeReady(Struct, frozen=True):
    """The tree below the root, by falling probability.

    tokens         int32 [N - 1] of the target's vocabulary
    parents        int32 [N - 1] with the root as node 0
    probabilities  float32 [N - 1] cumulative
    ahead          rows of the step with which it may go on; 0: it may not
    """

    tokens: TokenArray
    parents: TokenArray
    probabilities: Float32Array
    ahead: int = 0


class Refused(Struct, frozen=True):
    """This session's rows were not used, for `reason`; it keeps the rows before them, and no tree."""

    reason: str


Outcome: TypeAlias = Advanced | TreeReady | Refused

NO_TREE = TreeReady(np.empty(0, np.int32), np.empty(0, np.int32), np.empty(0, np.float32))


class StepEngine(Protocol):
    """What sessions need of an engine: a step is launched, and collected when it is done."""

    @property
    def by_itself(self) -> bool:
        """Whether it computes from `launch` on, and not only while `collect` waits for it."""
        ...

    def reset(self, slot: int) -> SessionRows: ...

    def launch(self, items: list[WorkItem]) -> None:
        """Begin a step over `items`; none may be under way."""
        ...

    def left_s(self) -> float:
        """Seconds until the step under way is done, as far as is known; below zero: since when it is."""
        ...

    def collect(self) -> list[Outcome]:
        """Wait for the step under way; one outcome for each of its items, in order."""
        ...

    def narrow(self, session: SessionRows, floor: float) -> Outcome:
        """Of the next level of a session's tree, run only rows whose cumulative probability is `floor` at
        least. Its last outcome was Advanced with beams; this one takes its place, and where no row is left it
        is the tree as grown so far."""
        ...


class OwnThread(abc.ABC):
    """An engine that computes in its caller's thread: nothing goes on between `launch` and `collect`."""

    by_itself = False
    _launched: list[WorkItem]

    @abc.abstractmethod
    def step(self, items: list[WorkItem]) -> list[Outcome]:
        """Run `items` now."""

    def launch(self, items: list[WorkItem]) -> None:
        self._launched = items

    def left_s(self) -> float:
        return 0.0

    def collect(self) -> list[Outcome]:
        return self.step(self._launched)
