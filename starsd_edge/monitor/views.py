"""What a watcher wants to know of a device or a service, worked out from two of its snapshots.

A view holds the newest state and the one at the start of the window; figures are differences between the two,
worked out when asked for. None means that there is nothing to say yet, and is shown as "-".
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from starsd_edge.latency import Histogram
from starsd_edge.protocol.telemetry import (
    BoardReading,
    DeviceSnapshot,
    Energy,
    EngineSnapshot,
    Mode,
    ServiceSnapshot,
    SessionSnapshot,
    Stage,
    Work,
)

__all__ = ["DeviceView", "Status", "ServiceView", "SessionView", "WorkView", "difference_of"]

EMPTY_WORK = Work()
EMPTY_HISTOGRAM = Histogram()


class Status(enum.Enum):
    """How a device is doing, worst first."""

    DOWN = "down"
    PLAIN = "plain"
    DRAFTING = "drafting"
    IDLE = "idle"
    GONE = "gone"  # it said goodbye
    ABSENT = "absent"  # trusted, and not heard of since the service started

    @property
    def rank(self) -> int:
        """0 is the worst."""
        return list(Status).index(self)


def difference_of(now: Mapping[str, int], before: Mapping[str, int]) -> dict[str, int]:
    """What each count grew by, those that did not grow left out."""
    grown = {name: count - before.get(name, 0) for name, count in now.items()}
    return {name: count for name, count in grown.items() if count > 0}


def since(now: Histogram, before: Histogram) -> Histogram:
    """What was added since `before`; all of it where a restarted edge began to count anew."""
    try:
        return now.minus(before)
    except ValueError:
        return now


class WorkView:
    """Figures of one `Work` over a window of `seconds`."""

    def __init__(self, now: Work, before: Work, seconds: float) -> None:
        self.now, self.before, self.seconds = now, before, seconds
        self._stages: dict[Stage, Histogram] = {}

    def rate(self, name: str) -> float | None:
        """Growth of a counter per second."""
        return self.grown(name) / self.seconds if self.seconds > 0 else None

    def grown(self, name: str) -> int:
        """Growth of a counter over the window."""
        return max(0, int(getattr(self.now, name) - getattr(self.before, name)))

    @cached_property
    def tokens_per_s(self) -> float | None:
        return self.rate("tokens")

    @cached_property
    def acceptance_length(self) -> float | None:
        """Mean tokens a verified tree brought, bonus included."""
        drafts = self.grown("num_drafts")
        return 1 + self.grown("accepted_tokens") / drafts if drafts else None

    @cached_property
    def acceptance_rate(self) -> float | None:
        """Accepted share of drafted tokens."""
        drafted = self.grown("draft_tokens")
        return self.grown("accepted_tokens") / drafted if drafted else None

    @cached_property
    def depth_rates(self) -> list[float]:
        """Acceptance rate by depth: accepted there, of the trees whose walk came so far and that went on."""
        before_accepted, before_drafted = self.before.accepted_per_depth, self.before.tried_per_depth
        rates = []
        for depth, accepted in enumerate(self.now.accepted_per_depth):
            drafted = self.now.tried_per_depth[depth] if depth < len(self.now.tried_per_depth) else 0
            drafted -= before_drafted[depth] if depth < len(before_drafted) else 0
            accepted -= before_accepted[depth] if depth < len(before_accepted) else 0
            rates.append(accepted / drafted if drafted > 0 else 0.0)
        while rates and rates[-1] == 0.0:
            rates.pop()
        return rates

    @cached_property
    def plain_share(self) -> float | None:
        """Share of committed tokens that came from plain steps."""
        tokens = self.grown("tokens")
        return self.grown("plain_tokens") / tokens if tokens else None

    @cached_property
    def tree_nodes(self) -> float | None:
        """Mean size of verified trees, root included."""
        return since(self.now.tree_nodes, self.before.tree_nodes).mean

    @cached_property
    def fallbacks(self) -> dict[str, int]:
        return difference_of(self.now.fallbacks, self.before.fallbacks)

    def stage(self, stage: Stage) -> Histogram:
        """Durations of a stage within the window."""
        if stage not in self._stages:
            now = self.now.stages.get(stage, EMPTY_HISTOGRAM)
            self._stages[stage] = since(now, self.before.stages.get(stage, EMPTY_HISTOGRAM))
        return self._stages[stage]


EMPTY_SESSION = SessionSnapshot("")


@dataclass(eq=False)
class SessionView:
    """One session: its snapshot, and the one at the start of the window."""

    session: SessionSnapshot
    before: SessionSnapshot
    seconds: float

    @cached_property
    def work(self) -> WorkView:
        return WorkView(self.session.work, self.before.work, self.seconds)


@dataclass(eq=False)
class DeviceView:
    """One device: its snapshot, what it had done at the start of the window, and its recent speeds."""

    service: str
    device: DeviceSnapshot
    before: DeviceSnapshot | None
    seconds: float
    history: list[float]  # tokens/s, oldest first

    @property
    def key(self) -> str:
        """Unique among all services."""
        return f"{self.service}/{self.device.device}"

    @cached_property
    def work(self) -> WorkView:
        return WorkView(self.device.work, self.before.work if self.before else EMPTY_WORK, self.seconds)

    @cached_property
    def sessions(self) -> list[SessionView]:
        """Its live sessions; one that opened within the window counts from nothing."""
        before = {session.session: session for session in self.before.sessions} if self.before else {}
        return [
            SessionView(session, before.get(session.session, EMPTY_SESSION), self.seconds)
            for session in self.device.sessions
        ]

    @cached_property
    def status(self) -> Status:
        if self.device.left:
            return Status.GONE
        if not self.device.connected:
            return Status.ABSENT if self.device.quiet_s is None else Status.DOWN
        modes = {session.mode for session in self.device.sessions}
        if Mode.PLAIN in modes:
            return Status.PLAIN
        return Status.DRAFTING if Mode.DRAFTING in modes else Status.IDLE

    @cached_property
    def reason(self) -> str:
        """Why it does not draft; "" while it does or need not."""
        if self.status is Status.DOWN or self.status is Status.ABSENT:
            return self.device.reason
        plain = (session.reason for session in self.device.sessions if session.mode is Mode.PLAIN)
        return next((reason for reason in plain if reason), "")

    @property
    def board(self) -> BoardReading | None:
        return self.device.board

    @cached_property
    def joules_per_token(self) -> float | None:
        """Over everything the window saw; None where the board reports no power."""
        energy = self.energy
        tokens = energy.drafting_tokens + energy.plain_tokens if energy else 0
        return (energy.drafting_j + energy.plain_j) / tokens if energy and tokens else None

    @cached_property
    def energy(self) -> Energy | None:
        """Joules and tokens since the edge started: single answers are too short for a window."""
        return self.device.energy

    @cached_property
    def speedup(self) -> float | None:
        """Tokens/s against the device's own plain speed."""
        plain, speed = self.device.plain_tokens_per_s, self.work.tokens_per_s
        return speed / plain if plain and speed else None


@dataclass(eq=False)
class ServiceView:
    """One service over the window."""

    snapshot: ServiceSnapshot
    before: ServiceSnapshot | None
    seconds: float
    history: list[float]  # tokens/s of all devices, oldest first

    @property
    def engine(self) -> EngineSnapshot:
        return self.snapshot.engine

    @cached_property
    def busy_fraction(self) -> float | None:
        """Share of time the engine was inside a step."""
        if self.seconds <= 0:
            return None
        return min(1.0, (self.engine.busy_s - self._engine_before.busy_s) / self.seconds)

    @cached_property
    def demand_fraction(self) -> float | None:
        """Share of time in which some session waited for the engine."""
        if self.seconds <= 0:
            return None
        return min(1.0, (self.engine.demand_s - self._engine_before.demand_s) / self.seconds)

    @cached_property
    def batch_rows(self) -> float | None:
        """Mean rows of a step."""
        return since(self.engine.batch_rows, self._engine_before.batch_rows).mean

    @cached_property
    def step_s(self) -> Histogram:
        return since(self.engine.step_s, self._engine_before.step_s)

    @cached_property
    def kv_fraction(self) -> float | None:
        return self.engine.kv_rows_used / self.engine.kv_rows_total if self.engine.kv_rows_total else None

    @cached_property
    def refusals(self) -> dict[str, int]:
        """Admissions refused within the window, by reason."""
        return difference_of(self.engine.refusals, self._engine_before.refusals)

    @cached_property
    def bytes_per_s(self) -> float | None:
        if self.seconds <= 0:
            return None
        now = self.snapshot.gateway
        before = self.before.gateway if self.before else None
        earlier = before.bytes_up + before.bytes_down if before else 0
        return (now.bytes_up + now.bytes_down - earlier) / self.seconds

    @cached_property
    def ahead_hit_rate(self) -> float | None:
        """Share of trees drafted ahead that were of use."""
        drafted = self.engine.ahead_drafts - self._engine_before.ahead_drafts
        return (self.engine.ahead_hits - self._engine_before.ahead_hits) / drafted if drafted > 0 else None

    @cached_property
    def narrowed_trees(self) -> int:
        """Within the window."""
        return self.engine.narrowed_trees - self._engine_before.narrowed_trees

    @property
    def _engine_before(self) -> EngineSnapshot:
        return self.before.engine if self.before else EMPTY_ENGINE


EMPTY_ENGINE = EngineSnapshot()
