"""Which key a service must show: pinned by name, one file each, by the deployer or `starsd keys pin`.

A file holds the key's 40 characters; a second line may name the address it is for.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from starsd_edge.errors import ConfigError
from starsd_edge.link.keys import (
    MAX_KEY_FILE_BYTES,
    PUBLIC_MODE,
    KeyPair,
    check_name,
    key_dir,
    parse_public,
    write_atomic,
)
from starsd_edge.link.sockets import EdgeKeys, is_local

__all__ = ["Pin", "edge_keys", "pin_service", "pinned_services"]

SUFFIX = ".pub"


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
    (folder / "services").mkdir(parents=True, exist_ok=True, mode=0o755)
    write_atomic(folder / "services" / (pin.name + SUFFIX), text, PUBLIC_MODE)


def pinned_services(folder: Path) -> list[Pin]:
    """By name. Raises ConfigError, naming the file, when one is damaged."""
    return [read_pin(path) for path in sorted((folder / "services").glob("*" + SUFFIX))]


def read_pin(path: Path) -> Pin:
    try:
        lines = path.read_text("utf-8")[:MAX_KEY_FILE_BYTES].split()
        return Pin(path.name.removesuffix(SUFFIX), parse_public(lines[0]), lines[1] if len(lines) > 1 else "")
    except (OSError, UnicodeDecodeError, IndexError, ConfigError) as error:
        raise ConfigError(f"{path}: holds no public key ({error})") from None


def edge_keys(address: str, service_key: str | None = None, folder: Path | None = None) -> EdgeKeys | None:
    """The keys for a link to `address`, or None where it is of this machine and no key is meant for it.

    `service_key` wins over pins; a pin with this very address wins over the only pin there is.
    Raises ConfigError: no own key, or no telling which service this is.
    """
    folder = folder or key_dir()
    public = parse_public(service_key) if service_key else pinned_key(address, pinned_services(folder))
    if public is None:
        if is_local(address):
            return None
        raise ConfigError(
            f"{address}: the draft service's key is not known here; `starsd keys show` there prints it, "
            f"`starsd keys pin NAME KEY` here remembers it"
        )
    return EdgeKeys(KeyPair.load(folder / "device.key"), public)


def pinned_key(address: str, pins: list[Pin]) -> str | None:
    for pin in pins:
        if pin.address == address:
            return pin.public
    free = [pin for pin in pins if not pin.address]
    if is_local(address) or not free:
        return None
    if len(free) > 1:
        names = ", ".join(pin.name for pin in free)
        raise ConfigError(
            f"{address}: which of the services {names} is it? `starsd keys pin NAME KEY --address {address}`"
        )
    return free[0].public
