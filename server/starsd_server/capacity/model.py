"""A fleet in balance: how fast every device gets on when all of them share one draft host.

A device goes round: its update travels, its tree is drafted, the tree travels, the target verifies. Drafting
takes longer the more sessions share a step, and the more slowly devices come round the fewer they are; the
balance of the two is found by iterating (docs/capacity.md derives it). In the paper's symbols a round is
T_gamma = N S(d) + T_idle; with batched steps N S(d) becomes S(rows of all).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from starsd_server.scheduling import Policy

__all__ = ["Bottleneck", "DeviceClass", "DraftWork", "Fleet", "Host", "balance", "largest", "saturation"]

StepSeconds: TypeAlias = Callable[[float, float], float]
"""(rows of a step, KV rows that its sessions hold together) -> seconds."""

ITERATIONS = 200
DAMPING = 0.5  # the iteration swings without it, where devices crowd
CROWDED = 0.9  # a fleet is crowded when a device gets less than this much of what it gets alone


@dataclass(frozen=True, slots=True)
class DraftWork:
    """What a round asks of the draft host, and what it brings.

    tokens       tau, bonus included
    nodes        of the tree, root included
    steps        head steps of a tree, the extending one included
    rows         head rows of all of them together
    kv_rows      that a session holds, on average
    bytes_up     of an update, headers included
    """

    tokens: float
    nodes: float
    steps: float
    rows: float
    kv_rows: float = 0.0
    bytes_up: float = 0.0


@dataclass(frozen=True, slots=True)
class DeviceClass:
    """`count` devices alike.

    plain_s   T(1)
    verify_s  T(n) of the trees in `work`
    rtt_s     of its link
    """

    name: str
    count: float
    plain_s: float
    verify_s: float
    rtt_s: float
    work: DraftWork


@dataclass(frozen=True, slots=True)
class Host:
    """A draft host.

    step_s      what a step takes
    step_rows   rows of one step at most
    slots       sessions that its KV memory holds
    uplink_bps  bytes per second that reach it from all devices together
    host_s      what its processor spends on a round besides: messages, scheduling
    """

    step_s: StepSeconds
    policy: Policy = Policy.BATCHED
    step_rows: float = 1024.0
    slots: float = math.inf
    uplink_bps: float = math.inf
    host_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Bottleneck:
    """A resource and the share of it that is in use."""

    name: str
    used: float


@dataclass(frozen=True, slots=True)
class Served:
    """What one device of a class gets."""

    name: str
    tokens_per_s: float
    plain_tokens_per_s: float
    draft_s: float  # from its update's arrival to its tree's departure

    @property
    def ratio_to_plain(self) -> float:
        return self.tokens_per_s / self.plain_tokens_per_s


@dataclass(frozen=True, slots=True)
class Fleet:
    """A fleet in balance.

    rounds_per_s  of all devices
    busy          share of the time in which the engine steps: in batches that is no limit yet
    resources     of the draft host, the most used first
    """

    served: tuple[Served, ...]
    tokens_per_s: float
    rounds_per_s: float
    busy: float
    resources: tuple[Bottleneck, ...]

    @property
    def bottleneck(self) -> Bottleneck:
        return self.resources[0]


def balance(host: Host, classes: Sequence[DeviceClass]) -> Fleet:
    """The long run of a fleet whose devices always wait for their trees."""
    solve = _serial if host.policy is Policy.SERIAL else _batched
    draft_s = solve(host, classes)
    draft_s = _stretched(classes, [device.work.bytes_up / host.uplink_bps for device in classes], draft_s)
    rates = [1.0 / (_away_s(device) + seconds) for device, seconds in zip(classes, draft_s, strict=True)]
    served = [
        Served(device.name, device.work.tokens * rate, 1.0 / device.plain_s, seconds)
        for device, rate, seconds in zip(classes, rates, draft_s, strict=True)
    ]

    def flow(of: Callable[[DeviceClass], float]) -> float:
        """Of all devices, a second."""
        return sum(device.count * rate * of(device) for device, rate in zip(classes, rates, strict=True))

    busy = _busy(classes, [rate * seconds for rate, seconds in zip(rates, draft_s, strict=True)])
    rounds = flow(lambda device: 1.0)
    kv_rows = sum(device.count * device.work.kv_rows for device in classes)
    most_rows = host.step_rows / (host.step_s(host.step_rows, kv_rows) + host.host_s)
    compute = flow(lambda device: device.work.rows) / most_rows
    resources = [
        Bottleneck("draft compute", busy if host.policy is Policy.SERIAL else compute),
        Bottleneck("host processor", rounds * host.host_s),
        Bottleneck("KV memory", sum(device.count for device in classes) / host.slots),
        Bottleneck("uplink", flow(lambda device: device.work.bytes_up) / host.uplink_bps),
    ]
    resources.sort(key=lambda resource: -resource.used)
    return Fleet(tuple(served), flow(lambda device: device.work.tokens), rounds, busy, tuple(resources))


def largest(
    host: Host, classes: Sequence[DeviceClass], enough: Callable[[Fleet], bool], most: int = 4096
) -> int:
    """The largest number of devices, in the proportions of `classes`, with which the fleet is still `enough`;
    0 when not even one is. `enough` must not come back once it is gone."""
    total = sum(device.count for device in classes)

    def holds(number: int) -> bool:
        scaled = [replace(device, count=device.count * number / total) for device in classes]
        return number <= host.slots and enough(balance(host, scaled))

    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if holds(middle) else (low, middle - 1)
    return low


def saturation(host: Host, classes: Sequence[DeviceClass]) -> int:
    """N_full: devices, in the proportions of `classes`, from which on each gets less than `CROWDED` of what
    it gets alone."""
    alone = [balance(host, [replace(device, count=1.0)]).served[0].tokens_per_s for device in classes]

    def uncrowded(fleet: Fleet) -> bool:
        return all(
            each.tokens_per_s >= CROWDED * by_itself
            for each, by_itself in zip(fleet.served, alone, strict=True)
        )

    return largest(host, classes, uncrowded)


def _away_s(device: DeviceClass) -> float:
    """Of a round, what passes away from the draft host."""
    return device.rtt_s + device.verify_s


def _batched(host: Host, classes: Sequence[DeviceClass]) -> list[float]:
    """Seconds from an update's arrival to its tree, a class each.

    A session that is drafting shares its steps with whoever else is: b = 1 + sum of the others' shares of
    time at the host. A step that runs when its update arrives has to end first: half of it on average.
    """
    draft_s = [
        device.work.steps * host.step_s(device.work.rows / device.work.steps, 0.0) for device in classes
    ]
    for _ in range(ITERATIONS):
        present = [s / (_away_s(device) + s) for device, s in zip(classes, draft_s, strict=True)]
        for number, device in enumerate(classes):
            rows = device.work.rows / device.work.steps
            kv_rows, crowd, alone = device.work.kv_rows, 1.0, 1.0
            for other, (each, share) in enumerate(zip(classes, present, strict=True)):
                others = each.count - (other == number)
                rows += max(0.0, others) * share * each.work.rows / each.work.steps
                kv_rows += max(0.0, others) * share * each.work.kv_rows
                crowd += max(0.0, others) * share
                alone *= (1.0 - share) ** max(0.0, others)
            # Sessions beyond what a step holds sit out some steps.
            turns = max(1.0, rows / host.step_rows)
            step_s = host.step_s(min(rows, host.step_rows), kv_rows / turns)
            step_s += host.host_s * crowd / device.work.steps
            wanted = device.work.steps * turns * step_s + (1.0 - alone) * step_s / 2
            draft_s[number] += DAMPING * (wanted - draft_s[number])
    return draft_s


def _serial(host: Host, classes: Sequence[DeviceClass]) -> list[float]:
    """The paper's service: whole trees, first come, first served. Each waits for those who were there before.

    With N devices alike the host is busy all the time once (N - 1) S exceeds what passes away from it: then
    a round takes N S. Below that, queues are those of devices that come at random moments.
    """
    own_s = [
        device.work.steps * host.step_s(device.work.rows / device.work.steps, device.work.kv_rows)
        + host.host_s
        for device in classes
    ]
    draft_s = list(own_s)
    for _ in range(ITERATIONS):
        for number, own in enumerate(own_s):
            queue_s = 0.0
            for other, (each, seconds) in enumerate(zip(classes, draft_s, strict=True)):
                others = max(0.0, each.count - (other == number))
                period_s = _away_s(each) + seconds
                # One of them in service when this one comes has half of its own left; the queued ones all.
                in_service = min(1.0, own_s[other] / period_s)
                queued = max(0.0, seconds - own_s[other]) / period_s
                queue_s += others * own_s[other] * (in_service / 2 + queued)
            draft_s[number] += DAMPING * (own + queue_s - draft_s[number]) / 4
    return _stretched(classes, own_s, draft_s)


def _stretched(
    classes: Sequence[DeviceClass], work_s: Sequence[float], draft_s: Sequence[float]
) -> list[float]:
    """Nothing does more than one second's work in a second: stretch the waits until a resource that every
    round takes for `work_s` does not."""

    def load(extra_s: float) -> float:
        return sum(
            device.count * work / (_away_s(device) + seconds + extra_s)
            for device, work, seconds in zip(classes, work_s, draft_s, strict=True)
        )

    if load(0.0) <= 1.0:
        return list(draft_s)
    low, high = 0.0, 1.0
    while load(high) > 1.0:
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if load(middle) > 1.0 else (low, middle)
    return [seconds + high for seconds in draft_s]


def _busy(classes: Sequence[DeviceClass], present: Sequence[float]) -> float:
    """Share of the time in which any session is drafting."""
    nobody = 1.0
    for device, share in zip(classes, present, strict=True):
        nobody *= (1.0 - min(share, 1.0)) ** device.count
    return 1.0 - nobody
