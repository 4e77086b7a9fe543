"""Tells the draft service how this device is doing, once a second: what `starsd monitor` shows of it.

A thread of its own reads the counters of the decode loops and the board; it decides and delays nothing.
Reports count up from the start of this process, so one that is lost is made good by the next.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Sequence
from typing import Protocol

from starsd_edge.chat.contexts import Context
from starsd_edge.chat.status import NOT_EXACT, NOT_WORTH_WAITING, SWITCHED_OFF
from starsd_edge.link.client import RemoteDrafter
from starsd_edge.metrics import SessionStats
from starsd_edge.protocol.telemetry import (
    BoardReading,
    EdgeReport,
    EdgeSession,
    Energy,
    Mode,
    Stage,
    Work,
)

__all__ = ["Board", "EdgeReporter", "work_of"]

LOOK_EVERY_S = 0.5  # energy is told apart by mode to this
LOOKS_A_REPORT = 2


class Board(Protocol):
    """Readings of the device (starsd_jetson.board.telemetry.BoardTelemetry)."""

    def latest(self) -> BoardReading | None: ...

    def joules(self) -> float | None: ...

    def close(self) -> None: ...


class EdgeReporter:
    """Reports the contexts that `contexts` gives.

    plain_tokens_per_s  this device's own plain speed, as calibrated
    board               None where nothing reads it; the caller closes it
    """

    def __init__(
        self,
        contexts: Callable[[], Sequence[Context]],
        *,
        software: str,
        plain_tokens_per_s: float | None = None,
        board: Board | None = None,
    ) -> None:
        self._contexts, self._board = contexts, board
        self._software, self._plain_tokens_per_s = software, plain_tokens_per_s
        self._boot = secrets.token_hex(8)
        self._watched: dict[int, WatchedContext] = {}
        self._energy: Energy | None = None
        self._joules: float | None = None
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Report from now on, until `close`."""
        self._thread = threading.Thread(target=self._run, name="edge-reporter", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        looks = 0
        while not self._stop.wait(LOOK_EVERY_S):
            self.look()
            looks += 1
            if looks % LOOKS_A_REPORT == 0:
                self.send()

    def look(self) -> None:
        """Note what each context did since the last look, and what the board used meanwhile."""
        tokens = {Mode.DRAFTING: 0, Mode.PLAIN: 0, Mode.IDLE: 0}
        for context in list(self._contexts()):
            if isinstance(context.drafter, RemoteDrafter):
                watched = self._watched.setdefault(context.drafter.session, WatchedContext(context))
                tokens[watched.look()] += watched.new_tokens
        self._share_energy(tokens)

    def send(self) -> None:
        """One report over the newest context's link; dropped while there is none."""
        if not self._watched:
            return
        drafter = next(reversed(self._watched.values())).drafter
        drafter.report(self.report(drafter))

    def report(self, drafter: RemoteDrafter) -> EdgeReport:
        """How the device stands; times of the link are those of `drafter`."""
        link = drafter.stats()
        return EdgeReport(
            edge_boot=self._boot,
            software=self._software,
            sessions=[watched.session() for watched in self._watched.values()],
            board=self._board.latest() if self._board is not None else None,
            energy=self._energy,
            jitter_s=max(0.0, link.jitter_s),
            reconnects=link.counters.outages,
            last_outage=link.last_outage[:240],
            plain_tokens_per_s=self._plain_tokens_per_s,
        )

    def _share_energy(self, tokens: dict[Mode, int]) -> None:
        """Joules since the last look go to the way that most of its tokens were decoded; none: to nobody."""
        joules = self._board.joules() if self._board is not None else None
        spent = joules - self._joules if joules is not None and self._joules is not None else None
        self._joules = joules
        drafting, plain = tokens[Mode.DRAFTING], tokens[Mode.PLAIN]
        if spent is None or drafting + plain == 0:
            return
        energy = self._energy = self._energy or Energy()
        if drafting >= plain:
            energy.drafting_j += spent
            energy.drafting_tokens += drafting + plain
        else:
            energy.plain_j += spent
            energy.plain_tokens += drafting + plain


class WatchedContext:
    """One context: how it decodes, judged by what it did since the last look."""

    def __init__(self, context: Context) -> None:
        assert isinstance(context.drafter, RemoteDrafter)
        self.drafter = context.drafter
        self._context = context
        self._seen = (0, 0, 0)  # tokens, rounds, plain rounds
        self._mode = Mode.IDLE
        self._reason = ""
        self._fallbacks: dict[str, int] = {}
        self.new_tokens = 0

    def look(self) -> Mode:
        """How it decoded since the last look; counts a fallback when the service's drafts were given up."""
        stats = self._context.decoder.stats
        now = (stats.tokens, stats.rounds, stats.plain_rounds)
        self.new_tokens, rounds, plain = (a - b for a, b in zip(now, self._seen, strict=True))
        self._seen = now
        before = self._mode
        if rounds == 0:
            self._mode, self._reason = Mode.IDLE, ""
            return Mode.IDLE
        decoded = Mode.PLAIN if plain == rounds else Mode.DRAFTING
        # Trees of its own are drafts, and yet not those of the service that the monitor watches.
        served = decoded is Mode.DRAFTING and self.drafter.state().ready
        self._mode, self._reason = (Mode.DRAFTING, "") if served else (Mode.PLAIN, self._why_plain())
        if self._mode is Mode.PLAIN and before is not Mode.PLAIN:
            self._fallbacks[self._reason[:80]] = self._fallbacks.get(self._reason[:80], 0) + 1
        return decoded

    def _why_plain(self) -> str:
        if not self._context.switch.drafting:
            return SWITCHED_OFF
        if not self._context.verifies_trees:
            return NOT_EXACT
        state = self.drafter.state()
        return state.reason[:240] if not state.ready else NOT_WORTH_WAITING

    def session(self) -> EdgeSession:
        work = work_of(self._context.decoder.stats)
        counters = self.drafter.stats().counters
        work.timeouts, work.fallbacks = counters.misses, dict(self._fallbacks)
        work.stale_trees += counters.stale_trees
        return EdgeSession(f"{self.drafter.session:016x}", self._mode, self._reason, work)


def work_of(stats: SessionStats) -> Work:
    """A decode loop's counters as the monitor reads them."""
    deepest = max((d for d, tried in enumerate(stats.tried_at_depth, 1) if tried), default=0)
    return Work(
        num_drafts=stats.rounds - stats.plain_rounds,
        draft_tokens=stats.drafted,
        accepted_tokens=stats.accepted,
        accepted_per_depth=stats.accepted_at_depth[:deepest],
        tried_per_depth=stats.tried_at_depth[:deepest],
        tokens=stats.tokens,
        plain_tokens=stats.plain_rounds,
        prompt_tokens=stats.prompt_rows,
        late_trees=stats.late,
        stale_trees=stats.stale,
        guard_steps=stats.settled,
        stages={
            stage: times
            for stage, times in ((Stage.VERIFY, stats.verify), (Stage.SAMPLE, stats.sample))
            if times.counts
        },
        tree_nodes=stats.sizes,
    )
