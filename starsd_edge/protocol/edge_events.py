"""What an edge's connection asks of whoever owns its socket, and what it counts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from msgspec import Struct

from starsd_edge.decoding.tree import DraftTree

__all__ = ["Connect", "Counters", "Disconnect", "LinkEvent", "TreeArrived"]


@dataclass(frozen=True, slots=True)
class Connect:
    """Make a new socket and connect it, then say `connected`, `lost` or `denied`."""


@dataclass(frozen=True, slots=True)
class Disconnect:
    """Throw the socket away; nothing more is sent on it."""


class TreeArrived(Struct, frozen=True):
    """A tree on a prefix that is still ours. Part of it may have been committed meanwhile, or none of it."""

    tree: DraftTree
    round_trip_s: float
    dwell_s: float
    ahead: bool = False  # the second one of its round


LinkEvent: TypeAlias = Connect | Disconnect | TreeArrived


@dataclass(slots=True)
class Counters:
    """Since the start of the process."""

    rounds: int = 0  # UPDATEs sent
    trees: int = 0  # trees of use
    ahead_trees: int = 0  # of use, drafted ahead
    stale_trees: int = 0  # came too late to be followed, twice, or for another prefix
    misses: int = 0  # answers that did not come in time
    outages: int = 0
    bytes_up: int = 0
    bytes_updates: int = 0  # of bytes_up, what the UPDATEs took
    bytes_down: int = 0
    violations: int = 0  # messages of the service that the protocol does not allow
