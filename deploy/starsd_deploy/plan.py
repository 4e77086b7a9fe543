"""From what a device shall be and what it is to the steps in between. Pure: no connection, file or clock.

A step is in the plan only if its outcome is not there yet, so the plan of a device that is as it should be is
empty, and the plan after a cut at any point is the rest of the work.
"""

from __future__ import annotations

import hashlib

import msgspec

from starsd_deploy.commands import (
    ServiceLink,
    engine_script,
    key_name,
    make_key_script,
    probe_script,
    trust_script,
    unit_name,
    unit_text,
)
from starsd_deploy.facts import Facts, Manifest, State, facts_digest
from starsd_deploy.inventory import Device, Role
from starsd_deploy.releases import kept_releases
from starsd_deploy.steps import (
    Bundle,
    Confirm,
    Content,
    Engine,
    Gate,
    InstallUnit,
    MakeKey,
    Pin,
    Prepare,
    Prune,
    Release,
    Restart,
    Step,
    Switch,
    Trust,
    Upload,
)
from starsd_deploy.transfer import SLACK_BYTES
from starsd_edge.errors import ConfigError, ResourceError

__all__ = ["DevicePlan", "Plan", "Wanted", "plan_device", "read_plan", "write_plan"]

PLAN_VERSION = 2
# Of the weights: a build needs graph, engine, timing cache and temporaries (as its own check has it).
ENGINE_BUILD_FACTOR, ENGINE_FACTOR = 2.5, 1.25
INSTALLED_SIZE_FACTOR = 4  # a venv takes about three times its wheels; one more for the build's own needs


class Wanted(msgspec.Struct, frozen=True):
    """What a device shall be, worked out on the workstation.

    trusted_by  draft devices of the fleet this device talks to -> the public key each now admits for it
    engine_from  an identical device that has the engine of the bundle, or will have it; "" builds it here
    """

    release: Release
    contents: tuple[Content, ...]
    services: tuple[ServiceLink, ...]
    trusted_by: dict[str, str] = {}
    engine_from: str = ""

    @property
    def manifest(self) -> Manifest:
        """The release's own record."""
        return msgspec.json.decode(self.release.manifest, type=Manifest)


class DevicePlan(msgspec.Struct, frozen=True):
    """The steps for one device, and the facts they were made for."""

    device: str
    role: Role
    release: str
    root: str
    facts_digest: str
    steps: tuple[Step, ...]

    @property
    def upload_bytes(self) -> int:
        """Content that will be sent."""
        return sum(step.size for step in self.steps if isinstance(step, Upload))


class Plan(msgspec.Struct, frozen=True):
    """A whole deployment; `starsd deploy plan -o` writes it, `apply` does exactly it."""

    version: int
    fleet: str
    devices: tuple[DevicePlan, ...]


def plan_device(device: Device, facts: Facts, wanted: Wanted) -> DevicePlan:
    """The steps that are left for one device.

    Raises:
        ResourceError: the disk is too small; says how much is missing.
    """
    state = facts.state
    release = wanted.release
    steps: list[Step] = []
    there = state.release(release.id)
    if not there.complete:
        steps += _build_steps(state, wanted)
    engine_steps = _engine_steps(device, state, wanted)
    _check_disk(device, facts, wanted, (*steps, *engine_steps))
    key_steps = _key_steps(device, state, wanted)
    steps += key_steps
    steps += engine_steps
    if not there.gated:
        steps.append(Gate(release=release.id, timeout_s=device.start_timeout_s))
    steps += _live_steps(device, facts, wanted, key_steps)
    steps += _prune_steps(device, state, wanted)
    if steps and not state.releases:
        steps.insert(0, Prepare(root=state.root))
    return DevicePlan(
        device=device.name,
        role=device.role,
        release=release.id,
        root=state.root,
        facts_digest=facts_digest(facts),
        steps=tuple(steps),
    )


def write_plan(plan: Plan) -> bytes:
    """The plan as JSON."""
    return msgspec.json.format(msgspec.json.encode(plan), indent=1)


def read_plan(data: bytes, name: str) -> Plan:
    """A plan from JSON.

    Raises:
        ConfigError: it is not one, or of another version.
    """
    try:
        plan = msgspec.json.decode(data, type=Plan)
    except msgspec.MsgspecError as error:
        raise ConfigError(f"{name}: not a plan: {error}") from None
    if plan.version != PLAN_VERSION:
        raise ConfigError(
            f"{name}: plan of version {plan.version}, this is version {PLAN_VERSION}: plan again"
        )
    return plan


def _build_steps(state: State, wanted: Wanted) -> list[Step]:
    steps: list[Step] = []
    new_contents = [content for content in wanted.contents if content.id not in state.bundles]
    needed = [file.blob for content in new_contents for file in content.files]
    needed += [wheel.blob for wheel in wanted.release.wheels]
    missing = {blob.sha256: blob for blob in needed if state.blobs.get(blob.sha256) != blob.size}
    if missing:
        steps.append(Upload(blobs=tuple(missing.values())))
    steps += [Bundle(content=content) for content in new_contents]
    steps.append(wanted.release)
    return steps


def _engine_steps(device: Device, state: State, wanted: Wanted) -> list[Step]:
    key = wanted.manifest.engine
    if not key or key in state.engines:
        return []
    script = engine_script(device, state.root)
    older = next((m.engine_for for m in state.manifests if m.id == state.current), "")
    newer = wanted.manifest.engine_for
    reason = f"{newer} now, {older} before" if older and older != newer else ""
    return [Engine(wanted.release.id, key, wanted.engine_from, script, device.engine_timeout_s, reason)]


def _check_disk(device: Device, facts: Facts, wanted: Wanted, steps: tuple[Step, ...]) -> None:
    if not steps:
        return
    sent = sum(step.size for step in steps if isinstance(step, Upload))
    wheels = sum(wheel.blob.size for step in steps if isinstance(step, Release) for wheel in step.wheels)
    weights = sum(file.blob.size for content in wanted.contents for file in content.files)
    engine = next((step for step in steps if isinstance(step, Engine)), None)
    if engine:
        sent += int(weights * (ENGINE_FACTOR if engine.source else ENGINE_BUILD_FACTOR))
    needed = sent + INSTALLED_SIZE_FACTOR * wheels + SLACK_BYTES
    if needed > facts.disk_free_bytes:
        free = facts.disk_free_bytes >> 20
        raise ResourceError(
            f"{device.name}: {needed >> 20} MiB of disk needed in {facts.state.root}, {free} MiB free: "
            "make room, set `root` to a larger disk, or lower keep_releases"
        )


def _key_steps(device: Device, state: State, wanted: Wanted) -> list[Step]:
    steps: list[Step] = []
    if not state.public_key:
        steps.append(
            MakeKey(
                release=wanted.release.id, name=key_name(device.role), script=make_key_script(device.role)
            )
        )
    for service in wanted.services:
        pinned = state.pinned.get(service.name)
        if not service.public_key or pinned != f"{service.public_key} {service.address}":
            steps.append(Pin(service=service.name, address=service.address, public_key=service.public_key))
    for service_name, admitted in sorted(wanted.trusted_by.items()):
        if not state.public_key or admitted != state.public_key:
            steps.append(Trust(service=service_name, device=device.name, script=trust_script()))
    return steps


def _live_steps(device: Device, facts: Facts, wanted: Wanted, key_steps: list[Step]) -> list[Step]:
    state, release = facts.state, wanted.release
    unit, scope = unit_name(device.role), device.unit.value
    text = unit_text(device, state.root, facts.user, facts.device_groups)
    steps: list[Step] = []
    previous = state.current if state.current != release.id else ""
    if state.current != release.id:
        steps.append(Switch(release=release.id, previous=previous))
    install = state.unit_sha256 != hashlib.sha256(text.encode()).hexdigest() or not state.unit_enabled
    if install:
        steps.append(InstallUnit(unit=unit, scope=scope, text=text))
    new_pin = any(isinstance(step, Pin) for step in key_steps)
    outdated = state.running != release.id or state.restart_pending or new_pin
    if outdated and (state.unit_active or not install):
        steps.append(Restart(unit=unit, scope=scope, drain_s=device.drain_s))
    if steps or not state.release(release.id).confirmed:
        steps.append(
            Confirm(
                release=release.id,
                previous=previous or _previous(state, release.id),
                unit=unit,
                scope=scope,
                drain_s=device.drain_s,
                timeout_s=device.start_timeout_s,
                probe=probe_script(device),
            )
        )
    return steps


def _previous(state: State, release_id: str) -> str:
    """Where to go back to when the switch was already done by a deployment that was cut."""
    for name in reversed(state.history):
        if name != release_id and state.release(name).gated:
            return name
    return ""


def _prune_steps(device: Device, state: State, wanted: Wanted) -> list[Step]:
    """Keeps what kept releases need; blobs of releases that are only known by name are kept with them."""
    keep = kept_releases(state, wanted.release.id, device.keep_releases)
    old_releases = tuple(release.id for release in state.releases if release.id not in keep)
    if not old_releases:
        return []
    manifests = [m for m in state.manifests if m.id in keep]
    bundles = {wanted_id for m in manifests for wanted_id in m.links.values()} | set(
        wanted.release.links.values()
    )
    kept = (*manifests, wanted.manifest)
    blobs = {sha for m in kept for sha in m.blobs}
    old_bundles = tuple(name for name in state.bundles if name not in bundles)
    old_blobs = tuple(sorted(sha for sha in state.blobs if sha not in blobs))
    words = [("release", name) for name in keep]
    words += [("bundle", name) for name in sorted(bundles)]
    words += [("blob", sha) for sha in sorted(blobs)]
    words += [("engine", key) for key in sorted({m.engine for m in kept if m.engine})]
    return [
        Prune(
            releases=old_releases,
            bundles=old_bundles,
            blobs=old_blobs,
            keep=tuple(word for pair in words for word in pair),
        )
    ]
