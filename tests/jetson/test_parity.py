"""Our graphs give the logits that transformers gives: every family, prompts, single tokens and trees."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from starsd_edge.decoding.tree import DraftTree

FAMILIES = [
    "llama grouped",
    "llama ungrouped, tied",
    "llama 1",
    "llama 2",
    "llama 3",
    "llama 3.1",
    "llama 3.2",
    "vicuna 16k",
    "tinyllama",
    "smollm2",
    "mistral",
    "qwen2",
    "qwen2.5",
    "qwen3",
    "qwen3, tied",
]
TOLERANCE = 2e-4  # logits; both sum in float32, in different orders


def reference(model: Any, tokens: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Logits [L, V] and the final norm's output [L, H]."""
    with torch.no_grad():
        out = model(torch.tensor([tokens]), output_hidden_states=True)
    return out.logits[0].numpy(), out.hidden_states[-1][0].numpy()


def random_tree(rng: np.random.Generator, size: int, base_len: int) -> DraftTree:
    parents = [-1, *(int(rng.integers(max(0, node - 3), node)) for node in range(1, size))]
    tokens = rng.permutation(150)[:size].astype(np.int32)
    return DraftTree(tokens, np.array(parents, np.int32), base_len)


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_features_equal_transformers(
    family: str, tiny: Callable[[str], Any], rng: np.random.Generator, tmp_path: Path
) -> None:
    """A prompt in two parts, then a tree whose every path is checked, then the kept path goes on."""
    model = tiny(family)
    target = model.export(tmp_path / "bundle", quant="fp32")
    prompt = rng.integers(3, 150, 40).astype(np.int32)

    first = target.prefill(prompt[:25])
    second = target.prefill(prompt[25:])
    logits, features = reference(model.reference, prompt.tolist())
    np.testing.assert_allclose(second.logits[0], logits[-1], atol=TOLERANCE)
    np.testing.assert_allclose(np.concatenate([first.features, second.features]), features, atol=TOLERANCE)

    tree = random_tree(rng, 9, len(prompt) + 1)
    out = target.forward(tree)
    for node in range(len(tree)):
        path = tree.path(node)
        logits, features = reference(model.reference, [*prompt.tolist(), *tree.tokens[path].tolist()])
        np.testing.assert_allclose(out.logits[node], logits[-1], atol=TOLERANCE)
        np.testing.assert_allclose(out.features[node], features[-1], atol=TOLERANCE)

    target.keep(path)
    committed = [*prompt.tolist(), *tree.tokens[path].tolist()]
    assert target.kv_len == len(committed)
    out = target.forward(DraftTree.root_only(5, len(committed) + 1))
    np.testing.assert_allclose(
        out.logits[0], reference(model.reference, [*committed, 5])[0][-1], atol=TOLERANCE
    )


@pytest.mark.parametrize("quant", ["int8", "int4"])
def test_quantised_logits_stay_close(
    quant: str, tiny: Callable[[str], Any], rng: np.random.Generator, tmp_path: Path
) -> None:
    model = tiny("llama grouped")
    target = model.export(tmp_path / "bundle", quant=quant)
    prompt = rng.integers(3, 150, 40).astype(np.int32)
    expected = reference(model.reference, prompt.tolist())[0][-1]
    found = target.prefill(prompt).logits[0]
    assert np.corrcoef(expected, found)[0, 1] > {"int8": 0.999, "int4": 0.95}[quant]


def test_features_of_three_layers_are_the_inputs_of_those_layers(
    tiny: Callable[[str], Any], rng: np.random.Generator, tmp_path: Path
) -> None:
    model = tiny("llama grouped")
    target = model.export(tmp_path / "bundle", quant="fp32", eagle3=True)
    layers = target.bundle.manifest.feature_layers
    prompt = rng.integers(3, 150, 12).astype(np.int32)
    with torch.no_grad():
        hidden = model.reference(torch.tensor([prompt.tolist()]), output_hidden_states=True).hidden_states
    expected = np.concatenate([hidden[layer][0].numpy() for layer in layers], axis=1)
    assert target.spec.feature_size == expected.shape[1]
    np.testing.assert_allclose(target.prefill(prompt).features, expected, atol=TOLERANCE)
