"""Whether the service's memory stays where it is over many rounds."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from starsd_edge.errors import UnreachableError
from starsd_edge.link.sockets import make_context
from starsd_server.emulate.bench import BenchPlan, Edges, started
from starsd_server.emulate.devices import SocketFleet
from starsd_server.emulate.machine import resident_mib

__all__ = ["MAX_GROWTH_MIB", "Reading", "growth_mib", "soak"]

READINGS = 10
COMPARED = 3  # readings at either end, whose mean hides what an allocator takes and gives back
MAX_GROWTH_MIB = 16.0  # ten times what was seen in 10,000 rounds
PATIENCE_S = 60.0  # for a round


@dataclass(frozen=True, slots=True)
class Reading:
    """Memory of both processes after so many rounds."""

    rounds: int
    worker_mib: float
    gateway_mib: float


def soak(
    plan: BenchPlan, scheduler: str, edges: Edges, rounds: int, report: Callable[[Reading], None]
) -> list[Reading]:
    """Let `edges` play `rounds` rounds against a service of its own, ten readings on the way; the first when
    a tenth has been played, so that every slot has been used."""
    readings: list[Reading] = []
    with contextlib.ExitStack() as stack:
        config = msgspec.structs.replace(plan.config, scheduler=scheduler)
        service = stack.enter_context(started(config))
        ready = service.start()
        context = stack.enter_context(make_context())
        fleet = SocketFleet(context, ready.address, plan.fleet, edges)
        stack.callback(fleet.close)
        fleet.start()
        for number in range(1, READINGS + 1):
            play_until(fleet, rounds * number // READINGS)
            pids = service.pids
            readings.append(
                Reading(
                    len(fleet.players.rounds), resident_mib(pids["worker"]), resident_mib(pids["gateway"])
                )
            )
            report(readings[-1])
    return readings


def play_until(fleet: SocketFleet, rounds: int) -> None:
    """Raises UnreachableError when no round ends any more."""
    played, quiet_since_s = len(fleet.players.rounds), time.monotonic()
    while played < rounds:
        fleet.run(0.2)
        now = len(fleet.players.rounds)
        if now > played:
            played, quiet_since_s = now, time.monotonic()
        elif time.monotonic() - quiet_since_s > PATIENCE_S:
            raise UnreachableError("the draft service of the benchmark answers no more")


def growth_mib(readings: list[Reading]) -> float:
    """What both processes together took between the second reading, when caches have filled, and the last:
    means of a few readings at both ends."""
    both = [reading.worker_mib + reading.gateway_mib for reading in readings]
    early, late = both[1 : 1 + COMPARED], both[-COMPARED:]
    return sum(late) / len(late) - sum(early) / len(early)
