"""Sources that lie about themselves are refused at export, with the file and the tensor named."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from starsd_edge.errors import BundleError
from starsd_jetson.export import ExportSettings, export
from starsd_jetson.graph.checked_source import CheckedSource
from starsd_jetson.graph.sources import open_source


@pytest.fixture
def folder(tiny: Callable[[str], Any], tmp_path: Path) -> Path:
    """A model that may be spoilt."""
    copy = tmp_path / "model"
    shutil.copytree(tiny("llama grouped").folder, copy)
    return copy


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num_hidden_layers", 0),
        ("num_hidden_layers", 1),  # of two
        ("num_hidden_layers", 1.5),
        ("hidden_size", None),
        ("hidden_size", "x"),
        ("intermediate_size", -3),
        ("num_attention_heads", 0),
        ("vocab_size", [1]),
        ("rms_norm_eps", None),
        ("rms_norm_eps", float("nan")),
        ("rope_theta", "x"),
        ("rope_theta", -1),
        ("rope_scaling", "linear"),
        ("rope_scaling", {"type": "linear", "factor": 0}),
        ("max_position_embeddings", 1 << 40),
        ("max_position_embeddings", 3),
    ],
)
def test_a_number_that_no_model_has_is_refused(key: str, value: object, folder: Path) -> None:
    config = folder / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {key: value}))
    with pytest.raises(BundleError, match=str(folder)) as refused:
        open_source(folder)
    assert "\n" not in str(refused.value)


def test_a_weight_that_is_not_there_is_told_before_any_is_read(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was told when its turn came, which for a large model is after minutes."""
    name = "model.norm.weight"
    (file,) = folder.glob("*.safetensors")
    tensors = load_file(file)
    del tensors[name]
    save_file(tensors, file)
    monkeypatch.setattr(CheckedSource, "tensor", None)  # none is read
    with pytest.raises(BundleError, match=f"tensor {name} is missing; fetch it again"):
        export(folder, folder.parent / "bundle", ExportSettings())
    for layer in range(3):
        del tensors[f"model.layers.{layer}.mlp.up_proj.weight"]
    save_file(tensors, file)
    with pytest.raises(BundleError, match=r"layers\.0\.mlp\.up_proj\.weight is missing, and 3 more"):
        open_source(folder).check_whole()


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_weight_that_is_no_number_is_refused_by_its_name(bad: float, folder: Path) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    spoil(
        folder, name, lambda weight: np.where(np.arange(weight.size).reshape(weight.shape) == 5, bad, weight)
    )
    with pytest.raises(BundleError, match=f"{name} holds NaN or infinity"):
        open_source(folder).tensor(name)


def test_a_weight_of_another_shape_is_refused_by_its_name(folder: Path) -> None:
    name = "model.layers.0.self_attn.k_proj.weight"
    spoil(folder, name, lambda weight: np.ascontiguousarray(weight.T))
    with pytest.raises(BundleError, match=f"tensor {name} is"):
        open_source(folder).tensor(name)


@pytest.mark.parametrize(
    "header",
    [b"[]", b'{"a": {}}', b'{"a": 1}', b'{"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}'],
)
def test_an_odd_safetensors_header_is_one_clear_line(header: bytes, folder: Path) -> None:
    file = next(folder.glob("*.safetensors"))
    file.write_bytes(len(header).to_bytes(8, "little") + header + b"0000")
    with pytest.raises(BundleError, match="safetensors"):
        open_source(folder)


def test_a_weight_file_that_is_a_dangling_link_is_named(folder: Path) -> None:
    file = next(folder.glob("*.safetensors"))
    file.unlink()
    file.symlink_to("gone")
    with pytest.raises(BundleError, match="cannot be read"):
        open_source(folder)


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("generation_config.json", b'{"do_sample": true, "temperature": -1}'),
        ("generation_config.json", b'{"do_sample": true, "temperature": "warm"}'),
        ("generation_config.json", b'{"eos_token_id": [1, "a"]}'),
        ("generation_config.json", b'{"eos_token_id": 1000000000}'),
        ("chat_template.jinja", b"{% if %}"),
        ("chat_template.jinja", b"\xff\xfe"),
        ("tokenizer.json", b"\xff"),
    ],
)
def test_text_settings_that_no_chat_could_use_are_refused(file: str, content: bytes, folder: Path) -> None:
    (folder / file).write_bytes(content)
    with pytest.raises(BundleError) as refused:
        export(folder, folder.parent / "bundle", ExportSettings())
    assert "\n" not in str(refused.value)
    assert not (folder.parent / "bundle").exists()


def test_a_tokenizer_that_no_chat_could_decode_with_is_refused(folder: Path) -> None:
    """The bundle was made, passed its self-test, and could not be chatted with."""
    file = folder / "tokenizer.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"decoder": {"type": "Fuse"}}))
    with pytest.raises(BundleError, match=f"{folder}: tokenizer.json has a decoder of an unknown kind"):
        export(folder, folder.parent / "bundle", ExportSettings())
    assert not (folder.parent / "bundle").exists()


def spoil(folder: Path, name: str, change: Callable[[np.ndarray], np.ndarray]) -> None:
    file = next(folder.glob("*.safetensors"))
    tensors = load_file(file)
    tensors[name] = change(tensors[name]).astype(tensors[name].dtype)
    save_file(tensors, file)
