"""States that must jump out, each with its reason. Pure.

The thresholds are meant for a person who looks: they name what is plainly wrong, and leave the rest to the
alert rules over the exported metrics.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

from starsd_edge.monitor.link_state import LinkState
from starsd_edge.monitor.model import Model
from starsd_edge.monitor.views import DeviceView, ServiceView, Status

__all__ = ["Alarm", "Severity", "alarms_of"]

SATURATED_DEMAND = 0.95  # some session waits practically always
SATURATED_BUSY = 0.90  # and the engine has no idle time left to give
FALLEN_ACCEPTANCE = 0.8  # of what the device had since its service started
MIN_DRAFTS = 50  # fewer trees than this say nothing about acceptance
FULL_KV = 0.98
# What a service refuses by, in words; it may have reasons that this version does not know.
LIMITS = {
    "sessions": "sessions of one device (--device-sessions)",
    "memory": "KV slots (--max-sessions)",
    "rate": "rows a second of one device",
    "queue": "waiting rows of one device",
    "load": "rows of all devices together",
    "draining": "about to stop",
}


class Severity(IntEnum):
    """Worst first."""

    CRITICAL = 0
    WARNING = 1
    NOTE = 2


@dataclass(frozen=True, slots=True)
class Alarm:
    """`what` is a short state, `where` a service or device, `why` one line for the user."""

    severity: Severity
    what: str
    where: str
    why: str


def alarms_of(model: Model, devices: Sequence[DeviceView], window_s: float) -> list[Alarm]:
    """All alarms, worst first."""
    alarms = []
    for service in model.services:
        state = service.link.state
        if state not in (LinkState.UP, LinkState.CONNECTING):
            severity = Severity.NOTE if state is LinkState.ENDED else Severity.CRITICAL
            alarms.append(Alarm(severity, state.value, service.name, service.link.advice))
        view = service.view(window_s)
        if view is not None:
            alarms += service_alarms(service.name, view)
    for device in devices:
        alarms += device_alarms(device)
    return sorted(alarms, key=lambda alarm: alarm.severity)


def service_alarms(name: str, view: ServiceView) -> list[Alarm]:
    alarms = []
    busy, demand = view.busy_fraction, view.demand_fraction
    if busy is not None and demand is not None and demand >= SATURATED_DEMAND and busy >= SATURATED_BUSY:
        why = f"{busy:.0%} busy, somebody waits {demand:.0%} of the time, {view.engine.queue_depth} now"
        if view.narrowed_trees:
            why += f", {view.narrowed_trees} trees narrowed"
        alarms.append(Alarm(Severity.WARNING, "drafter saturated", name, why))
    if view.kv_fraction is not None and view.kv_fraction >= FULL_KV:
        why = f"{view.engine.kv_rows_used} of {view.engine.kv_rows_total} rows: idle sessions are evicted"
        alarms.append(Alarm(Severity.WARNING, "KV cache full", name, why))
    if view.refusals:
        why = ", ".join(f"{count} x {LIMITS.get(reason, reason)}" for reason, count in view.refusals.items())
        alarms.append(Alarm(Severity.WARNING, "sessions refused", name, why))
    if view.snapshot.draining:
        alarms.append(Alarm(Severity.WARNING, "draining", name, "takes no new sessions and is about to stop"))
    for peer in view.snapshot.gateway.refused_peers:
        why = f"{peer.fingerprint} {peer.address}: {peer.reason or 'not trusted'} ({peer.times} times)"
        alarms.append(Alarm(Severity.WARNING, "key refused", name, why))
    return alarms


def device_alarms(view: DeviceView) -> list[Alarm]:
    name = view.device.device
    if view.status is Status.DOWN:
        why = view.reason or f"not heard of for {view.device.quiet_s or 0.0:.0f} s"
        return [Alarm(Severity.CRITICAL, "link down", name, why)]
    alarms = []
    if view.status is Status.PLAIN:
        alarms.append(Alarm(Severity.WARNING, "plain decoding", name, view.reason or "no reason given"))
    usual = usual_acceptance(view)
    now = view.work.acceptance_length
    if usual is not None and now is not None and now < FALLEN_ACCEPTANCE * usual:
        why = f"{now:.2f} tokens a tree, usually {usual:.2f}: other texts, or a head that does not fit"
        alarms.append(Alarm(Severity.WARNING, "acceptance fallen", name, why))
    return alarms


def usual_acceptance(view: DeviceView) -> float | None:
    """Acceptance length before the window; None when either side has too few trees to compare."""
    before = view.work.before
    if before.num_drafts < MIN_DRAFTS or view.work.grown("num_drafts") < MIN_DRAFTS:
        return None
    return 1 + before.accepted_tokens / before.num_drafts
