"""The paper's claims as experiments, on a small recording."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from starsd_server.capacity.model import DraftWork
from starsd_server.capacity.paper import Paper, packing, reproduce
from starsd_server.capacity.paper_cli import draw, lines_of
from starsd_server.emulate.bench import BenchPlan

from .test_capacity import ORIN, RTX, recording

__all__ = ["recording"]


@pytest.fixture(scope="module")
def paper(recording: tuple[BenchPlan, DraftWork]) -> Paper:
    plan, work = recording
    plan = dataclasses.replace(plan, warm_up_s=0.5, seconds=1.5)
    return reproduce(plan, ORIN, RTX, work, [1, 4, 24], 0.0, lambda _line: None)


def test_the_claims_hold_and_the_formula_describes_the_serial_service(paper: Paper) -> None:
    assert [] == [claim for claim in paper.claims if not claim.holds]
    for point in paper.points:
        assert point.model_tokens_per_s == pytest.approx(point.row.system_tokens_per_s, rel=0.1)
        if point.row.scheduler == "serial":
            assert point.paper_tokens_per_s == pytest.approx(point.row.system_tokens_per_s, rel=0.1)


def test_batching_goes_on_where_the_serial_service_is_full(paper: Paper) -> None:
    crowded = {p.row.scheduler: p.row.system_tokens_per_s for p in paper.points if p.row.targets == 24}
    assert paper.full < 16
    assert crowded["batched"] > 1.5 * crowded["serial"]


def test_figures_are_told_and_drawn(paper: Paper, tmp_path: Path) -> None:
    lines = lines_of(paper)
    assert len(lines) == 1 + 6 + len(paper.claims)
    assert paper.as_dict()["n_full"] == paper.full
    draw(paper, "toy", tmp_path / "paper.png")
    assert (tmp_path / "paper.png").stat().st_size > 1000


def test_a_head_of_its_own_takes_room_from_a_target() -> None:
    packed = packing()
    assert packed.with_shared_head >= packed.with_own_head
    assert packed.context_with_shared_head - packed.context_with_own_head > 1000
