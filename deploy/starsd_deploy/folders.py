"""The folders of this machine that an inventory names, looked for before any device is."""

from __future__ import annotations

from pathlib import Path

from starsd_deploy.inventory import Device, line_of
from starsd_edge.errors import ConfigError

__all__ = ["NO_FOLDER", "require_folders", "where_set"]

NO_FOLDER = "no such folder; `starsd export` makes a bundle, `starsd draft train` a head"


def require_folders(inventory: Path, devices: tuple[Device, ...]) -> None:
    """Every bundle and head that the devices shall have is there.

    Raises:
        ConfigError: one is not; names the inventory's line and key.
    """
    for device in devices:
        for key, folder in (("bundle", device.bundle), ("head", device.head)):
            if folder and not Path(folder).is_dir():
                raise ConfigError(f"{where_set(inventory, device.name, key)}: {folder}: {NO_FOLDER}")


def where_set(inventory: Path, name: str, key: str) -> str:
    """Where the inventory sets a device's key: in its own table, else for all."""
    text = inventory.read_text(encoding="utf-8")
    for keys in (("devices", name, key), ("defaults", key)):
        if line := line_of(text, keys):
            return f"{inventory}, line {line}, {'.'.join(keys)}"
    return f"{inventory}, devices.{name}.{key}"
