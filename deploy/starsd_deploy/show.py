"""Plans, checks, status and outcomes as text for people. Pure: records in, lines out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from starsd_deploy.apply import Ending, Outcome
from starsd_deploy.checks import Level
from starsd_deploy.facts import Facts
from starsd_deploy.inventory import Device
from starsd_deploy.steps import describe, human_bytes
from starsd_deploy.survey import Planned, Surveyed

__all__ = ["check_lines", "outcome_lines", "plan_lines", "report_lines", "status_line", "status_record"]

SIGNS = {Level.OK: "ok     ", Level.WARNING: "warning", Level.BLOCKER: "BLOCKER"}


def plan_lines(planned: tuple[Planned, ...]) -> Iterator[str]:
    """The plan of each device, or why there is none."""
    for one in planned:
        if one.plan is None:
            yield f"{one.device.name}: cannot be planned: {_bare(one.device.name, one.error)}"
            continue
        if not one.plan.steps:
            yield f"{one.device.name}: nothing to do, {one.plan.release} is live"
            continue
        yield f"{one.device.name} ({one.plan.role.value}): {human_bytes(one.plan.upload_bytes)} to send"
        yield from (f"  {describe(step)}" for step in one.plan.steps)


def check_lines(found: Mapping[str, Surveyed]) -> Iterator[str]:
    """What doctor found, device by device."""
    for name, seen in found.items():
        if seen.facts is None:
            yield f"{name}: {_bare(name, seen.error)}"
            continue
        yield f"{name} ({seen.facts.hostname})"
        for check in seen.checks:
            yield f"  {SIGNS[check.level]} {check.name}: {check.found}"
            if check.fix:
                yield f"          {check.fix}"


def report_lines(device: Device, facts: Facts) -> Iterator[str]:
    """What a bug report needs and nothing that names people or opens doors: no keys, addresses, names."""
    board = facts.board
    yield f"role: {device.role.value}, runtime: {device.runtime.value}, unit: {device.unit.value}"
    glibc = ".".join(map(str, facts.glibc))
    yield f"system: {facts.os_name}, {facts.machine}, kernel {facts.kernel}, glibc {glibc}"
    chip = f"{board.module or '-'}, {board.chip or '-'}, SM {board.compute or '-'}"
    yield f"board: {board.model or '-'}, {chip}"
    yield f"L4T {board.l4t or '-'}, JetPack {board.jetpack or '-'} ({board.jetpack_line or '-'})"
    yield f"TensorRT {board.tensorrt or '-'}, CUDA {board.cuda or '-'}, power mode {board.power_mode or '-'}"
    yield f"GPUs: {'; '.join(facts.gpus) or '-'}"
    for python in facts.pythons:
        parts = ("venv", "ensurepip", "pip", "tensorrt")
        flags = [name for name in parts if getattr(python, f"has_{name}")]
        yield f"python: {python.version} {python.platform} ({', '.join(flags) or 'bare'})"
    yield f"memory: {facts.memory_bytes >> 20} MiB, {facts.available_bytes >> 20} free, {facts.cpus} CPUs"
    yield f"disk: {facts.disk_free_bytes >> 20} MiB; systemd {facts.init_state or '-'}; sudo {facts.sudo}"
    yield f"container {facts.container or 'no'}, GPU groups {', '.join(facts.device_groups) or '-'}"
    state = facts.state
    marks = ("complete", "gated", "confirmed")
    for release in state.releases:
        done = [mark for mark in marks if getattr(release, mark)]
        live = (("current", state.current), ("running", state.running))
        where = [word for word, name in live if name == release.id]
        yield f"release {release.id}: {', '.join(done + where) or 'unfinished'}"


def status_record(device: Device, seen: Surveyed) -> dict[str, object]:
    """One device for `status`, ready for JSON."""
    if seen.facts is None:
        return {"device": device.name, "role": device.role.value, "error": str(seen.error)}
    state = seen.facts.state
    return {
        "device": device.name,
        "role": device.role.value,
        "current": state.current,
        "running": state.running,
        "active": state.unit_active,
        "enabled": state.unit_enabled,
        "releases": [release.id for release in state.releases if release.gated],
        "has_key": bool(state.public_key),
        "services": sorted(state.pinned),
        "trusted": sorted(state.trusted),
        "lease": seen.facts.lease,
        "board": seen.facts.board.model,
        "uptime_s": seen.facts.uptime_s,
    }


def status_line(record: dict[str, object]) -> str:
    """A status record for people."""
    if "error" in record:
        return f"{record['device']}: {_bare(record['device'], record['error'])}"
    same = bool(record["running"]) and record["running"] == record["current"]
    running = "running" if same else f"running {record['running'] or 'nothing'}"
    lease = f", {record['lease']}" if record["lease"] else ""
    return f"{record['device']} ({record['role']}): {record['current'] or 'no release'}, {running}{lease}"


def outcome_lines(outcomes: tuple[Outcome, ...]) -> Iterator[str]:
    """How a deployment ended, a line a device, errors last."""
    for outcome in outcomes:
        sent = f", {human_bytes(outcome.sent_bytes)} sent" if outcome.ending is not Ending.NOT_STARTED else ""
        yield f"{outcome.device}: {outcome.ending.value}{sent}"
    for outcome in outcomes:
        if outcome.error is not None:
            yield f"{outcome.error}"


def _bare(name: object, error: object) -> str:
    """The message without the device's name in front, which the line has already."""
    return str(error).removeprefix(f"{name}: ")
