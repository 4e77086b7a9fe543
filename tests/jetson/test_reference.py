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


def run(source: Any, tokens: np.ndarray, change: Callable[[Any, LayerActivations], Any]) -> Float32Array:
    """Logits of every token; `change` may rewrite each layer's weights before it runs."""
    reference = ReferenceRun(source.shape, tokens.astype(np.int32), 0)
    probe = ReferenceRun(source.shape, tokens.astype(np.int32), len(tokens))
    table = source.tensor("model.embed_tokens.weight")
    reference.start(table)
    probe.start(table)
    for index in range(source.shape.num_layers):
        weights = read_layer(source, index)
        reference.num_calibration = len(tokens)
        reference.layer(change(weights, probe.layer(weights)))
    reference.num_calibration = 0
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
