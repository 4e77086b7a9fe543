"""A device, a link and a draft service in virtual time, around the real decode loop.

Nothing is computed: the target says the trace's text after its profile's T(n), the drafter answers with the
trace's tree after the link and the service took their time. So a cell of a benchmark takes milliseconds, and
two runs of it agree to the digit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from starsd_edge.bench.trace import Trace
from starsd_edge.decoding.costs import CostCurve
from starsd_edge.decoding.roles import DrafterState, Invariance, TargetOutput, TargetSpec, Update
from starsd_edge.decoding.tree import DraftTree
from starsd_edge.protocol.link_times import LinkTimes
from starsd_edge.testing import FakeClock
from starsd_edge.types import TokenArray

__all__ = ["Conditions", "TraceTarget", "VirtualService"]

SMALLEST_RTO_S = 0.2  # Linux' least retransmission timeout: a thin stream pays it for every lost segment
STEP_S = 0.002  # of a head of a 7B model on a workstation GPU; a tree takes as many as it has levels
OTHERS_DRAFT_S = 6 * STEP_S
# Mean time in the service's queue, in drafts, by load (share of the engine's time that others ask for). Below
# saturation an M/D/1 queue; from there on a closed one, where everyone waits for about everyone else.
QUEUE_DRAFTS = {0: 0.0, 50: 0.5, 100: 3.0, 150: 9.0}


@dataclass(frozen=True, slots=True)
class Conditions:
    """What surrounds a device.

    rtt_ms    round trip of the link
    loss_pct  segments lost, each way
    load_pct  see QUEUE_DRAFTS; None: the service is dead
    """

    rtt_ms: float
    loss_pct: float
    load_pct: int | None

    def __str__(self) -> str:
        service = "service dead" if self.load_pct is None else f"load {self.load_pct} %"
        return f"{self.rtt_ms:g} ms, {self.loss_pct:g} % lost, {service}"


class Advancing(Protocol):
    """A clock that moves when a forward takes time."""

    def __call__(self) -> float: ...

    def advance(self, seconds: float) -> None: ...


class TraceTarget:
    """A target whose text is the trace's, at the cost of a curve."""

    def __init__(self, trace: Trace, curve: CostCurve, clock: Advancing) -> None:
        self.spec = TargetSpec(trace.vocab_size, 1, len(trace.tokens) + 64, Invariance(bitwise=True))
        self.kv_len = 0
        self._trace = trace
        self._costs_s = curve.table(64)
        self._clock = clock

    def prefill(self, tokens: TokenArray) -> TargetOutput:
        self._clock.advance(self._costs_s[min(len(tokens), 64) - 1])
        self.kv_len += len(tokens)
        return TargetOutput(self._logits([self.kv_len]), self._features(len(tokens)))

    def forward(self, tree: DraftTree) -> TargetOutput:
        self._clock.advance(self._costs_s[len(tree) - 1])
        # Nodes off the text's path are never visited, so that the token of their position may stand there.
        return TargetOutput(self._logits((tree.positions + 1).tolist()), self._features(len(tree)))

    def keep(self, path: list[int]) -> None:
        self.kv_len += len(path)

    def truncate(self, kv_len: int) -> None:
        self.kv_len = kv_len

    def max_tree_size(self) -> int:
        return min(64, self.spec.max_len - self.kv_len)

    def _logits(self, positions: list[int]) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
        logits = np.zeros((len(positions), self.spec.vocab_size), np.float32)
        tokens = self._trace.tokens
        rows = np.minimum(positions, len(tokens) - 1)
        logits[np.arange(len(positions)), tokens[rows]] = 1.0
        return logits

    def _features(self, count: int) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
        return np.zeros((count, 1), np.float32)


class VirtualService:
    """A drafter that answers as a link delivers: one update is under way, later ones leave together."""

    def __init__(self, trace: Trace, conditions: Conditions, clock: FakeClock, seed: int) -> None:
        self._trace = trace
        self._conditions = conditions
        self._clock = clock
        self._rng = np.random.Generator(np.random.Philox(seed))
        self._times = LinkTimes()
        self._committed_len = 0
        self._max_nodes = 60
        self._under_way: tuple[float, float, DraftTree] | None = None  # sent, due, tree
        self._draft_s = 0.0  # of the newest tree
        self._wants_tree = False

    def start(self, first_token: int) -> None:
        self._committed_len = 1
        self._under_way = None

    def update(self, update: Update) -> None:
        self._committed_len = update.committed_len
        self._max_nodes = update.hints.max_nodes
        self._wants_tree = True
        if self._under_way is None:
            self._send()

    def poll(self, timeout_s: float) -> DraftTree | None:
        deadline_s = self._clock() + timeout_s
        if self._under_way is None or self._under_way[1] > deadline_s:
            self._clock.advance(timeout_s)
            return None
        sent_s, due_s, tree = self._under_way
        self._clock.advance(max(0.0, due_s - self._clock()))
        self._under_way = None
        self._draft_s = _draft_s(tree)
        self._times.note(due_s - sent_s, self._draft_s, drafted=True)
        since = self._trace.tokens[tree.base_len : self._committed_len].tolist()
        left = tree.descend(since)
        if (left is None or len(left) == 1) and self._wants_tree:
            self._send()
        return tree

    def rollback(self, committed_len: int) -> None:
        self._committed_len = committed_len
        self._under_way = None

    def state(self) -> DrafterState:
        if self._conditions.load_pct is None:
            return DrafterState(False, 0.0, "the service is dead")
        asked_len, asked_s = 0, 0.0
        if self._under_way is not None:
            asked_s, _, tree = self._under_way
            asked_len = tree.base_len
        return DrafterState(
            True, self._times.expected_s, asked_len=asked_len, asked_s=asked_s, draft_s=self._draft_s
        )

    def close(self) -> None:
        pass

    def _send(self) -> None:
        if self._conditions.load_pct is None:
            return
        self._wants_tree = False
        tree = self._trace.tree_after(self._committed_len).first(self._max_nodes)
        now_s = self._clock()
        self._under_way = (
            now_s,
            now_s + self._round_trip_s(self._conditions.load_pct) + _draft_s(tree),
            tree,
        )

    def _round_trip_s(self, load_pct: int) -> float:
        rtt_s = self._conditions.rtt_ms / 1e3
        queue_s = QUEUE_DRAFTS[load_pct] * OTHERS_DRAFT_S * self._rng.exponential()
        lost = int(self._rng.binomial(2, self._conditions.loss_pct / 100))
        return rtt_s + lost * max(SMALLEST_RTO_S, 2 * rtt_s) + queue_s


def _draft_s(tree: DraftTree) -> float:
    return STEP_S * max(1, int(tree.depths.max()))
