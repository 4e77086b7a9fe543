"""Which of several draft services an edge uses: rendezvous hashing with health, without a word between edges.

Every edge orders the services by a hash of (its name, the address): edges spread evenly over services, an
edge keeps its order, and when a service comes or goes only the edges move that it concerns (Thaler and
Ravishankar 1998). A service that failed or had no room rests for a while; the next in the order is used. No
clock: `now_s` is monotonic seconds.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from starsd_edge.errors import UsageError
from starsd_edge.link.sockets import EdgeKeys

__all__ = ["Place", "Placement", "in_order"]

# What a service rests that failed: long enough that its edges do not come back while it is starting; twice as
# long each time in a row, up to the last, for a machine that is gone.
FIRST_REST_S = 30.0
LAST_REST_S = 600.0


@dataclass(frozen=True, slots=True)
class Place:
    """Where a draft service is, and the keys for it (None on this machine)."""

    address: str
    keys: EdgeKeys | None = None


def in_order(edge: str, addresses: Sequence[str]) -> list[str]:
    """All addresses, the one of the highest hash with this edge first."""

    def weight(address: str) -> bytes:
        return hashlib.sha256(f"{edge}\0{address}".encode()).digest()

    return sorted(addresses, key=weight, reverse=True)


class Placement:
    """One edge's places, and which of them it uses.

    Raises UsageError for no place at all, or one that is named twice.
    """

    def __init__(self, edge: str, places: Sequence[Place]) -> None:
        by_address = {place.address: place for place in places}
        if not places or len(by_address) != len(places):
            raise UsageError(f"draft services are named once each, and at least one: {list(by_address)}")
        self._order = [by_address[address] for address in in_order(edge, list(by_address))]
        self._rests_until_s: dict[str, float] = {}
        self._failures: dict[str, int] = {}
        self.current = self._order[0]

    def __len__(self) -> int:
        return len(self._order)

    def __iter__(self) -> Iterator[Place]:
        return iter(self._order)

    def served(self) -> None:
        """The current service works: its failures are forgotten."""
        self._failures.pop(self.current.address, None)

    def leave(self, now_s: float) -> bool:
        """The current service failed, or has no room: take the next. Whether that one has not just failed,
        too, so that it is worth trying at once."""
        address = self.current.address
        failures = self._failures[address] = self._failures.get(address, 0) + 1
        rest_s = min(FIRST_REST_S * 2.0 ** (failures - 1), LAST_REST_S)
        self._rests_until_s[address] = now_s + rest_s
        self.current = next(
            (place for place in self._order if self._rested(place, now_s)),
            min(self._order, key=lambda place: self._rests_until_s.get(place.address, 0.0)),
        )
        return self._rested(self.current, now_s)

    def prefers_another(self, now_s: float) -> bool:
        """Whether a service before the current one in the order has rested: for a time at which nothing is
        lost by going there."""
        ahead = self._order[: self._order.index(self.current)]
        return any(self._rested(place, now_s) for place in ahead)

    def go_back(self, now_s: float) -> None:
        """Use the first in the order that has rested. The current one did not fail."""
        self.current = next(place for place in self._order if self._rested(place, now_s))

    def has_spare(self, now_s: float) -> bool:
        """Whether another service could be used instead of the current one."""
        return any(place is not self.current and self._rested(place, now_s) for place in self._order)

    def _rested(self, place: Place, now_s: float) -> bool:
        return now_s >= self._rests_until_s.get(place.address, 0.0)
