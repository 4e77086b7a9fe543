"""Who holds a server's places: one address may have all of them for as long as nobody else comes. Pure.

Connections that nothing is asked on cost a client nothing. Where they took every place, they would keep all
others out; so one of them makes room for whoever has fewer.
"""

from __future__ import annotations

import ipaddress
from collections import Counter
from collections.abc import Callable, Collection
from typing import Generic, TypeVar

__all__ = ["Places", "party"]

NETWORK_BITS = 64  # of IPv6: whoever has one address there has all of them

T = TypeVar("T")


def party(address: str) -> str:
    """Who counts as one: an IPv4 address, or a network of IPv6."""
    try:
        found = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(found, ipaddress.IPv6Address):
        if found.ipv4_mapped is not None:
            return str(found.ipv4_mapped)
        return str(ipaddress.ip_network((found, NETWORK_BITS), strict=False))
    return str(found)


class Places(Generic[T]):
    """`most` places, each held by a connection of a party."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._held: dict[T, str] = {}  # the oldest first

    @property
    def is_full(self) -> bool:
        return len(self._held) >= self.most

    def take(self, holder: T, owner: str) -> None:
        self._held[holder] = owner

    def leave(self, holder: T) -> None:
        self._held.pop(holder, None)

    def keep(self, alive: Collection[object]) -> None:
        """Whatever is not `alive` has left."""
        self._held = {holder: owner for holder, owner in self._held.items() if holder in alive}

    def who_yields(self, newcomer: str, waits: Callable[[T], bool]) -> T | None:
        """The oldest connection that `waits`, of the party with most: one of `newcomer`'s gets its place.

        None where nobody has more than `newcomer` would have then.
        """
        held = Counter(self._held.values())
        for other, number in held.most_common():
            if number <= held[newcomer] + 1:
                return None
            for holder, owner in self._held.items():
                if owner == other and waits(holder):
                    return holder
        return None
