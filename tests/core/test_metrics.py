"""What a session measures: acceptance length, alpha per depth, times."""

from __future__ import annotations

import pytest

from starsd_edge.metrics import RoundKind, RoundStats, SessionStats


def verified(size: int, accepted: int, depth: int = 4) -> RoundStats:
    return RoundStats(RoundKind.VERIFY, size, accepted, accepted + 1, depth, 0.01, 0.05, 0.07, 0.02)


PLAIN = RoundStats(RoundKind.PLAIN, 1, 0, 1, 0, 0.0, 0.04, 0.04)
PREFILL = RoundStats(RoundKind.PREFILL, 10, 0, 1, 0, 0.0, 0.2, 0.2)


def test_acceptance_length_counts_the_bonus_and_leaves_prefill_out() -> None:
    stats = SessionStats()
    for round_ in (PREFILL, verified(8, 2), verified(8, 0), PLAIN):
        stats.add(round_)
    assert stats.mean_acceptance_length == (3 + 1 + 1) / 3
    assert stats.tokens == 6
    assert stats.tokens_per_s == pytest.approx(5 / 0.18)
    assert stats.plain_rounds == 1
    assert stats.drafted == 14


def test_alpha_counts_only_depths_that_were_tried() -> None:
    """The second round failed at depth 1: it says nothing of depth 2."""
    stats = SessionStats()
    stats.add(verified(8, 2, depth=3))
    stats.add(verified(8, 0, depth=3))
    assert [stats.alpha(depth) for depth in (1, 2, 3, 4)] == [0.5, 1.0, 0.0, 0.0]
    assert [stats.tried_at_depth[d] for d in range(4)] == [2, 1, 1, 0]


def test_an_empty_session_has_plain_figures() -> None:
    figures = SessionStats().as_dict()
    assert figures["acceptance_length"] == 1.0
    assert figures["tokens_per_s"] == 0.0
    assert figures["alpha"] == []


def test_times_are_kept_by_kind_of_round() -> None:
    stats = SessionStats()
    for round_ in (PREFILL, verified(8, 2), PLAIN):
        stats.add(round_)
    figures = stats.as_dict()
    assert figures["verify_ms"]["p50"] == pytest.approx(50, rel=0.05)
    assert figures["plain_ms"]["p50"] == pytest.approx(40, rel=0.05)
    assert figures["draft_ms"]["p95"] == pytest.approx(20, rel=0.05)
    assert figures["waited_s"] == pytest.approx(0.01)
    assert figures["prefill_s"] == pytest.approx(0.2)
