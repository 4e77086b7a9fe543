"""Both head kinds against recordings of the reference implementation, position by position (golden/eagle)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.lib.npyio import NpzFile
from torch import Tensor

from starsd_server.heads.checkpoint import load_head
from starsd_server.heads.convert import convert
from starsd_server.heads.head import EagleHead, attention

GOLDEN = Path(__file__).parent / "golden" / "eagle"
CASES = ["eagle1-bias", "eagle3-small-vocab"]
PROMPTS = ["p0", "p1", "p2"]
# The recordings' own advice; float32 sums in another order differ by a few 1e-6 here.
TOLERANCE = 1e-4


@pytest.fixture(scope="module", params=CASES)
def golden(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[EagleHead, NpzFile]:
    out = tmp_path_factory.mktemp(request.param)
    convert(GOLDEN / "heads" / request.param, GOLDEN / "targets" / "mha-8", out, torch.float32)
    return load_head(out), np.load(GOLDEN / "cases" / f"{request.param}.npz")


class Rows:
    """A context's keys and values; `visible` says what the next rows may see of those kept so far."""

    def __init__(self) -> None:
        self.keys = self.values = torch.zeros(0)
        self.visible: Tensor | None = None

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.keys = torch.cat([self.keys, k]) if len(self.keys) else k
        self.values = torch.cat([self.values, v]) if len(self.values) else v
        old = len(self.keys) - len(k)
        mask = self.visible
        if mask is None:  # plain causal extension
            mask = torch.ones(len(k), len(self.keys), dtype=torch.bool).tril(old)
        return attention(q, self.keys, self.values, mask)

    def cut(self, length: int) -> None:
        self.keys, self.values = self.keys[:length], self.values[:length]


def extend(head: EagleHead, rows: Rows, ids: np.ndarray, features: np.ndarray, start: int) -> Tensor:
    rows.visible = None
    positions = torch.arange(start, start + len(ids))
    return head.forward(
        torch.from_numpy(ids), head.project(torch.from_numpy(features)), positions, rows.attend
    )


def trees(case: NpzFile, prompt: str) -> list[str]:
    """The recorded tree shapes of a prompt, "tNkK"."""
    return sorted({key.split("/")[1] for key in case.files if key.startswith(f"{prompt}/") and "/r0/" in key})


@pytest.mark.parametrize("prompt", PROMPTS)
@torch.inference_mode()
def test_the_extension_over_a_prompt_is_the_references(
    golden: tuple[EagleHead, NpzFile], prompt: str
) -> None:
    head, case = golden
    hidden = extend(head, Rows(), case[f"{prompt}/ext_ids"], case[f"{prompt}/features"], 0)
    np.testing.assert_allclose(case[f"{prompt}/ext_hidden"], hidden, atol=TOLERANCE)
    np.testing.assert_allclose(case[f"{prompt}/ext_logits"], head.logits(hidden), atol=TOLERANCE)


@pytest.mark.parametrize("prompt", PROMPTS)
@torch.inference_mode()
def test_later_rounds_extend_what_earlier_ones_left(golden: tuple[EagleHead, NpzFile], prompt: str) -> None:
    """Rows of a tree are dropped, committed ones stay: positions go on where the round before ended."""
    head, case = golden
    for tree in trees(case, prompt):
        rows = Rows()
        extend(head, rows, case[f"{prompt}/ext_ids"], case[f"{prompt}/features"], 0)
        for number in (1, 2, 3):
            key = f"{prompt}/{tree}/r{number}"
            start = int(case[f"{key}/ext_start"])
            assert start == len(rows.keys)
            hidden = extend(head, rows, case[f"{key}/ext_ids"], case[f"{key}/ext_features"], start)
            np.testing.assert_allclose(case[f"{key}/ext_hidden"], hidden, atol=TOLERANCE)


@pytest.mark.parametrize("prompt", PROMPTS)
@torch.inference_mode()
def test_every_beam_of_a_growing_tree_is_the_references(
    golden: tuple[EagleHead, NpzFile], prompt: str
) -> None:
    """The head is fed its own output; a beam sees the committed rows, its ancestors and itself."""
    head, case = golden
    for tree in trees(case, prompt):
        key = f"{prompt}/{tree}/r0"
        rows = Rows()
        hidden = extend(head, rows, case[f"{prompt}/ext_ids"], case[f"{prompt}/features"], 0)
        base = len(rows.keys)
        beams, k = case[f"{key}/beam_ids"].shape
        inputs, seen = hidden[-1:].expand(k, -1), torch.zeros(k, 0, dtype=torch.bool)
        for step in range(beams):
            if step:
                place = case[f"{key}/beam_pool_index"][step] - k - (step - 1) * k * k
                parent = torch.from_numpy(place // k)
                inputs, seen = hidden[parent], seen[parent]
            seen = torch.cat([seen, torch.eye(k, dtype=torch.bool)], dim=1)
            rows.visible = torch.cat([torch.ones(k, base, dtype=torch.bool), seen], dim=1)
            positions = torch.from_numpy(case[f"{key}/beam_positions"][step])
            assert set(positions.tolist()) == {base + step}
            hidden = head.forward(
                torch.from_numpy(case[f"{key}/beam_ids"][step]), inputs, positions, rows.attend
            )
            np.testing.assert_allclose(case[f"{key}/step_hidden"][step], hidden, atol=TOLERANCE)
