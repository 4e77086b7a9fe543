"""A bundle on disk: what is wrong with it is said in one line, and every changed byte is found."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from starsd_edge.bundle import (
    MANIFEST_NAME,
    Bundle,
    FileEntry,
    Identity,
    Manifest,
    Quality,
    SamplingDefaults,
    SelfTest,
    Shapes,
    TensorEntry,
    file_sha256,
)
from starsd_edge.errors import BundleError

MANIFEST = Manifest(
    identity=Identity("a model", "00", "11"),
    shapes=Shapes("llama", 1, 4, 8, 2, 1, 2, 3, 4, 1e-5, 10000.0),
    flavour="onnxruntime",
    quantisation="int8",
    max_len=64,
    feature_layers=(),
    bos_token=1,
    add_bos=False,
    stop_tokens=(0, 2),
    chat_template="{{ messages }}",
    sampling=SamplingDefaults(),
    self_test=SelfTest((1, 2), (3,)),
    quality=Quality(),
    tensors={},
    exporter=1,
)


def write_bundle(folder: Path) -> Path:
    """Three tokens of width four: rows of ones, twos, threes, and an int8 head of the same."""
    folder.mkdir()
    table = np.repeat(np.arange(1, 4, dtype=np.float16)[:, None], 4, axis=1)
    head = np.repeat(np.array([[2, 4, 6]], np.int8), 4, axis=0)
    scales = np.full(3, 0.5, np.float32)
    data = table.tobytes() + head.tobytes() + scales.tobytes()
    (folder / "model.data").write_bytes(data)
    (folder / "model.onnx").write_bytes(b"graph")
    files = {
        name: FileEntry(file_sha256(folder / name), (folder / name).stat().st_size)
        for name in ("model.data", "model.onnx")
    }
    tensors = {
        "embedding": TensorEntry("model.data", 0, "float16", (3, 4)),
        "lm_head": TensorEntry("model.data", 24, "int8", (4, 3), "columns", 36),
    }
    (folder / MANIFEST_NAME).write_text(replace(MANIFEST, files=files, tensors=tensors).to_json())
    return folder


def change(folder: Path, **values: Any) -> None:
    file = folder / MANIFEST_NAME
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_bundle(tmp_path / "bundle")


def test_a_manifest_reads_back_as_it_was_written(folder: Path) -> None:
    opened = Bundle.open(folder).manifest
    assert replace(opened, files={}, tensors={}) == MANIFEST
    assert json.loads(opened.to_json()) == json.loads((folder / MANIFEST_NAME).read_text())


def test_embedding_and_head_are_read_whatever_their_layout(folder: Path) -> None:
    bundle = Bundle.open(folder)
    expected = np.repeat(np.arange(1, 4, dtype=np.float32)[:, None], 4, axis=1)
    np.testing.assert_array_equal(bundle.embedding(), expected)
    np.testing.assert_array_equal(bundle.lm_head(), expected)
    np.testing.assert_array_equal(bundle.lm_head(np.array([2, 0])), expected[[2, 0]])


@pytest.mark.parametrize("name", ["model.data", "model.onnx", MANIFEST_NAME])
def test_a_changed_byte_anywhere_is_found(folder: Path, name: str) -> None:
    Bundle.open(folder).verify()
    original = (folder / name).read_bytes()
    for index in range(len(original)):
        changed = bytearray(original)
        changed[index] ^= 1
        (folder / name).write_bytes(changed)
        with pytest.raises(BundleError):
            Bundle.open(folder).verify()


def test_a_file_nobody_listed_is_found(folder: Path) -> None:
    (folder / "extra.so").write_bytes(b"")
    with pytest.raises(BundleError, match=r"extra\.so is not part"):
        Bundle.open(folder).verify()


def test_a_cut_file_is_found_at_once(folder: Path) -> None:
    (folder / "model.data").write_bytes(b"short")
    with pytest.raises(BundleError, match=r"model\.data has 5 of 48 bytes"):
        Bundle.open(folder)


def test_a_missing_file_is_found_at_once(folder: Path) -> None:
    (folder / "model.onnx").unlink()
    with pytest.raises(BundleError, match=r"model\.onnx is missing"):
        Bundle.open(folder)


def test_a_file_name_that_leaves_the_folder_is_refused(folder: Path) -> None:
    change(folder, files={"../model.onnx": {"sha256": "", "num_bytes": 1}})
    with pytest.raises(BundleError, match="leaves the bundle"):
        Bundle.open(folder)


@pytest.mark.parametrize(
    ("expected", "values"),
    [
        ("format 2", {"format": 2}),
        ("manifest.max_len is str, not int", {"max_len": "64"}),
        (r"manifest.stop_tokens\[1\] is str", {"stop_tokens": [0, "2"]}),
        ("manifest.identity is not an object", {"identity": []}),
        ("manifest.shapes.architecture is missing", {"shapes": {}}),
        ("feature layers go with the name of their projection", {"feature_layers": [1, 2, 3]}),
        ("feature layers go with the name of their projection", {"projection": "ab"}),
    ],
)
def test_a_wrong_manifest_is_refused_by_name(folder: Path, expected: str, values: dict[str, Any]) -> None:
    change(folder, **values)
    with pytest.raises(BundleError, match=expected):
        Bundle.open(folder)


def test_a_folder_that_is_no_bundle_says_how_to_make_one(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match="starsd export"):
        Bundle.open(tmp_path)
