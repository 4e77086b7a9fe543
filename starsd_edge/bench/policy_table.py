"""The cells of `starsd bench policy` as a CSV: one line each, for readers and programs.

Speeds are over the device's plain speed, which its profile has; five digits after the point.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable

from starsd_edge.bench.policy import FIXED_SIZES, Cell
from starsd_edge.bench.virtual import Conditions
from starsd_edge.decoding.acceptance import MAX_DEPTH
from starsd_edge.decoding.costs import load_profile

__all__ = ["cells_of", "table_of"]

DEAD = "dead"
FIXED = [f"fixed_{size}" for size in FIXED_SIZES]
ERRORS = [f"calibration_error_{depth}" for depth in range(1, MAX_DEPTH + 1)]
COLUMNS = ["profile", "rtt_ms", "loss_pct", "load_pct", "prompts", "adaptive", "plain_share", *FIXED, *ERRORS]


def table_of(cells: Iterable[Cell]) -> str:
    """The CSV."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(COLUMNS)
    writer.writerows(map(_row, cells))
    return out.getvalue()


def cells_of(table: str) -> list[Cell]:
    """What `table_of` was given, to its digits."""
    return [_cell(row) for row in csv.DictReader(io.StringIO(table))]


def _row(cell: Cell) -> list[str]:
    conditions = cell.conditions
    speeds = [cell.ratio_to_plain, cell.plain_share, *(cell.fixed[n] / cell.plain for n in FIXED_SIZES)]
    return [
        cell.profile,
        f"{conditions.rtt_ms:g}",
        f"{conditions.loss_pct:g}",
        DEAD if conditions.load_pct is None else str(conditions.load_pct),
        cell.prompts,
        *(f"{value:.5f}" for value in speeds),
        *([f"{error:.3f}" for error in cell.calibration_error] or [""] * len(ERRORS)),
    ]


def _cell(row: dict[str, str]) -> Cell:
    plain = 1.0 / load_profile(row["profile"]).curve.plain_s
    load_pct = None if row["load_pct"] == DEAD else int(row["load_pct"])
    errors = tuple(float(row[column]) for column in ERRORS if row[column])
    return Cell(
        profile=row["profile"],
        conditions=Conditions(float(row["rtt_ms"]), float(row["loss_pct"]), load_pct),
        prompts=row["prompts"],
        adaptive=plain * float(row["adaptive"]),
        plain=plain,
        fixed={size: plain * float(row[column]) for size, column in zip(FIXED_SIZES, FIXED, strict=True)},
        plain_share=float(row["plain_share"]),
        calibration_error=errors,
    )
