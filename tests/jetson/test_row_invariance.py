"""DESIGN 3 "Rounding", promise 1: a node's bits do not depend on the rows beside it, one row included."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from starsd_edge.bundle import Bundle
from starsd_edge.decoding.tree import DraftTree
from starsd_jetson import embedded
from starsd_jetson.onnx_target import EXACT_BY_CONSTRUCTION, OnnxTarget

# Around the edges of the blocks that attention sums in, and far from them.
PASTS = [1, 2, 3, 17, 63, 64, 65, 100, 112, 120, 126, 127, 128, 129, 191, 192, 250, 255, 256, 257, 300]


def random_tree(rng: np.random.Generator, size: int, base_len: int) -> DraftTree:
    parents = [-1, *(int(rng.integers(max(0, node - 4), node)) for node in range(1, size))]
    tokens = rng.permutation(150)[:size].astype(np.int32)
    return DraftTree(tokens, np.array(parents, np.int32), base_len)


def assert_exact(target: OnnxTarget, rng: np.random.Generator, vocabulary: int, pasts: list[int]) -> None:
    """Trees of 1 to 16 nodes, against plain steps along a path and against the path as one chain."""
    text = rng.integers(3, vocabulary, max(pasts)).astype(np.int32)
    for past in pasts:
        target.truncate(0)
        target.prefill(text[:past])
        tree = random_tree(rng, min(int(rng.integers(1, 17)), target.max_tree_size()), past + 1)
        together = target.forward(tree)
        path = tree.path(len(tree) - 1)
        chain = target.forward(DraftTree.chain(tree.tokens[path].tolist(), past + 1))
        np.testing.assert_array_equal(chain.logits, together.logits[path])
        np.testing.assert_array_equal(chain.features, together.features[path])
        for depth, node in enumerate(path):
            step = target.forward(DraftTree.root_only(int(tree.tokens[node]), past + 1 + depth))
            np.testing.assert_array_equal(step.logits[0], together.logits[node])
            np.testing.assert_array_equal(step.features[0], together.features[node])
            target.keep([0])


@pytest.mark.parametrize(
    ("family", "quant", "threads"),
    [
        ("llama grouped", "fp32", 1),
        ("llama grouped", "int8", 2),
        ("llama ungrouped, tied", "fp32", 2),
        ("llama ungrouped, tied", "int8", 1),
        ("qwen3", "int8", 1),
        ("llama grouped", "int4-exact", 2),
        ("llama ungrouped, tied", "int4-exact", 1),
    ],
)
def test_a_tree_gives_the_bits_of_plain_steps(
    family: str,
    quant: str,
    threads: int,
    tiny: Callable[[str], Any],
    rng: np.random.Generator,
    tmp_path: Path,
) -> None:
    tiny(family).export(tmp_path / "bundle", quant=quant)
    target = OnnxTarget.load(Bundle.open(tmp_path / "bundle"), threads)
    must_be_exact(target, quant)
    assert_exact(target, rng, 150, PASTS)


def must_be_exact(target: OnnxTarget, quant: str) -> None:
    """Loading finds out where MatMulNBits sums one row differently even in blocks of 32; seen nowhere yet."""
    if quant not in EXACT_BY_CONSTRUCTION and not target.spec.invariance.bitwise:
        pytest.skip(f"{quant} is not exact on this CPU, and says so")
    assert target.spec.invariance.bitwise


@pytest.mark.parametrize("quant", ["int8", "int4-exact"])
def test_a_prompt_gives_the_same_bits_in_any_chunks(
    quant: str, tiny: Callable[[str], Any], rng: np.random.Generator, tmp_path: Path
) -> None:
    """After a rollback the prompt's tail is run again, in other chunks: the text must not notice."""
    target = tiny("llama grouped").export(tmp_path / "bundle", quant=quant)
    must_be_exact(target, quant)
    text = rng.integers(3, 150, 290).astype(np.int32)
    whole = target.prefill(text)
    target.truncate(0)
    parts = [target.prefill(part) for part in np.split(text, [1, 5, 70, 128, 131, 280])]
    np.testing.assert_array_equal(np.concatenate([part.features for part in parts]), whole.features)
    np.testing.assert_array_equal(parts[-1].logits, whole.logits)


def test_kept_paths_leave_the_cache_of_plain_decoding(
    tiny: Callable[[str], Any], rng: np.random.Generator, tmp_path: Path
) -> None:
    """Rounds of trees over more than two blocks; every logit along the way equals plain decoding's."""
    target = tiny("llama grouped").export(tmp_path / "bundle", quant="int8")
    text = rng.integers(3, 150, 20).astype(np.int32)
    target.prefill(text)
    committed, rows = text.tolist(), []
    while target.kv_len < 290:
        size = min(8, target.max_tree_size())
        tree = random_tree(rng, size, target.kv_len + 1)
        out = target.forward(tree)
        path = tree.path(size - 1)
        target.keep(path)
        committed += tree.tokens[path].tolist()
        rows += [out.logits[node] for node in path]
    target.truncate(len(text))
    for index, token in enumerate(committed[len(text) :]):
        out = target.forward(DraftTree.root_only(token, target.kv_len + 1))
        np.testing.assert_array_equal(out.logits[0], rows[index])
        target.keep([0])


@pytest.mark.model
@pytest.mark.parametrize("quant", ["fp32", "int8", "int4-exact"])
def test_the_embedded_model_is_exact(quant: str, rng: np.random.Generator) -> None:
    target = OnnxTarget.load(Bundle.open(embedded.bundle_path(quant)), 2)
    must_be_exact(target, quant)
    assert_exact(target, rng, 40000, [5, 60, 117, 128, 250])
