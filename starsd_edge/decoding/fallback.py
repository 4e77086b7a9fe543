"""Two drafters as one: the second fills in while the first cannot answer."""

from __future__ import annotations

from starsd_edge.decoding.roles import Drafter, DrafterState, Update
from starsd_edge.decoding.tree import DraftTree

__all__ = ["FallbackDrafter"]


class FallbackDrafter:
    """`first` whenever it is ready, else `second`; both follow the context all along.

    Closing it closes both. Its state is that of whichever drafts now, with the first one's reason.
    """

    def __init__(self, first: Drafter, second: Drafter) -> None:
        self._first = first
        self._second = second

    def start(self, first_token: int) -> None:
        self._second.start(first_token)
        self._first.start(first_token)

    def update(self, update: Update) -> None:
        self._second.update(update)
        self._first.update(update)

    def poll(self, timeout_s: float) -> DraftTree | None:
        if self._first.state().ready:
            return self._first.poll(timeout_s)
        return self._second.poll(timeout_s)

    def rollback(self, committed_len: int) -> None:
        self._second.rollback(committed_len)
        self._first.rollback(committed_len)

    def state(self) -> DrafterState:
        first = self._first.state()
        if first.ready:
            return first
        second = self._second.state()
        return DrafterState(
            second.ready,
            second.expected_wait_s,
            first.reason,
            second.asked_len,
            second.asked_s,
            second.origin,
        )

    def close(self) -> None:
        self._first.close()
        self._second.close()
