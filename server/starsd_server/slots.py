"""Which session holds which KV slot, and who gives one up when none is free. Pure."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

__all__ = ["Slots"]

K = TypeVar("K")


class Slots(Generic[K]):
    """`count` slots, each of one key or free; keys in order of last use."""

    def __init__(self, count: int) -> None:
        if count < 1:
            raise ValueError(f"a service needs at least one slot, not {count}")
        self.count = count
        self._free = list(range(count - 1, -1, -1))  # the lowest is taken first: memory is touched late
        self._held: OrderedDict[K, int] = OrderedDict()
        self._leaving: set[int] = set()

    def __contains__(self, key: K) -> bool:
        return key in self._held

    def __len__(self) -> int:
        return len(self._held)

    def take(self, key: K) -> int | None:
        """A slot for a key that has none; None when all are held."""
        assert key not in self._held
        if not self._free:
            return None
        self._held[key] = self._free.pop()
        return self._held[key]

    def touch(self, key: K) -> None:
        """`key` was used just now."""
        self._held.move_to_end(key)

    def give(self, key: K) -> int:
        """Take the slot from `key`; nobody gets it before `release`."""
        slot = self._held.pop(key)
        self._leaving.add(slot)
        return slot

    def release(self, slot: int) -> None:
        """Nothing writes to the slot any more: it is free."""
        self._leaving.remove(slot)
        self._free.append(slot)

    @property
    def soon(self) -> bool:
        """Whether a slot will be free once the step under way has ended."""
        return bool(self._leaving)

    def least_recently_used(self, may_go: Callable[[K], bool]) -> K | None:
        """The key unused for longest among those that may lose their slot."""
        return next((key for key in self._held if may_go(key)), None)
