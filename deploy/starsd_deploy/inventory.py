"""`fleet.toml`: which devices there are and what each shall be. Read strictly, checked completely, frozen.

[defaults]                      # any device key; a device's own value wins
user = "edge"

[devices.desk]                  # the table's name is the device's name
address = "10.0.0.2"            # or a Host of ~/.ssh/config; default: the name
roles = ["draft"]
head = "heads/vicuna-7b"

[devices.nano1]
roles = ["target"]
bundle = "bundles/vicuna-7b-int4"
service = ["desk"]              # draft devices of this file, or names of [services]

[services.lab]                  # a draft service that this file does not deploy
address = "tcp://10.0.0.9:7731"
key = "..."                     # its public key, 40 characters of Z85
"""

from __future__ import annotations

import enum
import fnmatch
import re
import sys
from pathlib import Path
from typing import Any

import msgspec

from starsd_edge.defaults import DRAFT_PORT, DRAIN_S, ENDPOINT_PORT, MAX_DRAIN_S
from starsd_edge.errors import ConfigError, UsageError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = [
    "Device",
    "Fleet",
    "Role",
    "Runtime",
    "ServiceAddress",
    "UnitScope",
    "inventory_schema",
    "load_fleet",
    "parse_fleet",
]

MAX_NAME = 63  # letters
NAME = re.compile(
    rf"[A-Za-z0-9][A-Za-z0-9._-]{{0,{MAX_NAME - 1}}}"
)  # also a file name and a systemd instance name
Z85_KEY = re.compile(r"[0-9a-zA-Z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}")
SERVICE_URL = re.compile(r"tcp://(?:\[[0-9A-Fa-f:]+\]|[^\s:/\[\]]+):\d{1,5}")
ENVIRONMENT_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


class Role(enum.Enum):
    """What a device does."""

    TARGET = "target"  # holds the large model: client and endpoint
    DRAFT = "draft"  # holds the draft heads: the service


class Runtime(enum.Enum):
    """What runs the target model on a device."""

    ONNXRUNTIME = "onnxruntime"
    TENSORRT = "tensorrt"


class UnitScope(enum.Enum):
    """Whose systemd starts the service."""

    SYSTEM = "system"  # needs sudo once, to install the unit
    USER = "user"  # needs lingering, else it ends with the last login


CHOICES: dict[str, type[enum.Enum]] = {"roles": Role, "runtime": Runtime, "unit": UnitScope}  # by key


class ServiceAddress(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A draft service that the fleet uses and does not deploy."""

    address: str
    key: str

    def __post_init__(self) -> None:
        if not SERVICE_URL.fullmatch(self.address):
            raise ValueError(f"address {self.address!r} is not of the form tcp://host:port")
        if not Z85_KEY.fullmatch(self.key):
            raise ValueError("key is not a public key of 40 Z85 characters (`starsd keys show` prints it)")


class Device(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One device after defaults are applied. Paths are absolute (relative ones start at the file's folder).

    address     host name, IP address or ssh_config Host
    service_address   host under which targets reach a draft device; default: `address`
    user, port, identity_file, host_key, jump   override ssh_config where given
    root        folder on the device, relative to the login folder or absolute
    python      interpreter on the device to build the release with; empty: the best one found
    draft_port, endpoint_port, endpoint_host   what the device listens on
    keep_releases  how many releases stay for rollback
    bundle      (draft device) of the target, where the head's folder lacks its embedding
    drain_s     how long a running answer may take before a restart cuts it
    start_timeout_s   how long health gate and start may take; loading 7B from an SD card is slow
    engine_timeout_s  how long building a TensorRT engine may take, in the background of the running release
    """

    name: str
    roles: tuple[Role, ...]
    address: str = ""
    service_address: str = ""
    user: str = ""
    port: int = 0
    identity_file: str = ""
    host_key: str = ""
    jump: str = ""
    tags: tuple[str, ...] = ()
    root: str = ".local/share/starsd"
    python: str = ""
    unit: UnitScope = UnitScope.SYSTEM
    runtime: Runtime = Runtime.ONNXRUNTIME
    bundle: str = ""
    head: str = ""
    service: tuple[str, ...] = ()
    draft_port: int = DRAFT_PORT
    endpoint_host: str = "127.0.0.1"
    endpoint_port: int = ENDPOINT_PORT
    environment: dict[str, str] = {}
    arguments: tuple[str, ...] = ()
    keep_releases: int = 3
    drain_s: float = DRAIN_S
    start_timeout_s: float = 300.0
    engine_timeout_s: float = 7200.0

    def __post_init__(self) -> None:
        if not NAME.fullmatch(self.name):
            raise ValueError(
                f"name {self.name!r} must start with a letter or digit and hold only those and . _ -"
            )
        if re.search(r"\s", self.host):
            raise ValueError(f"address {self.host!r} is no host's name or IP address")
        if not self.roles or len(self.roles) != 1:
            raise ValueError('roles must name one role: ["target"] or ["draft"]')
        if self.role is Role.TARGET and not self.bundle:
            raise ValueError("a target needs `bundle`, a folder that `starsd export` made")
        if self.role is Role.DRAFT and self.service:
            raise ValueError("`service` is for targets: a draft device is one itself")
        for label, port in (("draft_port", self.draft_port), ("endpoint_port", self.endpoint_port)):
            if not 1 <= port <= 65535:
                raise ValueError(f"{label} {port} is not between 1 and 65535")
        if not 0 <= self.port <= 65535:
            raise ValueError(f"port {self.port} is not between 1 and 65535")
        if self.host_key and not self.host_key.startswith("SHA256:"):
            raise ValueError("host_key must be a fingerprint as `ssh-keygen -lf` prints it: SHA256:...")
        if self.keep_releases < 1:
            raise ValueError("keep_releases must be at least 1")
        if not 0 <= self.drain_s <= MAX_DRAIN_S:
            raise ValueError(f"drain_s must be between 0 and {MAX_DRAIN_S}")
        if ".." in Path(self.root).parts or not re.fullmatch(r"[A-Za-z0-9._/-]+", self.root):
            raise ValueError(f"root {self.root!r} may hold letters, digits and . _ - / and no '..'")
        for name in self.environment:
            if not ENVIRONMENT_NAME.fullmatch(name):
                raise ValueError(f"environment variable {name!r} is not a name")

    @property
    def role(self) -> Role:
        """The one role."""
        return self.roles[0]

    @property
    def host(self) -> str:
        """What ssh is asked for."""
        return self.address or self.name


class Fleet(msgspec.Struct, frozen=True):
    """The whole inventory, devices in file order."""

    path: str
    devices: tuple[Device, ...]
    services: dict[str, ServiceAddress] = {}

    def device(self, name: str) -> Device:
        """One device by name.

        Raises:
            UsageError: the fleet has no such device.
        """
        for device in self.devices:
            if device.name == name:
                return device
        raise UsageError(
            f"{self.path} has no device {name!r}: it has {', '.join(d.name for d in self.devices)}"
        )

    def select(
        self, limit: tuple[str, ...], exclude: tuple[str, ...], tags: tuple[str, ...]
    ) -> tuple[Device, ...]:
        """Devices whose name matches a pattern of `limit` (all if empty), none of `exclude`, any of `tags`.

        Raises:
            UsageError: nothing is left.
        """
        chosen = tuple(
            device
            for device in self.devices
            if (not limit or any(fnmatch.fnmatchcase(device.name, p) for p in limit))
            and not any(fnmatch.fnmatchcase(device.name, p) for p in exclude)
            and (not tags or set(tags) & set(device.tags))
        )
        if not chosen:
            raise UsageError(f"no device of {self.path} is selected by --limit, --exclude and --tags")
        return chosen


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The file's top level, before defaults are merged."""

    devices: dict[str, dict[str, Any]]
    defaults: dict[str, Any] = {}
    services: dict[str, dict[str, Any]] = {}


def load_fleet(path: Path) -> Fleet:
    """Read and check an inventory.

    Raises:
        ConfigError: missing, not TOML, or wrong; names the file and, where it can be told, line and key.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(
            f"{path}: no such file; `starsd deploy init user@host` writes a first one"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {getattr(error, 'strerror', error)}") from error
    return parse_fleet(text, path)


def parse_fleet(text: str, path: Path) -> Fleet:
    """Read and check an inventory's text; `path` is for messages and for relative paths.

    Raises:
        ConfigError: as `load_fleet`.
    """
    try:
        document = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise ConfigError(f"{path}: not TOML: {error}") from None
    if not document:
        raise ConfigError(f"{path}: the file is empty; remove it and run: starsd deploy init user@host")
    if "devices" not in document:
        raise ConfigError(
            f"{path}: no inventory, for want of a [devices.NAME] table; name yours with --fleet, or write a "
            "first one: starsd deploy init user@host --fleet FILE"
        )
    file = _convert(document, _File, text, path, ())
    defaults = file.defaults
    for key in ("name", "address", "service_address", "host_key"):
        if key in defaults:
            raise ConfigError(
                _where(text, path, ("defaults", key)) + f"{key!r} belongs to one device, not to all"
            )
    _convert({"name": "x", "roles": ["draft"]} | _neutral(defaults), Device, text, path, ("defaults",))
    devices = []
    for name, own in file.devices.items():
        if "name" in own:
            raise ConfigError(_where(text, path, ("devices", name, "name")) + "the table's name is the name")
        merged = _applicable(defaults, own) | own | {"name": name}
        device = _convert(merged, Device, text, path, ("devices", name))
        devices.append(_absolute(device, path.parent.resolve()))
    if not devices:
        raise ConfigError(f"{path}: no [devices.NAME] table")
    services = {
        name: _convert(value, ServiceAddress, text, path, ("services", name))
        for name, value in file.services.items()
    }
    fleet = Fleet(path=str(path), devices=tuple(devices), services=services)
    _check_references(fleet, text, path)
    return fleet


def inventory_schema() -> dict[str, Any]:
    """The JSON Schema of one [devices.NAME] table, for editors."""
    return msgspec.json.schema(Device)


def _neutral(defaults: dict[str, Any]) -> dict[str, Any]:
    """Defaults as a device of their own, to check names and types; what depends on the role is left out."""
    return {key: value for key, value in defaults.items() if key not in {"roles", "bundle", "service"}}


def _applicable(defaults: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    """A default bundle or service is for targets, a default head for draft devices."""
    roles = own.get("roles", defaults.get("roles", []))
    foreign = {"bundle", "service"} if roles == [Role.DRAFT.value] else {"head"}
    return {key: value for key, value in defaults.items() if key not in foreign}


def _absolute(device: Device, folder: Path) -> Device:
    def absolute(value: str) -> str:
        return str(folder / Path(value).expanduser()) if value else ""

    return msgspec.structs.replace(
        device,
        bundle=absolute(device.bundle),
        head=absolute(device.head),
        identity_file=absolute(device.identity_file),
    )


def _check_references(fleet: Fleet, text: str, path: Path) -> None:
    drafts = {device.name for device in fleet.devices if device.role is Role.DRAFT}
    for device in fleet.devices:
        for service in device.service:
            if service not in drafts and service not in fleet.services:
                known = ", ".join(sorted(drafts | set(fleet.services))) or "none"
                where = _where(text, path, ("devices", device.name, "service"))
                raise ConfigError(
                    f"{where}{service!r} is no draft device and no [services] entry (known: {known})"
                )
    seen: dict[str, str] = {}
    for name in (*drafts, *fleet.services):
        if name in seen:
            raise ConfigError(_where(text, path, ("services", name)) + f"{name!r} is also a draft device")
        seen[name] = name


def _convert(value: object, kind: Any, text: str, path: Path, prefix: tuple[str, ...]) -> Any:
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        message, _, where = str(error).partition(" - at `")
        inner = [
            part for part in re.split(r"[.\[\]]+", where.rstrip("`").lstrip("$")) if part not in {"", "..."}
        ]
        unknown = re.search(r"unknown field `([^`]+)`", message)
        missing = re.search(r"missing required field `([^`]+)`", message)
        choices = CHOICES.get(inner[0]) if inner else None
        if choices and message.startswith("Invalid enum value"):
            message += f"; allowed: {', '.join(choice.value for choice in choices)}"
        keys = (*prefix, *inner) + ((unknown.group(1),) if unknown else ())
        if unknown:
            message += f"; allowed: {', '.join(_fields(kind, prefix))}"
        if missing and prefix:
            message += f" in [{'.'.join(prefix)}]"
        raise ConfigError(_where(text, path, keys) + message) from None


def _fields(kind: Any, prefix: tuple[str, ...]) -> tuple[str, ...]:
    names = kind.__struct_fields__ if hasattr(kind, "__struct_fields__") else ()
    return tuple(name for name in names if not (kind is Device and name == "name"))


def _where(text: str, path: Path, keys: tuple[str, ...]) -> str:
    """`file, line N, key: ` for the deepest of `keys` that can be found in the text."""
    for depth in range(len(keys), 0, -1):
        line = line_of(text, keys[:depth])
        if line:
            return f"{path}, line {line}, {'.'.join(keys)}: "
    return f"{path}: " + (f"{'.'.join(keys)}: " if keys else "")


def line_of(text: str, keys: tuple[str, ...]) -> int:
    """The line on which a TOML key or table is set, from 1; 0 where a plain scan does not find it."""
    table: tuple[str, ...] = ()
    for number, line in enumerate(text.splitlines(), start=1):
        header = re.match(r"\s*\[+\s*([^\]]+?)\s*\]+", line)
        if header and "=" not in line.split("[")[0]:
            table = _dotted(header.group(1))
            if table[: len(keys)] == keys:
                return number
            continue
        assignment = re.match(r"\s*([A-Za-z0-9_\-\"'. ]+?)\s*=", line)
        if assignment and (*table, *_dotted(assignment.group(1))) == keys:
            return number
    return 0


def _dotted(text: str) -> tuple[str, ...]:
    return tuple(part.strip().strip("\"'") for part in text.split("."))
