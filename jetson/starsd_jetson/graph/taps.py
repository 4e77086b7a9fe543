"""What an EAGLE-3 head reads of its target: the inputs of a few layers, made into one row by the head's own
projection. It belongs to the target's graph, so that a third of the bytes cross the link.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from starsd_edge.errors import BundleError
from starsd_edge.protocol.greeting import projection_hash
from starsd_edge.types import Float32Array
from starsd_jetson.graph.checked_source import UNUSABLE
from starsd_jetson.graph.sources import WeightSource
from starsd_jetson.graph.tensor_files import open_safetensors

__all__ = ["Taps", "read_taps"]

EAGLE3 = "eagle3"  # of the head kinds in a head's config.json


@dataclass(frozen=True, slots=True)
class Taps:
    """The layers whose inputs are read, and float32 [F, len(layers) * H]: a row of features from them.

    head    the name of the head that they are for, for people
    sha256  the projection's, as the head's identity has it
    """

    head: str
    layers: tuple[int, ...]
    projection: Float32Array
    sha256: str


def read_taps(head: Path, source: WeightSource) -> Taps:
    """Those of a converted EAGLE-3 head (a folder that `starsd draft convert` wrote).

    Raises BundleError when it is none, of another target, or does not fit the model.
    """
    file = head / "config.json"
    try:
        name, kind, identity = _read(file)
        if kind != EAGLE3:  # which alone has a projection
            what = f"EAGLE-{kind.removeprefix('eagle')}"
            raise BundleError(f"{head}: an {what} head reads no layers of its own: leave out --eagle3")
        layers = tuple(int(layer) for layer in identity["feature_layers"])
        target, sha256 = str(identity["target_hash"]), str(identity["projection"])
    except (*UNUSABLE, OSError, RecursionError) as error:
        raise BundleError(
            f"{file}: not a draft head's configuration ({error}); make one with 'starsd draft convert'"
        ) from error
    if target != source.sha256():
        raise BundleError(
            f"{head}: made for {identity['target']}, whose weights are not those of {source.path}"
        )
    weights = open_safetensors(head / "head.safetensors")
    if "fc.weight" not in weights:
        raise BundleError(f"{head}: no fc.weight in its head.safetensors; convert it again")
    projection = weights["fc.weight"]()
    shape = source.shape
    if list(layers) != sorted(set(layers) & set(range(shape.num_layers))):
        raise BundleError(f"{file}: feature layers {list(layers)} of a model of {shape.num_layers}")
    if projection.ndim != 2 or projection.shape[1] != len(layers) * shape.hidden_size:
        raise BundleError(
            f"{head}: its projection is {list(projection.shape)}; it takes {len(layers)} layers of "
            f"{shape.hidden_size}"
        )
    if not np.isfinite(projection).all():
        raise BundleError(f"{head}: its projection, fc.weight, holds NaN or infinity; convert it again")
    if projection_hash(projection) != sha256:
        raise BundleError(
            f"{head}: its projection, fc.weight, is not the one that its config.json names; convert it again"
        )
    return Taps(name, layers, projection, sha256)


def _read(file: Path) -> tuple[str, str, dict[str, Any]]:
    """Name, kind and identity of a head."""
    if file.exists() and not file.is_file():  # a pipe would keep its reader waiting for ever
        raise ValueError("not a regular file")
    raw = json.loads(file.read_text("utf-8"))
    return str(raw["name"]), str(raw["head"]["kind"]), dict(raw["identity"])
