"""The draft service as a command line names it: address, keys, and what this device tells of itself."""

from __future__ import annotations

import importlib.metadata
import platform
from dataclasses import dataclass
from pathlib import Path

from starsd_edge.bundle import Manifest
from starsd_edge.decoding.costs import CostCurve
from starsd_edge.link.client import RemoteDrafter
from starsd_edge.link.pins import edge_keys, service_address
from starsd_edge.link.placement import Place
from starsd_edge.link.sockets import check_private
from starsd_edge.protocol.features import FeatureDtype
from starsd_edge.protocol.greeting import HelloBody, Identity

__all__ = ["DraftService", "find_draft_service", "identity_of", "software"]

MAX_NODES = 60  # no target verifies more in one pass (starsd_jetson.onnx_target)
# Most exact first: the service takes the first that it can read.
DTYPES = (FeatureDtype.FP16, FeatureDtype.BF16, FeatureDtype.INT8)
DISTRIBUTION = "starsd-edge"


@dataclass(frozen=True, slots=True)
class DraftService:
    """Where drafts come from: one service, or several of which a device uses one at a time."""

    places: tuple[Place, ...]

    @property
    def address(self) -> str:
        """As they are connected to, separated by commas."""
        return ",".join(place.address for place in self.places)

    def open_drafter(self, manifest: Manifest, curve: CostCurve, max_len: int) -> RemoteDrafter:
        """A drafter with a session of its own. Connects in the background; never fails."""
        first, *others = self.places
        identity = identity_of(manifest)
        hello = HelloBody(
            identity=identity,
            digest=identity.digest(),
            device=first.keys.own.key.name if first.keys else platform.node() or "edge",
            software=software(),
            dtypes=[dtype.wire_name for dtype in DTYPES],
            max_len=max_len,
            max_nodes=MAX_NODES,
            cost_sizes=list(curve.sizes),
            cost_seconds=list(curve.seconds),
        )
        return RemoteDrafter(first.address, hello, first.keys, others=others)


def find_draft_service(address: str | None, key_folder: Path | None) -> DraftService | None:
    """The service at `address` (or pinned under that name), or several, with commas; None for None.

    Raises UsageError for an address that is none, ConfigError where keys are needed and missing.
    """
    if address is None:
        return None
    places: list[Place] = []
    for each in address.split(","):
        where = service_address(each.strip(), key_folder)
        keys = edge_keys(where, folder=key_folder)
        check_private(where, has_key=keys is not None)
        places.append(Place(where, keys))
    return DraftService(tuple(places))


def software() -> str:
    """This program and its version, for people who watch the service."""
    try:
        return f"{DISTRIBUTION} {importlib.metadata.version(DISTRIBUTION)}"
    except importlib.metadata.PackageNotFoundError:  # run from its sources
        return DISTRIBUTION


def identity_of(manifest: Manifest) -> Identity:
    """What a bundle's target is to a draft head."""
    return Identity(target=manifest.identity.name, **manifest.for_heads())
