"""A fleet as a user describes it, what becomes of it, and what would become of it if."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import asdict, dataclass

from starsd_edge.errors import UsageError
from starsd_server.capacity.groups import DeviceGroup
from starsd_server.capacity.model import (
    DeviceClass,
    DraftWork,
    Fleet,
    Host,
    StepSeconds,
    balance,
    largest,
    saturation,
)
from starsd_server.scheduling import Policy

__all__ = ["Report", "Scenario", "changed", "examine"]

MEGABIT = 1e6 / 8  # bytes per second


@dataclass(frozen=True, slots=True)
class Scenario:
    """What is asked.

    rtt_ms       of the links of devices that name none of their own
    hosts        draft hosts; devices are spread evenly over them
    slots        sessions that one host's KV memory holds
    uplink_mbps  of one host; None: not a limit
    """

    devices: tuple[DeviceGroup, ...]
    work: DraftWork
    step_s: StepSeconds
    rtt_ms: float = 2.0
    hosts: int = 1
    slots: float = 64.0
    uplink_mbps: float | None = None
    host_ms: float = 0.0
    policy: Policy = Policy.BATCHED

    def __post_init__(self) -> None:
        if not self.devices or min(group.count for group in self.devices) <= 0:
            raise UsageError("a fleet needs devices: --device PROFILE=COUNT, with a count above 0")
        if self.hosts < 1 or self.rtt_ms < 0 or self.slots < 1:
            raise UsageError("hosts and slots are at least 1, and a round trip is not negative")


@dataclass(frozen=True, slots=True)
class Report:
    """What becomes of it.

    fleet       one host's share of the devices, in balance; `tokens_per_s` is that of all hosts together
    carries     devices that all hosts carry before each gets less than 0.9 of what it gets alone
    gains_up_to devices with which every one of them is still faster than plain
    """

    scenario: Scenario
    fleet: Fleet
    tokens_per_s: float
    carries: int
    gains_up_to: int

    def as_dict(self) -> dict[str, object]:
        return {
            "devices": {group.label: group.count for group in self.scenario.devices},
            "hosts": self.scenario.hosts,
            "rtt_ms": self.scenario.rtt_ms,
            "scheduler": self.scenario.policy.value,
            "tokens_per_s": self.tokens_per_s,
            "carries": self.carries,
            "gains_up_to": self.gains_up_to,
            "classes": [
                {**asdict(each), "ratio_to_plain": each.ratio_to_plain} for each in self.fleet.served
            ],
            "resources": {each.name: each.used for each in self.fleet.resources},
            "bottleneck": self.fleet.bottleneck.name,
        }


def examine(scenario: Scenario) -> Report:
    """Solve it."""
    host = Host(
        scenario.step_s,
        scenario.policy,
        slots=scenario.slots,
        uplink_bps=math.inf if scenario.uplink_mbps is None else scenario.uplink_mbps * MEGABIT,
        host_s=scenario.host_ms / 1e3,
    )
    classes = [_device_class(scenario, group) for group in scenario.devices]
    fleet = balance(host, classes)

    def gains(fleet: Fleet) -> bool:
        return all(each.ratio_to_plain >= 1.0 for each in fleet.served)

    return Report(
        scenario,
        fleet,
        fleet.tokens_per_s * scenario.hosts,
        saturation(host, classes) * scenario.hosts,
        largest(host, classes, gains) * scenario.hosts,
    )


def changed(scenario: Scenario, change: str) -> Scenario:
    """The scenario with one thing different, such as "devices=+10" (in the same proportions), "rtt_ms=50",
    "hosts=2", "uplink_mbps=100", "slots=256" or "tokens=2.5". Raises UsageError for anything else."""
    name, _, text = change.partition("=")
    try:
        value = float(text)
    except ValueError:
        raise UsageError(f"--what-if {change}: NAME=NUMBER is wanted") from None
    if name == "devices":
        total = sum(group.count for group in scenario.devices)
        wanted = total + value if text.startswith(("+", "-")) else value
        scaled = (
            dataclasses.replace(group, count=group.count * wanted / total) for group in scenario.devices
        )
        return dataclasses.replace(scenario, devices=tuple(scaled))
    if name == "tokens":
        return dataclasses.replace(scenario, work=dataclasses.replace(scenario.work, tokens=value))
    if name == "hosts":
        return dataclasses.replace(scenario, hosts=int(value))
    if name == "rtt_ms":
        return dataclasses.replace(scenario, rtt_ms=value)
    if name == "uplink_mbps":
        return dataclasses.replace(scenario, uplink_mbps=value)
    if name == "slots":
        return dataclasses.replace(scenario, slots=value)
    raise UsageError(
        f"--what-if {change}: one of devices, hosts, rtt_ms, slots, tokens, uplink_mbps is wanted"
    )


def _device_class(scenario: Scenario, group: DeviceGroup) -> DeviceClass:
    work = scenario.work
    if group.tokens is not None:  # what is committed in a round is what its update brings
        bytes_up = work.bytes_up * group.tokens / work.tokens
        work = dataclasses.replace(work, tokens=group.tokens, bytes_up=bytes_up)
    rtt_ms = scenario.rtt_ms if group.rtt_ms is None else group.rtt_ms
    return DeviceClass(
        name=group.label,
        count=group.count / scenario.hosts,
        plain_s=group.curve.plain_s,
        verify_s=group.curve(max(1, round(work.nodes))),
        rtt_s=rtt_ms / 1e3,
        work=work,
    )
