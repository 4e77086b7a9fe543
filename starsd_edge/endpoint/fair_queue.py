"""Who is next: a bounded queue that serves clients in turn, however many requests one of them sends. Pure."""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import Generic, TypeVar

__all__ = ["FairQueue", "QueueFullError"]

T = TypeVar("T")


class QueueFullError(Exception):
    """Raised when a request cannot wait: too many wait already."""


class FairQueue(Generic[T]):
    """Round robin over clients, first come first served within one.

    max_waiting  requests that may wait in all. A client may hold at most half of the places, so that one
                 client alone never locks the others out.
    """

    def __init__(self, max_waiting: int) -> None:
        if max_waiting < 1:
            raise ValueError(f"a queue holds at least one request, not {max_waiting}")
        self._max_waiting = max_waiting
        self._per_client = max(1, max_waiting // 2)
        self._clients: OrderedDict[str, deque[T]] = OrderedDict()

    def __len__(self) -> int:
        return sum(len(waiting) for waiting in self._clients.values())

    def put(self, client: str, item: T) -> None:
        """Wait in line. Raises QueueFullError."""
        waiting = self._clients.get(client, ())
        if len(self) >= self._max_waiting:
            raise QueueFullError(f"{len(self)} requests wait already, as many as may")
        if len(waiting) >= self._per_client:
            raise QueueFullError(f"{len(waiting)} requests of this client wait already, as many as may")
        self._clients.setdefault(client, deque()).append(item)

    def take(self) -> T | None:
        """The next one; its client goes to the end of the round. None when nobody waits."""
        if not self._clients:
            return None
        client, waiting = self._clients.popitem(last=False)
        item = waiting.popleft()
        if waiting:
            self._clients[client] = waiting
        return item

    def remove(self, item: T) -> bool:
        """Give up waiting; False when it does not wait any more."""
        for client, waiting in self._clients.items():
            if item in waiting:
                waiting.remove(item)
                if not waiting:
                    del self._clients[client]
                return True
        return False
