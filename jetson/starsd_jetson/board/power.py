"""What a board draws in all, and the joules that went by.

Which rails there are depends on the board. Some have one that measures the whole input; the AGX boards have
none, and there the sum of the supplies that hang on the input is the usual approximation. Rails in any
other combination add up to nothing we could name, so no total is made up.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["EnergyMeter", "TotalPower", "total_power"]

# Rails that measure a whole board: TX2, Xavier NX, Orin NX, Orin Nano; Nano; Thor.
WHOLE_BOARD = ("VDD_IN", "POM_5V_IN", "VIN")

# Supplies that together stand for a board without such a rail: AGX Orin; AGX Thor; AGX Xavier.
SUPPLIES = (
    ("VDD_GPU_SOC", "VDD_CPU_CV", "VIN_SYS_5V0"),
    ("VDD_GPU", "VDD_CPU_SOC_MSS", "VIN_SYS_5V0"),
    ("GPU", "CPU", "SOC", "CV", "VDDRQ", "SYS5V"),
)

# Between readings further apart than this nobody knows what was drawn, so nothing is counted.
MAX_GAP_S = 5.0


@dataclass(frozen=True, slots=True)
class TotalPower:
    """Watts of the whole board, and the rails they were read from (several: an approximation)."""

    watts: float
    rails: tuple[str, ...]


def total_power(rails_w: Mapping[str, float]) -> TotalPower | None:
    """Total of a board from its rails in watts; None where these rails have no known total."""
    for rail in WHOLE_BOARD:
        if rail in rails_w:
            return TotalPower(rails_w[rail], (rail,))
    for supplies in SUPPLIES:
        if all(rail in rails_w for rail in supplies):
            return TotalPower(sum(rails_w[rail] for rail in supplies), supplies)
    return None


class EnergyMeter:
    """Joules from power readings, by the trapezoid between neighbours."""

    def __init__(self) -> None:
        self.joules = 0.0
        self._last: tuple[float, float] | None = None  # (seconds, watts)

    def add(self, now_s: float, watts: float | None) -> None:
        """Take in a reading; None is a reading that failed, and ends the stretch before it."""
        if watts is None:
            self._last = None
            return
        if self._last is not None:
            last_s, last_watts = self._last
            if 0 < now_s - last_s <= MAX_GAP_S:
                self.joules += (now_s - last_s) * (last_watts + watts) / 2
        self._last = (now_s, watts)

    def at(self, now_s: float) -> float:
        """Joules up to `now_s`, taking the last power to have lasted until then (as far as a gap may be)."""
        if self._last is None:
            return self.joules
        last_s, last_watts = self._last
        return self.joules + last_watts * min(max(0.0, now_s - last_s), MAX_GAP_S)
