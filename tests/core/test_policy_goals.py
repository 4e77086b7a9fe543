"""The policy's goals, on conditions that stand for the whole matrix and in the matrix of docs/policy.md.

`starsd bench policy` runs all of it. Here are all profiles and extremes: where the policy comes closest to a
goal, and where one that waits too long, or asks for or verifies too much, would miss it.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from starsd_edge.bench.policy import RTTS_MS, Cell, cells, measure, recorded, simulated
from starsd_edge.bench.policy_table import cells_of
from starsd_edge.bench.policy_verdict import Verdict
from starsd_edge.bench.virtual import Conditions
from starsd_edge.decoding.costs import load_profile, profile_names

DOCS = Path(__file__).parents[2] / "docs"
TABLES = {"recorded": "policy-matrix.csv", "simulated": "policy-matrix-simulated.csv"}
TRACES = {"recorded": recorded, "simulated": simulated}
SOURCES = tuple(TRACES)
# profile, then round trip in ms, loss in per cent, load in per cent; easy or hard
REPRESENTATIVE = {
    "recorded": [
        ("agx-orin-fp16", Conditions(0.0, 0.0, 50), "hard"),
        ("laptop-cpu", Conditions(0.0, 0.0, 0), "easy"),
        ("laptop-cpu", Conditions(10.0, 0.0, 0), "hard"),
        ("orin-nx-int4", Conditions(0.0, 0.0, 0), "hard"),
        ("thor-int4", Conditions(2.0, 0.0, 0), "hard"),
        ("agx-orin-int4", Conditions(10.0, 2.0, 100), "easy"),
        ("orin-nano-int4", Conditions(200.0, 2.0, 150), "hard"),
        *((profile, Conditions(2.0, 0.0, None), "hard") for profile in profile_names()),
    ],
    "simulated": [
        ("agx-orin-fp16", Conditions(0.0, 2.0, 50), "easy"),
        ("agx-orin-int4", Conditions(0.0, 0.0, 0), "easy"),
        ("thor-int4", Conditions(0.0, 0.0, 0), "easy"),
        ("thor-int4", Conditions(200.0, 0.0, 0), "hard"),
        ("orin-nx-int4", Conditions(50.0, 0.0, 100), "hard"),
        ("laptop-cpu", Conditions(0.0, 0.0, 0), "easy"),
        ("laptop-cpu", Conditions(2.0, 0.0, 50), "hard"),
        ("laptop-cpu", Conditions(10.0, 2.0, 150), "easy"),
        ("orin-nano-int4", Conditions(200.0, 2.0, 150), "hard"),
        ("laptop-cpu", Conditions(0.0, 0.0, None), "hard"),
    ],
}
# A cell is farther than this from its line in the table only where the code has changed since.
AS_PUBLISHED = 0.02


def published(source: str) -> list[Cell]:
    return cells_of((DOCS / TABLES[source]).read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def measured() -> dict[str, list[Cell]]:
    """In virtual time: seconds of computing."""
    found: dict[str, list[Cell]] = {}
    for source, conditions in REPRESENTATIVE.items():
        traces = TRACES[source]()
        found[source] = [
            measure(load_profile(name), c, prompts, traces[prompts]) for name, c, prompts in conditions
        ]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("source", SOURCES)
def test_the_policy_reaches_its_goals(measured: dict[str, list[Cell]], source: str) -> None:
    assert [] == Verdict(measured[source]).missed()


@pytest.mark.slow
@pytest.mark.parametrize("source", SOURCES)
def test_the_published_matrix_is_what_the_code_does(measured: dict[str, list[Cell]], source: str) -> None:
    table = {(cell.profile, cell.conditions, cell.prompts): cell for cell in published(source)}
    for cell in measured[source]:
        line = table[cell.profile, cell.conditions, cell.prompts]
        told = f"publish the matrix anew (docs/policy.md): {source}, {cell}"
        assert line.ratio_to_plain == pytest.approx(cell.ratio_to_plain, rel=AS_PUBLISHED), told
        assert line.ratio_to_best_fixed == pytest.approx(cell.ratio_to_best_fixed, rel=AS_PUBLISHED), told


@pytest.mark.parametrize("source", SOURCES)
def test_the_published_matrix_is_whole_and_reaches_the_goals(source: str) -> None:
    matrix = published(source)
    assert [(profile.name, conditions, prompts) for profile, conditions, prompts in cells()] == [
        (cell.profile, cell.conditions, cell.prompts) for cell in matrix
    ]
    assert [] == Verdict(matrix).missed()


def test_the_page_sums_the_published_matrix_up() -> None:
    page = (DOCS / "policy.md").read_text(encoding="utf-8")
    for row in (*summary_rows(*(Verdict(published(source)) for source in SOURCES)), *speed_rows()):
        assert row in page


def summary_rows(*verdicts: Verdict) -> list[str]:
    """Of the page's first table: a column a verdict."""

    def row(name: str, *values: str) -> str:
        return f"| {name} | {' | '.join(values)} |"

    def best_fixed(verdict: Verdict) -> str:
        size = verdict.best_fixed_size
        return f"{verdict.overall_fixed[size]:.3f} ({size})"

    return [
        row(
            "below 0.98 of plain decoding",
            *(f"{v.num_slower} (lowest {v.slowest.ratio_to_plain:.3f})" for v in verdicts),
        ),
        row(
            "below 0.95 of the cell's best fixed size, plain included",
            *(f"{v.num_far} (lowest {v.farthest.ratio_to_best_fixed:.3f})" for v in verdicts),
        ),
        row("above the cell's best fixed size", *(str(v.num_ahead) for v in verdicts)),
        row("geometric mean over plain: adaptive", *(f"{v.overall:.3f}" for v in verdicts)),
        row("geometric mean over plain: best single fixed size", *map(best_fixed, verdicts)),
        row(
            "calibration error at depth 1, 2, 3, 4, 5 and more",
            *(", ".join(f"{error:.2f}" for error in v.calibration_error) for v in verdicts),
        ),
    ]


def speed_rows() -> list[str]:
    """Of the table by round trip."""
    verdict = Verdict(published("recorded"))
    return [
        f"| {profile} | {' | '.join(f'{verdict.by_round_trip(profile)[rtt]:.2f}' for rtt in RTTS_MS)} |"
        for profile in profile_names()
    ]
