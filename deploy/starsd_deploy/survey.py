"""Many devices at once: log in, ask for facts, gather what each shall be, plan.

Devices are asked in parallel; one that cannot be reached is an entry in the result, never the end of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from starsd_deploy.checks import Check, blockers, check_device
from starsd_deploy.commands import ServiceLink, bundle_link
from starsd_deploy.contents import HashCache, read_content
from starsd_deploy.facts import Facts
from starsd_deploy.inventory import Device, Fleet, Role, Runtime
from starsd_deploy.plan import PLAN_VERSION, DevicePlan, Plan, Wanted, plan_device
from starsd_deploy.project_wheel import project_constraints, project_wheel
from starsd_deploy.releases import choose_python, make_release
from starsd_deploy.runner import gather_facts
from starsd_deploy.ssh import Connection, PasswordPrompt, connect
from starsd_deploy.ssh_config import SshFiles, route_to
from starsd_deploy.wheels import DeviceEnvironment, WheelSet, environment_of, resolve_wheels
from starsd_edge.errors import DeployError, StarSDError

__all__ = ["Login", "Planned", "Surveyed", "Workshop", "plan_fleet", "survey", "with_drafts"]

EXTRAS: dict[tuple[Role, Runtime], tuple[str, ...]] = {
    (Role.TARGET, Runtime.ONNXRUNTIME): ("chat", "endpoint", "onnx"),
    # tensorrt itself comes from apt on a board
    (Role.TARGET, Runtime.TENSORRT): ("chat", "endpoint"),
    (Role.DRAFT, Runtime.ONNXRUNTIME): ("server",),
    (Role.DRAFT, Runtime.TENSORRT): ("server",),
}


@dataclass(frozen=True, slots=True)
class Login:
    """How to get to devices."""

    files: SshFiles
    ask_password: PasswordPrompt | None = None

    def connect(self, device: Device) -> Connection:
        """Log in to a device.

        Raises:
            UnreachableError, AuthenticationError, ConfigError: as `ssh.connect` and `route_to`.
        """
        return connect(route_to(device, self.files), self.ask_password)


@dataclass(frozen=True, slots=True)
class Surveyed:
    """What was found of a device: facts, or why there are none."""

    device: Device
    facts: Facts | None
    error: StarSDError | None
    checks: tuple[Check, ...] = ()


@dataclass(frozen=True, slots=True)
class Planned:
    """A device's plan, or why there is none."""

    device: Device
    plan: DevicePlan | None
    error: StarSDError | None


def survey(
    fleet: Fleet, devices: tuple[Device, ...], login: Login, parallel: int, clock: Callable[[], float]
) -> dict[str, Surveyed]:
    """Facts and checks of devices by name; nothing is changed on any of them."""

    def one(device: Device) -> Surveyed:
        try:
            with login.connect(device) as connection:
                asked_s = clock()  # the script reads the device's clock first
                facts = gather_facts(connection, device, _peers(fleet, device, login))
                return Surveyed(device, facts, None, check_device(device, facts, asked_s))
        except StarSDError as error:
            return Surveyed(device, None, error)

    with ThreadPoolExecutor(max(1, parallel), thread_name_prefix="survey") as pool:
        return {found.device.name: found for found in pool.map(one, devices)}


def with_drafts(fleet: Fleet, devices: tuple[Device, ...]) -> tuple[Device, ...]:
    """The devices and the draft devices they talk to, drafts first: keys are exchanged with those."""
    names = {name for device in devices for name in device.service}
    drafts = [d for d in fleet.devices if d.role is Role.DRAFT and (d in devices or d.name in names)]
    return (*drafts, *(device for device in devices if device.role is not Role.DRAFT))


class Workshop:
    """Makes what devices shall be from what the workstation has: wheels, bundles, heads. Each thing once."""

    def __init__(
        self, cache: Path, *, refresh: bool = False, report: Callable[[str], None] | None = None
    ) -> None:
        self._cache = cache
        self._refresh = refresh
        self._report = report
        self._hashes = HashCache(cache / "hashes.json")
        self._wheels: dict[tuple[DeviceEnvironment, tuple[str, ...]], WheelSet] = {}

    def wanted(
        self, fleet: Fleet, device: Device, facts: Facts, found: Mapping[str, Surveyed], login: Login
    ) -> Wanted:
        """What a device shall be.

        Raises:
            BundleError: its bundle or head is missing. DeployError: no wheels fit it.
        """
        environment = environment_of(facts, choose_python(device, facts))
        wheels = self._wheel_set(environment, EXTRAS[device.role, device.runtime])
        folders = ((bundle_link(device), device.bundle), ("head", device.head))
        contents = tuple(read_content(link, Path(path), self._hashes) for link, path in folders if path)
        self._hashes.save()
        services = tuple(service_link(fleet, name, found, login) for name in device.service)
        version = next(w.name.split("-")[1] for w in wheels.wheels if w.name.startswith("starsd_edge-"))
        release = make_release(device, facts, version, wheels, contents, services)
        trusted_by = {
            name: draft.facts.state.trusted.get(device.name, "")
            for name in device.service
            if (draft := found.get(name)) is not None and draft.facts is not None
        }
        return Wanted(release=release, contents=contents, services=services, trusted_by=trusted_by)

    def _wheel_set(self, environment: DeviceEnvironment, extras: tuple[str, ...]) -> WheelSet:
        key = (environment, extras)
        if key not in self._wheels:
            wheel = project_wheel(self._cache / "wheels")
            self._wheels[key] = resolve_wheels(
                environment,
                extras,
                wheel,
                self._cache / "wheels",
                project_constraints(),
                refresh=self._refresh,
                report=self._report,
            )
        return self._wheels[key]


def plan_fleet(
    fleet: Fleet, devices: tuple[Device, ...], found: Mapping[str, Surveyed], workshop: Workshop, login: Login
) -> tuple[Planned, ...]:
    """A plan, or a reason, for each device; drafts come first.

    Of identical devices the first builds an engine, the others take it from there.
    """
    engines = {key: name for name, seen in found.items() if seen.facts for key in seen.facts.state.engines}
    planned = []
    for device in with_drafts(fleet, devices):
        if device in devices:
            planned.append(_plan_one(fleet, device, found, workshop, login, engines))
    return tuple(planned)


def whole_plan(fleet: Fleet, planned: tuple[Planned, ...]) -> Plan:
    """The plans that could be made, as one."""
    return Plan(PLAN_VERSION, fleet.path, tuple(p.plan for p in planned if p.plan is not None))


def service_link(fleet: Fleet, name: str, found: Mapping[str, Surveyed], login: Login) -> ServiceLink:
    """How targets see a service: from [services], or from the draft device's inventory and facts."""
    if name in fleet.services:
        service = fleet.services[name]
        return ServiceLink(name, service.address, service.key, is_fleet_device=False)
    device = fleet.device(name)
    draft = found.get(name)
    key = draft.facts.state.public_key if draft and draft.facts else ""
    return ServiceLink(
        name, f"tcp://{_service_host(device, login)}:{device.draft_port}", key, is_fleet_device=True
    )


def _plan_one(
    fleet: Fleet,
    device: Device,
    found: Mapping[str, Surveyed],
    workshop: Workshop,
    login: Login,
    engines: dict[str, str],
) -> Planned:
    """`engines` maps keys to devices that have or will have that engine; what this one builds is added."""
    seen = found[device.name]
    if seen.facts is None:
        return Planned(device, None, seen.error)
    stop = blockers(seen.checks)
    if stop:
        reasons = "; ".join(f"{check.name}: {check.found} ({check.fix})" for check in stop)
        return Planned(device, None, DeployError(f"{device.name}: {reasons}"))
    try:
        wanted = workshop.wanted(fleet, device, seen.facts, found, login)
        engine = wanted.manifest.engine
        wanted = msgspec.structs.replace(wanted, engine_from=engines.get(engine, ""))
        plan = plan_device(device, seen.facts, wanted)
        if engine:
            engines.setdefault(engine, device.name)
        return Planned(device, plan, None)
    except StarSDError as error:
        return Planned(device, None, error)


def _service_host(device: Device, login: Login) -> str:
    return device.service_address or route_to(device, login.files).device.host


def _peers(fleet: Fleet, device: Device, login: Login) -> tuple[str, ...]:
    """host:port of the services a device shall reach."""
    peers = []
    for name in device.service:
        url = urlsplit(service_link(fleet, name, {}, login).address)
        host = f"[{url.hostname}]" if url.hostname and ":" in url.hostname else url.hostname
        peers.append(f"{host}:{url.port}")
    return tuple(peers)
