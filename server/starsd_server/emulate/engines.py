"""An engine that answers with recorded trees after the time that a certain GPU would take for each step.

The scheduler, the sessions, the wire and the processes are the real ones; only the head's arithmetic is
replaced by waiting. How long follows from a roofline: a step reads the weights once, whatever the batch,
reads each session's keys and values, computes for every row, and pays a fixed price for launching.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import resources

import numpy as np

from starsd_edge.errors import UsageError
from starsd_server.emulate.trace import RecordedTree, RecordedTrees, row_key
from starsd_server.step import NO_TREE, Advanced, Extend, Outcome, Refused, SessionRows, TreeReady, WorkItem

__all__ = ["EmulatedEngine", "EngineProfile", "engine_profile_names", "load_engine_profile"]

SPIN_S = 0.0001  # the end of a wait is spun: sleeping is only good to a tenth of a millisecond


@dataclass(frozen=True, slots=True)
class EngineProfile:
    """What a step costs on an accelerator. Sources are in the profile's file.

    weight_bytes       read by every step: the head's layer and its LM head
    kv_row_bytes       of one committed row of a session
    bytes_per_s        memory bandwidth that is reached
    flop_per_row       floating-point operations of one row
    flop_per_s         throughput that is reached
    launch_s           kernels, sampling and the host's part of one step
    """

    name: str
    device: str
    head: str
    source: str
    derivation: str
    weight_bytes: float
    kv_row_bytes: float
    bytes_per_s: float
    flop_per_row: float
    flop_per_s: float
    launch_s: float

    @property
    def free_rows(self) -> int:
        """Rows of a step whose arithmetic takes no longer than reading the weights."""
        return max(1, int(self.weight_bytes / self.bytes_per_s * self.flop_per_s / self.flop_per_row))

    def step_s(self, rows: int, kv_rows: int) -> float:
        """Seconds of a step over `rows` rows whose sessions hold `kv_rows` rows together."""
        reading = (self.weight_bytes + kv_rows * self.kv_row_bytes) / self.bytes_per_s
        return self.launch_s + max(reading, rows * self.flop_per_row / self.flop_per_s)


def engine_profile_names() -> list[str]:
    folder = resources.files("starsd_server.emulate") / "profiles"
    return sorted(entry.name[: -len(".json")] for entry in folder.iterdir() if entry.name.endswith(".json"))


def load_engine_profile(name: str) -> EngineProfile:
    """Raises UsageError that lists the names there are."""
    names = engine_profile_names()
    if name not in names:
        raise UsageError(f"no engine profile {name!r}: choose real or one of {', '.join(names)}")
    file = resources.files("starsd_server.emulate") / "profiles" / f"{name}.json"
    return EngineProfile(name=name, **json.loads(file.read_text(encoding="utf-8")))


@dataclass(slots=True)
class _Context:
    """What the emulated engine keeps of a slot."""

    keys: list[int] = field(default_factory=lambda: [0])  # row_key of the first 0, 1, ... rows
    tree: RecordedTree | None = None
    floors: list[float] = field(default_factory=list)  # of the rows of each level that has begun

    @property
    def rows(self) -> int:
        """Of the level that has begun last."""
        assert self.tree is not None
        return int((self.tree.levels[len(self.floors) - 1] >= self.floors[-1]).sum())


class EmulatedEngine:
    """A StepEngine for sessions that replay a trace."""

    by_itself = True

    def __init__(
        self,
        profile: EngineProfile,
        trees: RecordedTrees,
        slots: int,
        max_len: int,
        clock: Callable[[], float] = time.monotonic,
        wait_until: Callable[[float], None] | None = None,
    ) -> None:
        """`wait_until` lets time pass until `clock` says so; both are told where time is a virtual one."""
        self._profile, self._trees, self._max_len = profile, trees, max_len
        self._clock, self._wait_until = clock, wait_until or wait_until_s
        self._contexts = [_Context() for _ in range(slots)]
        self._outcomes: list[Outcome] = []
        self._done_s = 0.0  # when the step under way is

    def reset(self, slot: int) -> SessionRows:
        self._contexts[slot] = _Context()
        return SessionRows(slot)

    def launch(self, items: list[WorkItem]) -> None:
        """The accelerator is busy from now on, for the time that the profile takes for these rows."""
        started_s = self._clock()
        rows = sum(self._rows(item) for item in items)
        kv_rows = sum(item.session.committed for item in items)
        self._done_s = started_s + self._profile.step_s(rows, kv_rows)
        self._outcomes = [
            self._extend(item) if isinstance(item, Extend) else self._grow(item) for item in items
        ]

    def left_s(self) -> float:
        return self._done_s - self._clock()

    def collect(self) -> list[Outcome]:
        """The recorded outcomes."""
        self._wait_until(self._done_s)
        return self._outcomes

    def _rows(self, item: WorkItem) -> int:
        if isinstance(item, Extend):
            return item.num_rows
        context = self._contexts[item.session.slot]
        return context.rows

    def _extend(self, item: Extend) -> Outcome:
        context, session = self._contexts[item.session.slot], item.session
        if item.start > session.committed or item.start + len(item.tokens) > self._max_len:
            return Refused("rows that do not fit")
        del context.keys[item.start + 1 :]
        for token in item.tokens.tolist():
            context.keys.append(row_key(np.array([token], np.int32), context.keys[-1]))
        session.committed = item.start + len(item.tokens)
        if item.limits is None:
            return Advanced()
        context.tree, context.floors = self._trees.find(session.committed, context.keys[-1]), []
        return NO_TREE if context.tree is None else self._next(context)

    def _grow(self, item: WorkItem) -> Outcome:
        return self._next(self._contexts[item.session.slot])

    def narrow(self, session: SessionRows, floor: float) -> Outcome:
        """See StepEngine. A floor holds for deeper levels, too: their rows have no parents below it."""
        context = self._contexts[session.slot]
        context.floors[-1] = max(context.floors[-1], floor)
        return self._outcome(context)

    def _next(self, context: _Context) -> Outcome:
        assert context.tree is not None
        if len(context.floors) == len(context.tree.levels):
            return _what_was_grown(context.tree.tree, context.floors)
        context.floors.append(context.floors[-1] if context.floors else 0.0)
        return self._outcome(context)

    def _outcome(self, context: _Context) -> Outcome:
        assert context.tree is not None
        rows = context.rows
        return Advanced(rows) if rows else _what_was_grown(context.tree.tree, context.floors)


def _what_was_grown(tree: TreeReady, floors: list[float]) -> TreeReady:
    """A recorded tree without the children of rows below the floor of their level. What these children had
    kept out of the tree is not known: a real one has some more nodes."""
    if not floors or floors[-1] <= 0.0:
        return tree
    floors = [0.0, *floors]  # by depth of the parent: children of the root are always there
    depths, places = [0], [0]  # by node, root included; -1: it has no place
    kept: list[int] = []
    for node, parent in enumerate(tree.parents.tolist()):
        depth = depths[parent]
        depths.append(depth + 1)
        ran = (
            places[parent] >= 0
            and depth < len(floors)
            and (parent == 0 or tree.probabilities[parent - 1] >= floors[depth])
        )
        places.append(len(kept) + 1 if ran else -1)
        if ran:
            kept.append(node)
    parents = np.array(places, np.int32)[tree.parents[kept]]
    return TreeReady(tree.tokens[kept], parents, tree.probabilities[kept])


def wait_until_s(until_s: float) -> None:
    """Let real time pass."""
    seconds = until_s - time.monotonic()
    if seconds > SPIN_S:
        time.sleep(seconds - SPIN_S)
    while time.monotonic() < until_s:
        pass
