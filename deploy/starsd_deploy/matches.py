"""Whether the bundles and heads of an inventory were made for each other, before gigabytes are sent.

Of a service that somebody else runs, and of the head that ships with the package, the inventory says nothing:
the health gate on the device asks those.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from starsd_deploy.folders import where_set
from starsd_deploy.inventory import Device, Fleet, Role
from starsd_edge.bundle import MANIFEST_NAME, Bundle
from starsd_edge.errors import BundleError, ConfigError

__all__ = ["require_matches"]

HEAD_CONFIG = "config.json"


def require_matches(fleet: Fleet, devices: tuple[Device, ...]) -> None:
    """Every target and the head of each of its draft devices fit, as far as one of them is among `devices`.

    Raises:
        BundleError: a bundle or head is damaged.
        ConfigError: two do not fit; names the inventory's line, both folders and what differs.
    """
    targets = [device for device in fleet.devices if device.role is Role.TARGET]
    drafts = {device.name: device for device in fleet.devices if device.role is Role.DRAFT and device.head}
    for target in targets:
        for draft in (drafts[name] for name in target.service if name in drafts):
            if (target in devices or draft in devices) and (differs := _difference(target, draft)):
                raise ConfigError(
                    f"{where_set(Path(fleet.path), target.name, 'bundle')}: {target.bundle} and the head of "
                    f"{draft.name}, {draft.head}, were not made for each other: {differs}"
                )


def _difference(target: Device, draft: Device) -> str:
    """What keeps a bundle and a head from working together; "" where nothing does, or one is not here."""
    bundle, config = Path(target.bundle), Path(draft.head) / HEAD_CONFIG
    if not (bundle / MANIFEST_NAME).is_file() or not config.is_file():
        return ""
    wanted = _identity_of(config)
    has = Bundle.open(bundle).manifest.for_heads()
    for name in sorted(has.keys() | ({"projection"} & wanted.keys())):
        mine, theirs = _plain(has.get(name)), _plain(wanted.get(name))
        if mine != theirs:
            return f"{name} is {_short(mine)} of the bundle, {_short(theirs)} of the head"
    return ""


def _identity_of(config: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(config.read_text("utf-8"))["identity"])
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise BundleError(
            f"{config}: not a draft head's configuration ({type(error).__name__}: {error})"
        ) from error


def _plain(value: object) -> object:
    return list(value) if isinstance(value, tuple) else value


def _short(value: object) -> str:
    text = "none" if value is None else str(value)
    return text if len(text) <= 24 else f"{text[:12]}..."
