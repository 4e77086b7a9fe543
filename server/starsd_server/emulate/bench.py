"""How many targets one draft service can serve: rows of (scheduler, engine, number of targets), measured.

Every row starts a service of its own with its real processes, lets the fleet come up to speed, and then
counts for a while what the edges committed and what the engine did meanwhile.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TypeAlias

import msgspec
import numpy as np
import zmq

from starsd_edge.errors import UnreachableError
from starsd_edge.latency import Histogram
from starsd_edge.link.sockets import SyncSocket, make_context
from starsd_edge.protocol.telemetry import TOPIC, EngineSnapshot, decode_snapshot
from starsd_server.config import ServiceConfig
from starsd_server.emulate.devices import FleetPlan, Round, SocketFleet
from starsd_server.emulate.machine import machine_use
from starsd_server.service import Service

__all__ = ["BenchPlan", "BenchRow", "Edges", "measure", "row_of"]

SNAPSHOT_PATIENCE_MS = 5000
MACHINE_LIMIT = 0.05  # of the time in line for a processor


@dataclass(frozen=True, slots=True)
class BenchPlan:
    """What is common to all rows.

    config      the service; scheduler and limits are set per row
    warm_up_s   not counted: prompts are read and rounds get out of step
    seconds     counted
    """

    config: ServiceConfig
    fleet: FleetPlan
    warm_up_s: float = 3.0
    seconds: float = 10.0


Edges: TypeAlias = Sequence[str | None]
"""The edges of a row, each by the name of the device that it is a session of; None is a device of its own."""


@dataclass(frozen=True, slots=True)
class BenchRow:
    """One measurement.

    busy_while_waited_for  share of the time in which any session waited that the engine was in a step
    machine_wait_fraction  share of the time in which the process that got it least (worker, gateway or the
                           devices') stood in line for a processor: above MACHINE_LIMIT this machine, and not
                           the engine, sets the figures
    first_rounds_per_s     of the first edge alone
    narrowed_share         of the trees: rows were left out of them, for the engine was saturated
    gateway_cpu_ms, worker_cpu_ms  processor time of a round
    """

    scheduler: str
    engine: str
    targets: int
    system_tokens_per_s: float
    per_target_tokens_per_s: float
    acceptance_length: float
    engine_busy_fraction: float
    busy_while_waited_for: float
    idle_ms_per_round: float
    batch_rows_mean: float
    queue_ms_p50: float
    queue_ms_p99: float
    queue_ms_max: float
    draft_ms_p50: float
    draft_ms_p99: float
    fairness_jain: float
    rounds_per_s: float
    first_rounds_per_s: float
    tree_nodes_mean: float
    bytes_up_per_round: float
    bytes_down_per_round: float
    narrowed_share: float = 0.0
    machine_wait_fraction: float = 0.0
    gateway_cpu_ms: float = 0.0
    worker_cpu_ms: float = 0.0

    @property
    def machine_bound(self) -> bool:
        return self.machine_wait_fraction > MACHINE_LIMIT

    def as_dict(self) -> dict[str, str | int | float]:
        return asdict(self)


def measure(plan: BenchPlan, scheduler: str, edges: Edges) -> BenchRow:
    """Run one row. Raises whatever keeps the service from starting."""
    with contextlib.ExitStack() as stack:
        config = msgspec.structs.replace(plan.config, scheduler=scheduler)
        service = stack.enter_context(started(config))
        ready = service.start()
        context = stack.enter_context(make_context())
        watch = stack.enter_context(contextlib.closing(subscribed(context, ready.monitor)))
        fleet = SocketFleet(context, ready.address, plan.fleet, edges)
        stack.callback(fleet.close)
        fleet.start()
        fleet.run(plan.warm_up_s)
        players = fleet.players
        pids = (service.pids["gateway"], service.pids["worker"], os.getpid())
        first, up, down = engine_now(watch), players.bytes_up, players.bytes_down
        players.rounds.clear()
        started_s, before = time.monotonic(), machine_use(pids)
        fleet.run(plan.seconds)
        last, seconds = engine_now(watch), time.monotonic() - started_s
        used = machine_use(pids).since(before)
        bytes_each = (players.bytes_up - up, players.bytes_down - down)
        row = row_of(plan, scheduler, len(edges), players.rounds, seconds, (first, last), bytes_each)
        gateway_ms, worker_ms, _ = (cpu_s * 1e3 / max(1, len(players.rounds)) for cpu_s in used.cpu_s)
        return replace(
            row,
            machine_wait_fraction=max(used.wait_s) / seconds,
            gateway_cpu_ms=gateway_ms,
            worker_cpu_ms=worker_ms,
        )


def row_of(
    plan: BenchPlan,
    scheduler: str,
    targets: int,
    rounds: Sequence[Round],
    seconds: float,
    engine: tuple[EngineSnapshot, EngineSnapshot],
    bytes_each: tuple[int, int],
) -> BenchRow:
    first, last = engine
    count = max(1, len(rounds))
    tokens = np.zeros(targets)
    for round_ in rounds:
        tokens[round_.device] += round_.tokens
    queue_ms = np.array([r.queue_s for r in rounds] or [0.0]) * 1e3
    draft_ms = np.array([r.draft_s for r in rounds] or [0.0]) * 1e3
    busy_s = last.busy_s - first.busy_s
    demand_s = last.demand_s - first.demand_s
    rows: Histogram = last.batch_rows.minus(first.batch_rows)
    return BenchRow(
        scheduler=scheduler,
        engine=plan.config.engine,
        targets=targets,
        system_tokens_per_s=float(tokens.sum() / seconds),
        per_target_tokens_per_s=float(tokens.mean() / seconds),
        acceptance_length=float(tokens.sum() / count),
        engine_busy_fraction=min(1.0, busy_s / seconds),
        busy_while_waited_for=busy_s / demand_s if demand_s else 1.0,
        idle_ms_per_round=max(0.0, seconds - busy_s) * 1e3 / count,
        batch_rows_mean=rows.mean or 0.0,
        queue_ms_p50=float(np.percentile(queue_ms, 50)),
        queue_ms_p99=float(np.percentile(queue_ms, 99)),
        queue_ms_max=float(queue_ms.max()),
        draft_ms_p50=float(np.percentile(draft_ms, 50)),
        draft_ms_p99=float(np.percentile(draft_ms, 99)),
        fairness_jain=jain(tokens),
        rounds_per_s=len(rounds) / seconds,
        first_rounds_per_s=sum(round_.device == 0 for round_ in rounds) / seconds,
        tree_nodes_mean=float(np.mean([r.nodes for r in rounds] or [0])),
        bytes_up_per_round=bytes_each[0] / count,
        bytes_down_per_round=bytes_each[1] / count,
        narrowed_share=(last.narrowed_trees - first.narrowed_trees) / count,
    )


def jain(shares: np.ndarray[tuple[int], np.dtype[np.float64]]) -> float:
    """Jain's fairness index: 1 when all get the same, 1/n when one gets all."""
    square = float((shares**2).sum())
    return float(shares.sum() ** 2 / (len(shares) * square)) if square else 1.0


@contextlib.contextmanager
def started(config: ServiceConfig) -> Iterator[Service]:
    service = Service(config)
    try:
        yield service
    finally:
        service.close()


def subscribed(context: zmq.Context[SyncSocket], endpoint: str) -> SyncSocket:
    socket = context.socket(zmq.SUB)
    socket.linger = 0
    socket.setsockopt(zmq.SUBSCRIBE, TOPIC)
    socket.connect(endpoint)
    return socket


def engine_now(watch: SyncSocket) -> EngineSnapshot:
    """The engine's counters, as fresh as they are published. Raises UnreachableError when none come."""
    while watch.poll(0):
        watch.recv_multipart()
    if not watch.poll(SNAPSHOT_PATIENCE_MS):
        raise UnreachableError("the draft service of the benchmark publishes no snapshots")
    return decode_snapshot(watch.recv_multipart()[1]).engine
