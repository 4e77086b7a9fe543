"""The devices of a fleet as a user names them: a profile or a measurement, how many, and how they differ."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from starsd_edge.decoding.costs import CostCurve, load_profile
from starsd_edge.errors import UsageError

__all__ = ["DeviceGroup", "parse_groups"]

WANTED = "PROFILE=COUNT is wanted, with ,rtt_ms=N and ,tokens=N where they differ from the fleet's"


@dataclass(frozen=True, slots=True)
class DeviceGroup:
    """`count` devices of a kind, on links alike.

    curve   T(n)
    model   whose T(n) it is, and its precision
    rtt_ms  of their links; None: the fleet's
    tokens  that a round brings them; None: as the fleet's
    """

    name: str
    count: float
    curve: CostCurve
    model: str = ""
    rtt_ms: float | None = None
    tokens: float | None = None

    @property
    def label(self) -> str:
        differs = [f"{self.rtt_ms:g} ms"] if self.rtt_ms is not None else []
        differs += [f"{self.tokens:g} tokens"] if self.tokens is not None else []
        return ", ".join([self.name, *differs])


def parse_groups(texts: Sequence[str]) -> tuple[DeviceGroup, ...]:
    """From "agx-orin-int4=8", "orin-nano-int4=4,rtt_ms=40,tokens=2.2", "board.json=2", the last being what
    `starsd bench target --json` wrote. Raises UsageError for anything else."""
    return tuple(_parse(text) for text in texts)


def _parse(text: str) -> DeviceGroup:
    first, *rest = text.split(",")
    name, _, count = first.rpartition("=")
    try:
        differs = {key: float(value) for key, value in (part.split("=") for part in rest)}
        curve, model = _timing(name)
        group = DeviceGroup(Path(name).stem, float(count), curve, model, **differs)
    except (ValueError, TypeError):
        raise UsageError(f"--device {text}: {WANTED}") from None
    if not all(math.isfinite(value) for value in (group.count, *differs.values())):
        raise UsageError(f"--device {text}: {WANTED}")
    if differs.get("rtt_ms", 0.0) < 0 or differs.get("tokens", 1.0) < 1:
        raise UsageError(
            f"--device {text}: a round trip is not negative, and a round brings a token at least"
        )
    return group


def _timing(name: str) -> tuple[CostCurve, str]:
    """Of a profile that ships, or of a file: T(n) of the fastest number of threads there; the model."""
    if not name.endswith(".json"):
        profile = load_profile(name)
        return profile.curve, f"{profile.model} {profile.precision}"
    try:
        rows = json.loads(Path(name).read_text(encoding="utf-8"))["rows"]
        fastest = min(rows, key=lambda row: float(row["costs_s"]["1"]))
        points = sorted((int(size), float(seconds)) for size, seconds in fastest["costs_s"].items())
        curve = CostCurve(tuple(size for size, _ in points), tuple(seconds for _, seconds in points))
        return curve, f"{fastest.get('bundle', 'a model')} {fastest.get('quantisation', 'of your own')}"
    except OSError as error:
        raise UsageError(f"{name} cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(f"{name}: not what `starsd bench target --json` writes ({error!r})") from None
