"""The tensorrt flavour: only operators that old parsers know, and the numbers of the other flavour."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from starsd_edge.decoding.tree import DraftTree
from starsd_edge.errors import UsageError
from starsd_jetson.export import ExportSettings, export
from starsd_jetson.graph.standard_ops import STANDARD_OPERATORS
from starsd_jetson.standard_target import StandardTarget


def load(model: Any, out: Path, quant: str) -> StandardTarget:
    return StandardTarget.load(export(model.folder, out, ExportSettings(quant=quant, flavour="tensorrt")), 1)


def random_tree(rng: np.random.Generator, size: int, base_len: int) -> DraftTree:
    parents = [-1, *(int(rng.integers(max(0, node - 3), node)) for node in range(1, size))]
    tokens = rng.permutation(150)[:size].astype(np.int32)
    return DraftTree(tokens, np.array(parents, np.int32), base_len)


@pytest.mark.parametrize(
    ("family", "quant", "error"),
    [
        ("llama grouped", "fp32", 2e-4),
        ("llama ungrouped, tied", "fp32", 2e-4),
        ("qwen2", "fp32", 2e-4),
        ("qwen3", "fp32", 2e-4),
        ("llama grouped", "fp16", 2e-2),
    ],
)
def test_both_flavours_say_the_same(
    family: str,
    quant: str,
    error: float,
    tiny: Callable[[str], Any],
    rng: np.random.Generator,
    tmp_path: Path,
) -> None:
    """From an empty cache over a prompt in chunks, a tree, a kept path, to the step after it."""
    model = tiny(family)
    ours, other = load(model, tmp_path / "a", quant), model.export(tmp_path / "b", quant="fp32")
    prompt = rng.integers(3, 150, 150).astype(np.int32)
    tree = random_tree(rng, 9, len(prompt) + 1)
    path = tree.path(8)
    results = []
    for target in (ours, other):
        first, second = target.prefill(prompt), target.forward(tree)
        target.keep(path)
        third = target.forward(DraftTree.root_only(7, len(prompt) + len(path) + 1))
        results.append([first, second, third])
    for mine, theirs in zip(*results, strict=True):
        np.testing.assert_allclose(mine.logits, theirs.logits, atol=error)
        np.testing.assert_allclose(mine.features, theirs.features, atol=error)


def test_int4_stays_close(tiny: Callable[[str], Any], rng: np.random.Generator, tmp_path: Path) -> None:
    model = tiny("llama grouped")
    ours, other = load(model, tmp_path / "a", "int4"), model.export(tmp_path / "b", quant="fp32")
    prompt = rng.integers(3, 150, 40).astype(np.int32)
    found, expected = ours.prefill(prompt).logits[0], other.prefill(prompt).logits[0]
    assert np.corrcoef(found, expected)[0, 1] > 0.95


@pytest.mark.parametrize(("quant", "opset"), [("fp16", 17), ("int4", 21)])
@pytest.mark.parametrize("family", ["llama grouped", "qwen2", "qwen3"])
def test_the_graph_holds_to_the_whitelist(
    family: str, quant: str, opset: int, tiny: Callable[[str], Any], tmp_path: Path
) -> None:
    load(tiny(family), tmp_path / "bundle", quant)
    model = onnx.load(tmp_path / "bundle" / "model.onnx", load_external_data=False)
    assert {node.op_type for node in model.graph.node} <= STANDARD_OPERATORS
    assert [(entry.domain, entry.version) for entry in model.opset_import] == [("", opset)]
    halves = onnx.TensorProto.FLOAT16
    by_name = {value.name: value.type.tensor_type.elem_type for value in model.graph.input}
    assert {by_name["mask"], by_name["k.0"], by_name["v.2"]} == {halves}
    assert by_name["tokens"] == onnx.TensorProto.INT32


def test_what_tensorrt_cannot_have_is_refused(tiny: Callable[[str], Any], tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no int8 for tensorrt; choose one of fp32, fp16, int4"):
        load(tiny("llama grouped"), tmp_path / "bundle", "int8")
