"""The exporter's own forward, and the rescaling that it steers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from starsd_edge.types import Float32Array
from starsd_jetson.graph.layer import LayerActivations, protect, read_layer, smooth
from starsd_jetson.graph.reference import ReferenceRun
from starsd_jetson.graph.sources import open_source
from starsd_jetson.trial import reference_run


def run(source: Any, tokens: np.ndarray, change: Callable[[Any, LayerActivations], Any]) -> Float32Array:
    """Logits of every token, a second text beside; `change` may rewrite each layer before it runs."""
    text, nothing = tokens.astype(np.int32), np.zeros(0, np.int32)
    reference = ReferenceRun(source.shape, np.array([5, 6, 7], np.int32), text)
    probe = ReferenceRun(source.shape, text, nothing)
    table = source.tensor("model.embed_tokens.weight")
    reference.start(table)
    probe.start(table)
    for index in range(source.shape.num_layers):
        weights = read_layer(source, index)
        reference.layer(change(weights, probe.layer(weights)))
    head = table if source.shape.tied_embedding else source.tensor("lm_head.weight")
    return reference.finish(source.tensor("model.norm.weight"), head)


@pytest.mark.parametrize("family", ["llama grouped", "llama ungrouped, tied", "llama 3.1", "qwen2", "qwen3"])
def test_the_reference_is_the_source(
    family: str, tiny: Callable[[str], Any], rng: np.random.Generator
) -> None:
    """Plain and rescaled: rescaling moves factors between weights and changes nothing else."""
    model = tiny(family)
    tokens = rng.integers(3, 150, 30)
    with torch.no_grad():
        expected = model.reference(torch.tensor([tokens.tolist()])).logits[0].numpy()
    source = open_source(model.folder)
    np.testing.assert_allclose(run(source, tokens, lambda weights, peaks: weights), expected, atol=2e-4)
    for change in (smooth, protect):
        found = run(source, tokens, lambda weights, seen, change=change: change(weights, seen).weights)
        np.testing.assert_allclose(found, expected, atol=5e-4)


def test_quality_is_judged_on_as_many_tokens_as_the_trial_has_room_for(
    tiny: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A large cache is memory beside the weights of the trial; what sets the ranges is not shortened."""
    source = open_source(tiny("llama grouped").folder)
    tokenizer = (source.path / "tokenizer.json").read_text("utf-8")
    whole = reference_run(source.shape, tokenizer)
    monkeypatch.setattr("starsd_jetson.trial.JUDGED_KV_BYTES", 10 * 3 * 2 * 33 * 4)  # of ten tokens
    short = reference_run(source.shape, tokenizer)
    assert whole is not None
    assert short is not None
    assert len(whole.judged) == 256  # half of the context
    np.testing.assert_array_equal(short.judged, whole.judged[:10])
    assert short.num_calibration == whole.num_calibration
