"""What a forward costs: a device's curve T(n), measured by its owner or taken from a profile.

Profiles are JSON files in `profiles/`, one a device and model, each value marked as measured or derived with
its source and the rule that derives it (docs/policy.md).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

import numpy as np

from starsd_edge.errors import UsageError
from starsd_edge.types import Float64Array

__all__ = ["CostCurve", "DeviceProfile", "load_profile", "profile_names"]


@dataclass(frozen=True, slots=True)
class CostCurve:
    """T(n): seconds of a target forward over n rows. Piecewise linear between the measured sizes, flat below
    the first, and going on with the last slope above the last.

    sizes    rising, the first is 1
    seconds  positive, never falling (a falling measurement is noise: `monotone` lifts it)
    """

    sizes: tuple[int, ...]
    seconds: tuple[float, ...]

    def __post_init__(self) -> None:
        rising = all(a < b for a, b in zip(self.sizes, self.sizes[1:], strict=False))
        if not self.sizes or self.sizes[0] != 1 or not rising or len(self.sizes) != len(self.seconds):
            raise ValueError(f"a cost curve needs rising sizes from 1 and as many seconds, not {self.sizes}")
        falling = any(a > b for a, b in zip(self.seconds, self.seconds[1:], strict=False))
        if self.seconds[0] <= 0 or falling or not np.isfinite(self.seconds).all():
            raise ValueError(f"a cost curve's seconds are positive and never fall, not {self.seconds}")

    @classmethod
    def monotone(cls, sizes: Sequence[int], seconds: Sequence[float]) -> CostCurve:
        """A curve from noisy measurements: a larger forward costs at least what a smaller one does."""
        lifted = np.maximum.accumulate(np.asarray(seconds, np.float64))
        return cls(tuple(int(n) for n in sizes), tuple(float(s) for s in lifted))

    def __call__(self, n: int) -> float:
        """Seconds of a forward over n >= 1 rows."""
        last = self.sizes[-1]
        if n <= last:
            return float(np.interp(n, self.sizes, self.seconds))
        if len(self.sizes) == 1:
            return self.seconds[0] * n
        slope = (self.seconds[-1] - self.seconds[-2]) / (last - self.sizes[-2])
        return self.seconds[-1] + slope * (n - last)

    def table(self, largest: int) -> Float64Array:
        """float64 [largest]: T(1), T(2), ..., T(largest)."""
        return np.array([self(n) for n in range(1, largest + 1)])

    @property
    def plain_s(self) -> float:
        """T(1)."""
        return self.seconds[0]


@dataclass(frozen=True, slots=True)
class DeviceProfile:
    """A device and model whose timing can be emulated.

    model, precision  what ran there
    source            where the measured values come from
    measured_sizes    sizes of the curve that somebody measured; the others are derived
    derivation        how the others follow
    curve             T(n)
    """

    name: str
    device: str
    model: str
    precision: str
    source: str
    measured_sizes: tuple[int, ...]
    derivation: str
    curve: CostCurve


def profile_names() -> list[str]:
    folder = resources.files("starsd_edge.decoding") / "profiles"
    return sorted(entry.name[: -len(".json")] for entry in folder.iterdir() if entry.name.endswith(".json"))


def load_profile(name: str) -> DeviceProfile:
    """The profile of that name. Raises UsageError that lists the names there are."""
    names = profile_names()
    if name not in names:
        raise UsageError(f"no device profile {name!r}: choose one of {', '.join(names)}")
    file = resources.files("starsd_edge.decoding") / "profiles" / f"{name}.json"
    return _profile(name, json.loads(file.read_text(encoding="utf-8")))


def _profile(name: str, data: dict[str, Any]) -> DeviceProfile:
    points = {int(n): float(ms) / 1e3 for n, ms in data["milliseconds"].items()}
    return DeviceProfile(
        name=name,
        device=data["device"],
        model=data["model"],
        precision=data["precision"],
        source=data["source"],
        measured_sizes=tuple(data["measured_sizes"]),
        derivation=data["derivation"],
        curve=CostCurve(tuple(points), tuple(points.values())),
    )
