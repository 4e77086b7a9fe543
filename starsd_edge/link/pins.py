"""Which key a service must show: pinned by name, one file each, by the deployer or `starsd keys pin`.

A file holds the key's 40 characters; a second line may name the address it is for.
"""

from __future__ import annotations

import os
import re
import socket
from dataclasses import dataclass
from pathlib import Path

from starsd_edge.errors import ConfigError, UsageError
from starsd_edge.link.address import draft_address, monitor_of
from starsd_edge.link.diagnose import wants_keys
from starsd_edge.link.keys import (
    MAX_KEY_FILE_BYTES,
    PUBLIC_MODE,
    KeyPair,
    check_name,
    key_dir,
    make_folder,
    parse_public,
    write_atomic,
)
from starsd_edge.link.sockets import EdgeKeys, is_local

__all__ = [
    "Pin",
    "edge_keys",
    "is_host",
    "pin_service",
    "pinned_services",
    "service_address",
    "unpin_service",
]

SUFFIX = ".pub"
# No address and no domain: a pinned name, or a host of this network.
BARE_WORD = re.compile(r"[A-Za-z][A-Za-z0-9_-]*")
DEVICE_KEY, SERVICE_KEY = "device.key", "service.key"  # in the keys folder


@dataclass(frozen=True, slots=True)
class Pin:
    """A service this device knows; `address` is "" where any may be its."""

    name: str
    public: str
    address: str = ""


def pin_service(folder: Path, pin: Pin) -> None:
    """Remember the key of a service; one of the same name is replaced. Raises ConfigError."""
    check_name(pin.name)
    text = parse_public(pin.public) + "\n" + (pin.address + "\n" if pin.address else "")
    make_folder(folder / "services", 0o755)
    write_atomic(folder / "services" / (pin.name + SUFFIX), text, PUBLIC_MODE)


def unpin_service(folder: Path, name: str) -> None:
    """Forget the key of a service. Raises ConfigError where none of this name is pinned."""
    check_name(name)
    try:
        os.unlink(folder / "services" / (name + SUFFIX))
    except FileNotFoundError:
        known = ", ".join(pin.name for pin in pinned_services(folder)) or "none"
        raise ConfigError(f"no draft service is pinned as '{name}'; pinned: {known}") from None
    except OSError as error:
        raise ConfigError(f"{folder / 'services'}: cannot be written: {error.strerror}") from None


def pinned_services(folder: Path) -> list[Pin]:
    """By name. Raises ConfigError, naming the file, when one is damaged."""
    services = folder / "services"
    try:
        names = sorted(name for name in os.listdir(services) if name.endswith(SUFFIX))
    except FileNotFoundError:
        return []
    except OSError as error:
        raise ConfigError(f"{services}: cannot be read: {error.strerror}") from None
    return [read_pin(services / name) for name in names]


def read_pin(path: Path) -> Pin:
    try:
        if not path.is_file():  # a pipe would keep its reader waiting
            raise ConfigError("no file")
        lines = path.read_text("utf-8")[:MAX_KEY_FILE_BYTES].split()
        return Pin(path.name.removesuffix(SUFFIX), parse_public(lines[0]), lines[1] if len(lines) > 1 else "")
    except (OSError, UnicodeDecodeError, IndexError, ConfigError) as error:
        raise ConfigError(f"{path}: holds no public key ({error})") from None


def service_address(service: str, folder: Path | None = None) -> str:
    """Where a service drafts that is given by address, or by the name that it was pinned under with one.

    Raises UsageError for an address that is none, and for a word that is neither pinned nor a host.
    """
    pins = pinned_services(folder or key_dir())
    pinned = next((pin.address for pin in pins if pin.name == service and pin.address), None)
    if pinned is None and BARE_WORD.fullmatch(service) and not is_host(service):
        known = ", ".join(pin.name for pin in pins if pin.address) or "none"
        raise UsageError(f"no host is called {service}, and no draft service is pinned as that ({known})")
    return draft_address(pinned or service)


def is_host(name: str) -> bool:
    """Whether the network knows the name."""
    try:
        return bool(socket.getaddrinfo(name, None))
    except OSError:
        return False


def edge_keys(address: str, service_key: str | None = None, folder: Path | None = None) -> EdgeKeys | None:
    """The keys for a link to `address`, or None where it is of this machine and takes no keys.

    `service_key` wins over pins; a pin with this very address (or whose monitor has it) wins over the only
    pin there is. A service of this machine is asked whether it wants keys; where its own key can be read,
    that one opens it. Raises ConfigError: no own key, or no telling which service this is.
    """
    folder = folder or key_dir()
    pins = pinned_services(folder)
    public = parse_public(service_key) if service_key else pinned_at(address, pins)
    if public is None and is_local(address):
        if not wants_keys(address):
            return None
        if os.path.exists(folder / SERVICE_KEY):
            own = KeyPair.load(folder / SERVICE_KEY)
            return EdgeKeys(own, own.key.public)
    public = public or only_pin(address, pins)
    if public is None:
        raise ConfigError(
            f"{address}: the draft service's key is not known here; `starsd keys show --name service "
            f"--public` there prints it, `starsd keys pin NAME KEY` here remembers it"
        )
    return EdgeKeys(own_pair(folder, public), public)


def pinned_at(address: str, pins: list[Pin]) -> str | None:
    """The key of the service that was pinned with this address."""
    own = (pin.public for pin in pins if pin.address and address == draft_address(pin.address))
    watched = (pin.public for pin in pins if pin.address and address == monitor_of(pin.address))
    return next(own, None) or next(watched, None)


def only_pin(address: str, pins: list[Pin]) -> str | None:
    """The key of the one service that was pinned without an address."""
    free = [pin for pin in pins if not pin.address]
    if len(free) > 1:
        names = ", ".join(pin.name for pin in free)
        raise ConfigError(
            f"{address}: which of the services {names} is it? `starsd keys pin NAME KEY --address {address}`"
        )
    return free[0].public if free else None


def own_pair(folder: Path, public: str) -> KeyPair:
    """This machine's pair: a device's, or that of the very service which it also is."""
    if not os.path.exists(folder / DEVICE_KEY) and os.path.exists(folder / SERVICE_KEY):
        service = KeyPair.load(folder / SERVICE_KEY)
        if service.key.public == public:
            return service
    return KeyPair.load(folder / DEVICE_KEY)
