"""What the cells of `starsd bench policy` say together, and which of the policy's goals they miss."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from starsd_edge.bench.policy import FIXED_SIZES, Cell

__all__ = ["NEAR_THE_BEST", "NEVER_SLOWER", "Verdict"]

# In every cell: the policy's speed over plain decoding's, and over that of the cell's best fixed size.
NEVER_SLOWER = 0.98
NEAR_THE_BEST = 0.95


@dataclass(frozen=True)
class Verdict:
    """Of at least one cell."""

    cells: Sequence[Cell]

    @property
    def slowest(self) -> Cell:
        return min(self.cells, key=lambda cell: cell.ratio_to_plain)

    @property
    def farthest(self) -> Cell:
        """From its best fixed size."""
        return min(self.cells, key=lambda cell: cell.ratio_to_best_fixed)

    @property
    def num_slower(self) -> int:
        return sum(cell.ratio_to_plain < NEVER_SLOWER for cell in self.cells)

    @property
    def num_far(self) -> int:
        return sum(cell.ratio_to_best_fixed < NEAR_THE_BEST for cell in self.cells)

    @property
    def num_ahead(self) -> int:
        """Cells in which it is faster than every fixed size."""
        return sum(cell.ratio_to_best_fixed > 1.0 for cell in self.cells)

    @property
    def overall(self) -> float:
        """Geometric mean over the cells of the speed over plain decoding's."""
        return _geometric_mean([cell.ratio_to_plain for cell in self.cells])

    @property
    def overall_fixed(self) -> dict[int, float]:
        """The same by fixed size."""
        return {
            size: _geometric_mean([cell.fixed[size] / cell.plain for cell in self.cells])
            for size in FIXED_SIZES
        }

    @property
    def best_fixed_size(self) -> int:
        """The one that is fastest overall."""
        overall = self.overall_fixed
        return max(overall, key=lambda size: overall[size])

    @property
    def calibration_error(self) -> list[float]:
        """By depth, the mean over the cells that have any."""
        errors = [cell.calibration_error for cell in self.cells if cell.calibration_error]
        return [sum(depth) / len(errors) for depth in zip(*errors, strict=True)]

    def by_round_trip(self, profile: str) -> dict[float, float]:
        """Mean speed over plain decoding's by round trip in ms, of the cells whose service is alive."""
        ratios: dict[float, list[float]] = {}
        for cell in self.cells:
            if cell.profile == profile and cell.conditions.load_pct is not None:
                ratios.setdefault(cell.conditions.rtt_ms, []).append(cell.ratio_to_plain)
        return {rtt_ms: sum(each) / len(each) for rtt_ms, each in ratios.items()}

    def lines(self) -> list[str]:
        """For a reader."""
        slowest, farthest, best = self.slowest, self.farthest, self.best_fixed_size
        return [
            f"{len(self.cells)} cells; below {NEVER_SLOWER} of plain: {self.num_slower}; "
            f"below {NEAR_THE_BEST} of the cell's best fixed size (plain included): {self.num_far}; "
            f"above it: {self.num_ahead}",
            f"slowest over plain: {slowest.ratio_to_plain:.3f} ({slowest.profile}, {slowest.conditions})",
            f"farthest from the best fixed: {farthest.ratio_to_best_fixed:.3f} "
            f"({farthest.profile}, {farthest.conditions})",
            f"geometric mean over plain: adaptive {self.overall:.3f}, best single fixed size {best}: "
            f"{self.overall_fixed[best]:.3f}",
            "calibration error by depth: " + ", ".join(f"{error:.3f}" for error in self.calibration_error),
        ]

    def missed(self) -> list[str]:
        """The goals that are missed, a line each."""
        missed = []
        if self.num_slower:
            missed.append(f"slower than {NEVER_SLOWER} of plain decoding in {self.num_slower} cells")
        if self.num_far:
            missed.append(f"below {NEAR_THE_BEST} of the best fixed size in {self.num_far} cells")
        size = self.best_fixed_size
        if self.overall <= self.overall_fixed[size]:
            missed.append(f"not above the fixed size {size} over all cells")
        return missed


def _geometric_mean(ratios: list[float]) -> float:
    return math.exp(sum(map(math.log, ratios)) / len(ratios))
