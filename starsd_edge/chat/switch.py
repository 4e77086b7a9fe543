"""Drafting on and off between answers, without losing the context."""

from __future__ import annotations

from collections import deque

from starsd_edge.decoding.draft import Draft
from starsd_edge.decoding.policy import Outlook, Policy
from starsd_edge.decoding.roles import RoundHints
from starsd_edge.decoding.tree import DraftTree
from starsd_edge.metrics import RoundKind, RoundStats

__all__ = ["SwitchedPolicy"]


# What was done in so many rounds is what is being done: short enough to follow a link, long enough that a
# single plain step between trees is not taken for a change.
RECENT_ROUNDS = 16


class SwitchedPolicy:
    """The policy it was given while `drafting`, plain steps otherwise. Rows for the drafter are kept
    meanwhile, so that it can go on where it was."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self.drafting = True
        self._trees: deque[bool] = deque(maxlen=RECENT_ROUNDS)  # whether a round verified one

    @property
    def wants_lookup(self) -> bool:
        return self._policy.wants_lookup

    @property
    def verified_of_late(self) -> bool | None:
        """Whether one of the last rounds verified a tree; None before so many rounds."""
        if True in self._trees:
            return True
        return False if len(self._trees) == RECENT_ROUNDS else None

    def patience_s(self, outlook: Outlook) -> float:
        return self._policy.patience_s(outlook) if self.drafting else 0.0

    def choose(self, outlook: Outlook) -> DraftTree | None:
        return self._policy.choose(outlook) if self.drafting else None

    def hints(self) -> RoundHints:
        return self._policy.hints()

    def wants_draft(self, rows_held: int) -> bool:
        return self.drafting and self._policy.wants_draft(rows_held)

    def arrived(self, draft: Draft) -> None:
        self._policy.arrived(draft)

    def learn(self, draft: Draft, tokens: list[int]) -> None:
        self._policy.learn(draft, tokens)

    def observe(self, stats: RoundStats) -> None:
        if stats.kind is not RoundKind.PREFILL:
            self._trees.append(stats.kind is RoundKind.VERIFY)
        self._policy.observe(stats)

    def calibration_error(self) -> list[float]:
        return self._policy.calibration_error()
