"""The whole engine against the reference's recordings: every round's tree, for both kinds of head."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from starsd_server.engine import Engine
from starsd_server.heads.checkpoint import load_head
from starsd_server.heads.convert import convert
from starsd_server.heads.grow import GrowthLimits
from starsd_server.heads.head import EagleHead
from starsd_server.rows import Precision, RowHead
from starsd_server.step import Advanced, Extend, Grow, SessionRows, TreeReady, WorkItem

GOLDEN = Path(__file__).parent / "golden" / "eagle"
CASES = {"eagle1-bias": "mha-8", "eagle3-small-vocab": "mha-8"}
SETTINGS = [(60, 10), (16, 10), (60, 4), (16, 4)]
STEPS = 5
PROMPTS = 3
ROUNDS = 4


@dataclass(frozen=True)
class Case:
    """An engine, and the head of whose projection an edge has a copy."""

    name: str
    engine: Engine
    edge: EagleHead


@pytest.fixture(scope="module", params=list(CASES))
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    name: str = request.param
    folder = tmp_path_factory.mktemp(name)
    convert(GOLDEN / "heads" / name, GOLDEN / "targets" / CASES[name], folder, dtype=torch.float32)
    head = RowHead(load_head(folder), Precision.FLOAT32)
    return Case(name, Engine(head, PROMPTS * len(SETTINGS), max_len=256), load_head(folder))


@torch.inference_mode()
def test_every_recorded_tree_is_grown_again(case: Case) -> None:
    """All prompts and settings side by side in the same steps; nodes exactly, scores within the noise."""
    engine = case.engine
    data = np.load(GOLDEN / "cases" / f"{case.name}.npz")
    runs = [(prompt, *setting) for prompt in range(PROMPTS) for setting in SETTINGS]
    sessions = [SessionRows(slot) for slot in range(len(runs))]
    for round_ in range(ROUNDS):
        items: list[WorkItem] = []
        for session, (prompt, nodes, top_k) in zip(sessions, runs, strict=True):
            at = f"p{prompt}/" if round_ == 0 else f"p{prompt}/t{nodes}k{top_k}/r{round_}/"
            taps = torch.from_numpy(data[at + ("features" if round_ == 0 else "ext_features")])
            features = case.edge.project(taps).numpy()
            start = 0 if round_ == 0 else int(data[at + "ext_start"])
            assert start == session.committed
            limits = GrowthLimits(nodes, top_k, STEPS)
            items.append(Extend(session, data[at + "ext_ids"].astype(np.int32), features, start, limits))
        trees: dict[int, TreeReady] = {}
        while items:
            outcomes = engine.step(items)
            following: list[WorkItem] = []
            for item, outcome in zip(items, outcomes, strict=True):
                if isinstance(outcome, TreeReady):
                    trees[item.session.slot] = outcome
                else:
                    assert isinstance(outcome, Advanced)
                    following.append(Grow(item.session))
            items = following
        for slot, (prompt, nodes, top_k) in enumerate(runs):
            at = f"p{prompt}/t{nodes}k{top_k}/r{round_}/"
            tokens, parents, scores = (data[at + key] for key in ("tokens", "parents", "scores"))
            order = np.argsort(-scores[1:], kind="stable") + 1
            place = np.zeros(nodes, int)
            place[order] = np.arange(1, nodes)
            np.testing.assert_array_equal(tokens[order], trees[slot].tokens)
            np.testing.assert_array_equal(place[parents[order]], trees[slot].parents)
            np.testing.assert_allclose(scores[order], np.log(trees[slot].probabilities), atol=2e-4)
