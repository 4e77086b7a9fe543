"""What runs on a device, in one place: command lines of services, health gates and keys; the unit.

Scripts start the interpreter of the release with -I, so that a ROS user's PYTHONPATH cannot leak in. `root`
is the absolute folder on the device.
"""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass
from pathlib import Path

from starsd_deploy.inventory import Device, Role, UnitScope

__all__ = [
    "KILL_AFTER_S",
    "ServiceLink",
    "bundle_link",
    "config_text",
    "engine_script",
    "gate_script",
    "key_name",
    "make_key_script",
    "probe_script",
    "rotate_key_script",
    "run_script",
    "trust_script",
    "unit_name",
    "unit_text",
    "untrust_script",
]

PROBE_TIMEOUT_S = 5
KILL_AFTER_S = 5  # beyond the drain that the service itself keeps: what is left then hangs
PYTHON = 'env -u PYTHONPATH "$PWD/venv/bin/python" -I -m starsd_edge'


@dataclass(frozen=True, slots=True)
class ServiceLink:
    """A draft service as a target sees it. `public_key` is empty while its device has not made one."""

    name: str
    address: str
    public_key: str
    is_fleet_device: bool


def unit_name(role: Role) -> str:
    """One unit a role."""
    return f"starsd-{role.value}.service"


def bundle_link(device: Device) -> str:
    """Where a release has its bundle: under its own name, by which the endpoint calls the model."""
    return f"bundle/{Path(device.bundle).name}"


def run_script(device: Device, root: str, services: tuple[ServiceLink, ...]) -> str:
    """The release's `run`: what the unit starts. Its working folder is the release, by its real path."""
    argv = _draft_argv(device, root) if device.role is Role.DRAFT else _target_argv(device, services)
    return _prelude(device, root) + f"exec {PYTHON} {shlex.join(argv)}\n"


def config_text(device: Device, root: str, services: tuple[ServiceLink, ...]) -> str:
    """The release's settings file, so that `starsd chat` on the device needs no flag; drafting needs none.

    JSON's strings are TOML's, too.
    """
    if device.role is Role.DRAFT:
        return ""
    settings = {"bundle": f"{root}/current/{bundle_link(device)}", "service": _addresses(services)}
    lines = [f"{name} = {json.dumps(value)}\n" for name, value in settings.items() if value]
    return "# written by starsd deploy; change fleet.toml instead\n[chat]\n" + "".join(lines)


def gate_script(device: Device, root: str, services: tuple[ServiceLink, ...]) -> str:
    """The release's `gate`: exits 0 if the release may go live; what it prints tells why not."""
    if device.role is Role.DRAFT:
        label, argv = "heads load and the service could serve", [*_draft_argv(device, root), "--check"]
    else:
        label, argv = (
            "files and self-test of the bundle",
            ["bundle", "verify", bundle_link(device), "--on-device"],
        )
    lines = f"echo {shlex.quote('== ' + label)}\n{PYTHON} {shlex.join(argv)}\n"
    return _prelude(device, root) + lines + _reach(services)


def engine_script(device: Device, root: str) -> str:
    """Shell in a release's folder: the engine of its bundle, built if need be; the last line is its file."""
    return _exports(device, root) + f"{PYTHON} bundle engine {shlex.quote(bundle_link(device))}\n"


def probe_script(device: Device) -> str:
    """Python (standard library) that exits 0 once the running release answers on its port."""
    if device.role is Role.TARGET:
        host = "127.0.0.1" if device.endpoint_host in {"0.0.0.0", "::"} else device.endpoint_host  # noqa: S104
        url = f"http://{host}:{device.endpoint_port}/health"
        return f"import urllib.request as r; print(r.urlopen({url!r}, timeout={PROBE_TIMEOUT_S}).status)"
    address = ("127.0.0.1", device.draft_port)
    return f"import socket; socket.create_connection({address!r}, {PROBE_TIMEOUT_S}).close()"


def _draft_argv(device: Device, root: str) -> list[str]:
    argv = ["draft", "serve", "--bind", f"tcp://*:{device.draft_port}", "--name", device.name]
    argv += ["--keys", f"{root}/keys"]
    if device.head:
        argv += ["--head", "head"]
    if device.bundle:
        argv += ["--target", bundle_link(device)]
    return [*argv, *device.arguments]


def _target_argv(device: Device, services: tuple[ServiceLink, ...]) -> list[str]:
    argv = [
        "serve",
        "--bundle",
        bundle_link(device),
        "--host",
        device.endpoint_host,
        "--port",
        str(device.endpoint_port),
        "--drain",
        f"{device.drain_s:g}",
    ]
    if services:
        argv += ["--service", _addresses(services)]
    return [*argv, *device.arguments]


def _addresses(services: tuple[ServiceLink, ...]) -> str:
    """All services of a target, the preferred one first: it goes over to the next when one is lost."""
    return ",".join(service.address for service in services)


def _reach(services: tuple[ServiceLink, ...]) -> str:
    """Shell that fails when no draft service answers. One that does is enough: a target goes over to it."""
    if not services:
        return ""
    lines = ["reached=\n"]
    for service in services:
        ping = shlex.join(["ping", service.address, "--count", "3", "--no-upload"])
        lines.append(f"echo {shlex.quote(f'== service {service.name} at {service.address}')}\n")
        lines.append(f"if {PYTHON} {ping}; then reached=1; fi\n")
    return "".join(lines) + '[ -n "$reached" ] || { echo "no draft service can be reached" >&2; exit 1; }\n'


def _prelude(device: Device, root: str) -> str:
    return '#!/bin/sh\nset -eu\ncd "$(dirname "$(readlink -f "$0")")"\n' + _exports(device, root)


def _exports(device: Device, root: str) -> str:
    exports = {
        "STARSD_CONFIG": f"{root}/current/config",
        "STARSD_KEYS": f"{root}/keys",
        "STARSD_CACHE": f"{root}/cache",
        "STARSD_STATE": f"{root}/state",
        **device.environment,
    }
    return "".join(f"export {name}={shlex.quote(value)}\n" for name, value in sorted(exports.items()))


def key_name(role: Role) -> str:
    """Which file in the keys folder is a device's own key; the service looks for its own by another name."""
    return "service" if role is Role.DRAFT else "device"


def make_key_script(role: Role) -> str:
    """Shell in a release's folder; $1 is the root. Makes the pair if needed, prints the public half."""
    words = f'--dir "$1/keys" --name {key_name(role)}'
    return f"{PYTHON} keys generate {words} >/dev/null\n{PYTHON} keys show {words} --public"


def rotate_key_script(role: Role) -> str:
    """Shell in the current release; $1 is the root. Replaces the pair, prints the new public half."""
    words = f'--dir "$1/keys" --name {key_name(role)}'
    return f"{PYTHON} keys rotate {words} >/dev/null\n{PYTHON} keys show {words} --public"


def trust_script(*, keep_previous: bool = False) -> str:
    """Shell in a draft device's release; $1 root, $2 name, $3 public key: admits that device by that key.

    With `keep_previous` its earlier key stays good, until it is trusted once more without.
    """
    keep = " --keep-previous" if keep_previous else ""
    return f'{PYTHON} keys trust "$2" "$3" --dir "$1/keys/trusted" --replace{keep}'


def untrust_script() -> str:
    """Shell in a draft device's release; $1 root, $2 name: admits it no longer."""
    return f'{PYTHON} keys revoke "$2" --dir "$1/keys/trusted"'


def unit_text(device: Device, root: str, user: str, device_groups: tuple[str, ...]) -> str:
    """The systemd unit. It does not change with a release: `current/run` does.

    Restart=always is how a restart needs no root: the deployer ends the process, systemd starts the new one.
    `device_groups` are those of video and render that exist: without them a Jetson hides its GPU.
    """
    lines = [
        "[Unit]",
        f"Description=StarSD {'draft service' if device.role is Role.DRAFT else 'target'} ({device.name})",
        "After=network-online.target",
        "Wants=network-online.target",
        "StartLimitIntervalSec=0",
        "",
        "[Service]",
        f"ExecStart={root}/current/run",
        "Restart=always",
        "RestartSec=1",
        "KillMode=mixed",
        f"TimeoutStopSec={round(device.drain_s) + KILL_AFTER_S}",
        "NoNewPrivileges=yes",
    ]
    if device.unit is UnitScope.SYSTEM:
        lines += [f"User={user}", "PrivateTmp=yes", "ProtectSystem=full"]
        if device_groups:
            lines.append(f"SupplementaryGroups={' '.join(device_groups)}")
    wanted_by = "multi-user.target" if device.unit is UnitScope.SYSTEM else "default.target"
    return "\n".join([*lines, "", "[Install]", f"WantedBy={wanted_by}", ""])
