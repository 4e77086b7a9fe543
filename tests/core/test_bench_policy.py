"""The virtual-time benchmark of the policy: small cells of it, and what is made of the figures."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path

import pytest

from starsd_edge.bench.policy import Cell, cells, mean_walk, measure, recorded
from starsd_edge.bench.policy_cli import as_json, by_profile, draw, judge
from starsd_edge.bench.policy_table import cells_of, table_of
from starsd_edge.bench.policy_verdict import Verdict
from starsd_edge.bench.trace import EASY, HARD, Trace, simulate
from starsd_edge.bench.virtual import Conditions
from starsd_edge.decoding.costs import load_profile


@pytest.fixture(scope="module")
def traces() -> list[Trace]:
    return [simulate(EASY, 160, seed=1)]


def test_a_trace_is_the_same_for_the_same_seed_and_its_trees_continue_it() -> None:
    first, again = simulate(HARD, 40, seed=3), simulate(HARD, 40, seed=3)
    for i, (tree, same) in enumerate(zip(first.trees, again.trees, strict=True)):
        assert tree.tokens.tolist() == same.tokens.tolist()
        assert tree.base_len == first.prompt_len + 1 + i
        assert tree.tokens[0] == first.tokens[tree.base_len - 1]


def test_easy_prompts_accept_more_than_hard_ones() -> None:
    assert mean_walk(simulate(EASY, 200, seed=0)) > mean_walk(simulate(HARD, 200, seed=0)) + 0.3


def test_the_recorded_traces_are_texts_of_a_model_and_trees_of_its_head() -> None:
    prompts = recorded()
    assert {"easy", "hard", "copy"} == prompts.keys()
    easy, hard = ([mean_walk(trace) for trace in prompts[name]] for name in ("easy", "hard"))
    assert min(easy) >= max(hard) > 0.5
    for trace in itertools.chain(*prompts.values()):
        assert len(trace.trees) == len(trace.answer)
        for tree in trace.trees:
            assert trace.tokens[tree.base_len - 1] == tree.tokens[0]
            assert tree.tokens.max() < trace.vocab_size


@pytest.mark.parametrize(
    ("profile", "conditions", "least"),
    [
        ("agx-orin-fp16", Conditions(2.0, 0.0, 0), 2.5),
        ("agx-orin-int4", Conditions(10.0, 2.0, 50), 1.2),
        ("orin-nano-int4", Conditions(200.0, 2.0, 100), 0.98),
        ("laptop-cpu", Conditions(50.0, 2.0, 150), 0.98),
        ("thor-int4", Conditions(2.0, 0.0, None), 0.999),
    ],
)
def test_the_policy_gains_where_there_is_room_and_loses_nothing_where_there_is_none(
    traces: list[Trace], profile: str, conditions: Conditions, least: float
) -> None:
    cell = measure(load_profile(profile), conditions, "easy", traces)
    assert cell.ratio_to_plain >= least
    assert cell.ratio_to_best_fixed >= 0.9


def test_the_matrix_has_every_condition_once() -> None:
    described = [(profile.name, conditions, prompts) for profile, conditions, prompts in cells()]
    assert len(described) == len(set(described)) == 6 * 5 * 2 * 5 * 2


def made_up(profile: str, adaptive: float, fixed: float) -> Cell:
    return Cell(
        profile,
        Conditions(2.0, 0.0, 0),
        "easy",
        adaptive,
        10.0,
        dict.fromkeys((2, 4, 8, 16, 32, 60), fixed),
        0.5,
        (0.02, 0.04),
    )


@pytest.mark.slow
def test_the_matrix_is_drawn(tmp_path: Path) -> None:
    """Slow the first time, when matplotlib looks for fonts."""
    draw([made_up("thor-int4", 20.0, 16.0)], tmp_path / "map.png")
    assert (tmp_path / "map.png").stat().st_size > 1000


def test_figures_are_summed_up() -> None:
    measured = [made_up("thor-int4", 20.0, 16.0), made_up("orin-nx-int4", 9.0, 5.0)]
    verdict = Verdict(measured)
    assert verdict.overall == pytest.approx((2.0 * 0.9) ** 0.5)
    assert verdict.by_round_trip("thor-int4") == {2.0: 2.0}
    text = "\n".join(verdict.lines())
    assert "below 0.98 of plain: 1" in text
    assert "above it: 1" in text
    assert "0.900 (orin-nx-int4, 2 ms, 0 % lost, load 0 %)" in text
    assert "calibration error by depth: 0.020, 0.040" in text
    assert by_profile(measured).row_count == 6
    row = json.loads(json.dumps(as_json(measured, "recorded")))["cells"][0]
    assert (2.0, 1.25) == (row["ratio_to_plain"], row["ratio_to_best_fixed"])


@pytest.mark.parametrize(
    ("adaptive", "fixed", "missed"),
    [
        (9.81, 5.0, []),
        (9.79, 5.0, ["slower than 0.98 of plain decoding in 1 cells"]),
        (19.0, 20.0, ["not above the fixed size 2 over all cells"]),
        (18.9, 20.0, ["below 0.95 of the best fixed", "not above the fixed size 2 over all cells"]),
    ],
)
def test_a_goal_that_is_missed_is_said(adaptive: float, fixed: float, missed: list[str]) -> None:
    """Plain decoding has a speed of 10 here."""
    found = Verdict([made_up("thor-int4", adaptive, fixed)]).missed()
    assert len(missed) == len(found)
    for wanted, line in zip(missed, found, strict=True):
        assert line.startswith(wanted)


def test_cells_survive_their_table() -> None:
    dead = replace(
        made_up("laptop-cpu", 10.0, 10.0), conditions=Conditions(0.0, 2.0, None), calibration_error=()
    )
    measured = [replace(made_up("thor-int4", 20.0, 16.0), calibration_error=(0.1, 0.2, 0.3, 0.4, 0.5)), dead]
    for cell, read in zip(measured, cells_of(table_of(measured)), strict=True):
        assert (cell.profile, cell.conditions, cell.prompts) == (read.profile, read.conditions, read.prompts)
        assert cell.calibration_error == read.calibration_error
        assert read.ratio_to_plain == pytest.approx(cell.ratio_to_plain, abs=1e-5)
        assert read.ratio_to_best_fixed == pytest.approx(cell.ratio_to_best_fixed, abs=1e-5)


def test_the_command_exits_with_one_where_a_goal_is_missed(capsys: pytest.CaptureFixture[str]) -> None:
    judge(Verdict([made_up("thor-int4", 20.0, 16.0)]))
    assert "missed" not in capsys.readouterr().err
    with pytest.raises(SystemExit) as left:
        judge(Verdict([made_up("thor-int4", 9.0, 5.0)]))
    assert left.value.code == 1
    assert "missed: slower than 0.98 of plain" in capsys.readouterr().err
