"""EAGLE-3's layers and projection in the target's graph: the head's numbers, for that head and no other."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from safetensors.numpy import save_file

from starsd_edge.errors import BundleError
from starsd_edge.protocol.greeting import projection_hash
from starsd_jetson.export import ExportSettings, export
from starsd_jetson.graph.sources import open_source
from starsd_jetson.graph.standard_ops import STANDARD_OPERATORS
from starsd_jetson.graph.taps import read_taps
from starsd_jetson.onnx_target import OnnxTarget
from starsd_jetson.standard_target import StandardTarget
from tests.jetson.test_row_invariance import assert_exact

HIDDEN, WIDTH = 64, 48  # of the target, of the head
LAYERS = (0, 1, 2)


def write_head(folder: Path, model: Path, **changes: Any) -> Path:
    """What `starsd draft convert` leaves of an EAGLE-3 head, as far as an export reads it."""
    folder.mkdir()
    projection = np.random.default_rng(1).standard_normal((WIDTH, len(LAYERS) * HIDDEN)).astype(np.float32)
    projection /= HIDDEN**0.5
    sha256 = projection_hash(projection)
    projection[changes.pop("damaged", slice(0))] *= changes.pop("by", 1.0)
    save_file({"fc.weight": projection}, folder / "head.safetensors")
    identity = {
        "target": "tiny",
        "target_hash": open_source(model).sha256(),
        "feature_layers": LAYERS,
        "projection": sha256,
    }
    head = {"kind": changes.pop("kind", "eagle3")}
    if head["kind"] == "eagle1":
        del identity["projection"]
    raw = {"name": "a head", "head": head, "identity": identity | changes}
    (folder / "config.json").write_text(json.dumps(raw))
    return folder


def expected_features(model: Any, head: Path, tokens: np.ndarray) -> np.ndarray:
    """float32 [n, WIDTH] from transformers' hidden states."""
    projection = read_taps(head, open_source(model.folder)).projection
    with torch.no_grad():
        hidden = model.reference(torch.tensor([tokens.tolist()]), output_hidden_states=True).hidden_states
    taps = np.concatenate([hidden[layer][0].numpy() for layer in LAYERS], axis=1)
    return np.asarray(taps @ projection.T)


@pytest.mark.parametrize(
    ("flavour", "quant", "error"),
    [
        ("onnxruntime", "fp32", 2e-4),
        ("onnxruntime", "int8", 0.1),
        ("tensorrt", "fp32", 2e-4),
        ("tensorrt", "fp16", 1e-2),
    ],
)
def test_features_are_the_layers_inputs_projected(
    flavour: str,
    quant: str,
    error: float,
    tiny: Callable[[str], Any],
    rng: np.random.Generator,
    tmp_path: Path,
) -> None:
    """As wide as the head, which may be another width than its target."""
    model = tiny("llama grouped")
    head = write_head(tmp_path / "head", model.folder)
    bundle = export(model.folder, tmp_path / "bundle", ExportSettings(quant, flavour, eagle3=head))
    target = (OnnxTarget if flavour == "onnxruntime" else StandardTarget).load(bundle, 1)
    tokens = rng.integers(3, 150, 12).astype(np.int32)
    named = json.loads((head / "config.json").read_text())["identity"]["projection"]
    assert (WIDTH, LAYERS, named) == (
        target.spec.feature_size,
        bundle.manifest.feature_layers,
        bundle.manifest.projection,
    )
    expected = expected_features(model, head, tokens)
    np.testing.assert_allclose(target.prefill(tokens).features, expected, atol=error * np.abs(expected).max())


@pytest.mark.parametrize("quant", ["fp32", "int8"])
def test_a_row_has_the_same_bits_whatever_is_beside_it(
    quant: str, tiny: Callable[[str], Any], rng: np.random.Generator, tmp_path: Path
) -> None:
    model = tiny("llama grouped")
    head = write_head(tmp_path / "head", model.folder)
    target = model.export(tmp_path / "bundle", quant=quant, eagle3=head)
    assert_exact(target, rng, 150, [1, 17, 64, 128, 300])


def test_the_standard_graph_holds_to_the_whitelist(tiny: Callable[[str], Any], tmp_path: Path) -> None:
    model = tiny("llama grouped")
    head = write_head(tmp_path / "head", model.folder)
    export(model.folder, tmp_path / "bundle", ExportSettings("int4", "tensorrt", eagle3=head))
    graph = onnx.load(tmp_path / "bundle" / "model.onnx", load_external_data=False).graph
    assert {node.op_type for node in graph.node} <= STANDARD_OPERATORS


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"kind": "eagle1"}, "an EAGLE-1 head reads no layers of its own: leave out --eagle3"),
        ({"target_hash": "00"}, "made for tiny, whose weights are not those of"),
        ({"feature_layers": [0, 1, 3]}, r"feature layers \[0, 1, 3\] of a model of 3"),
        ({"feature_layers": [1, 0, 2]}, "feature layers"),
        ({"feature_layers": [0, 1]}, r"its projection is \[48, 192\]; it takes 2 layers of 64"),
        ({"feature_layers": None}, "not a draft head's configuration"),
        ({"projection": "ab"}, "is not the one that its config.json names"),
        ({"damaged": 5, "by": 2.0}, "is not the one that its config.json names"),
        ({"damaged": 5, "by": np.nan}, "holds NaN or infinity"),
    ],
)
def test_a_head_that_does_not_fit_the_model_is_named(
    changes: dict[str, Any], said: str, tiny: Callable[[str], Any], tmp_path: Path
) -> None:
    model = tiny("llama grouped")
    head = write_head(tmp_path / "head", model.folder, **changes)
    with pytest.raises(BundleError, match=said):
        model.export(tmp_path / "bundle", quant="fp32", eagle3=head)


def test_a_folder_that_is_no_head_is_named(tiny: Callable[[str], Any], tmp_path: Path) -> None:
    with pytest.raises(BundleError, match="not a draft head's configuration"):
        tiny("llama grouped").export(tmp_path / "bundle", quant="fp32", eagle3=tmp_path)


@pytest.mark.parametrize("name", ["config.json", "head.safetensors"])
def test_a_pipe_in_a_head_is_refused(name: str, tiny: Callable[[str], Any], tmp_path: Path) -> None:
    model = tiny("llama grouped")
    head = write_head(tmp_path / "head", model.folder)
    (head / name).unlink()
    os.mkfifo(head / name)
    with pytest.raises(BundleError, match="not a regular file"):
        model.export(tmp_path / "bundle", quant="fp32", eagle3=head)
