"""Recording traces, and reading them back."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from starsd_edge.bench.recorder import load, record, save
from starsd_edge.bench.trace import HARD, simulate
from starsd_edge.decoding.sampling import SamplingParams
from starsd_edge.errors import UnreachableError
from starsd_edge.testing import Behaviour, FakeClock, ScriptedDrafter, ToyTarget, plain_text

PROMPT = [3, 1, 4]
GREEDY = SamplingParams()


def drafter_for(target: ToyTarget, behaviour: Behaviour) -> ScriptedDrafter:
    return ScriptedDrafter(
        lambda context, count: plain_text(target, GREEDY, context, count), FakeClock(), [behaviour]
    )


def test_a_recorded_trace_survives_its_file(tmp_path: Path) -> None:
    target = ToyTarget()
    trace = record("toy", target, drafter_for(target, Behaviour.BRANCHING), PROMPT, 12, frozenset())
    save([trace, trace], tmp_path / "traces.npz")
    loaded = load(tmp_path / "traces.npz")
    assert ["toy", "toy"] == [each.name for each in loaded]
    for each in loaded:
        assert trace.tokens.tolist() == each.tokens.tolist()
        assert trace.prompt_len == each.prompt_len
        for tree, again in zip(trace.trees, each.trees, strict=True):
            assert (tree.tokens.tolist(), tree.parents.tolist()) == (
                again.tokens.tolist(),
                again.parents.tolist(),
            )
            assert tree.base_len == again.base_len


def test_what_was_drafted_ahead_is_in_the_file_where_it_was_recorded(tmp_path: Path) -> None:
    """Of trees with more nodes than a signed byte counts."""
    trace = simulate(HARD, 24, 5, ahead=True)
    assert max(int(tree.parents.max()) for tree in trace.ahead) > 127
    save([replace(trace, ahead=[]), trace], tmp_path / "traces.npz")
    without, loaded = load(tmp_path / "traces.npz")
    assert list(without.ahead) == []
    for tree, again in zip(trace.ahead, loaded.ahead, strict=True):
        assert tree.tokens.tolist() == again.tokens.tolist()
        assert tree.parents.tolist() == again.parents.tolist()
        assert tree.base_len == again.base_len
    assert loaded.vocab_size == max(int(tree.tokens.max()) for tree in loaded.ahead) + 1


def test_a_trace_holds_the_plain_text_and_a_tree_at_every_token() -> None:
    """Tokens are numbered anew, so compare where they are equal."""
    target = ToyTarget()
    trace = record("toy", target, drafter_for(target, Behaviour.PERFECT), PROMPT, 12, frozenset())
    text = plain_text(ToyTarget(), GREEDY, PROMPT, 12)
    text = [*PROMPT, *text]
    assert [a == b for a in text for b in text] == [a == b for a in trace.tokens for b in trace.tokens]
    assert len(PROMPT) == trace.prompt_len
    assert len(trace.trees) == len(trace.answer) == 12
    for i, tree in enumerate(trace.trees[:-4]):
        assert trace.answer[i : i + 5].tolist() == tree.tokens.tolist()
    assert trace.vocab_size == max(int(tree.tokens.max()) for tree in trace.trees) + 1


def test_a_recording_with_a_hole_is_refused() -> None:
    target = ToyTarget()
    with pytest.raises(UnreachableError, match="token 0 of 'toy'"):
        record("toy", target, drafter_for(target, Behaviour.FOREIGN_ROOT), PROMPT, 5, frozenset())
