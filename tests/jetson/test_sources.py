"""GGUF files and Hugging Face folders: the same model read from either, and damaged ones named."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from transformers import AutoModelForCausalLM

from starsd_edge.errors import BundleError
from starsd_jetson.export import ExportSettings, export
from starsd_jetson.graph.gguf_source import GGUF_LAYER_NAMES
from starsd_jetson.graph.shape import RopeScaling
from starsd_jetson.graph.sources import open_source
from starsd_jetson.onnx_target import OnnxTarget
from starsd_jetson.sentencepiece import Piece
from tests.jetson.gguf_files import write_gguf

Kind = gguf.GGMLQuantizationType


@pytest.mark.parametrize(
    ("kind", "error"),
    [
        (Kind.F32, 0.0),
        (Kind.F16, 1e-3),
        (Kind.BF16, 1e-2),
        (Kind.Q8_0, 1e-2),
        (Kind.Q5_0, 0.1),
        (Kind.Q4_1, 0.1),
        (Kind.Q4_0, 0.1),
        (Kind.Q4_K, 0.1),
        (Kind.Q5_K, 0.05),
        (Kind.Q6_K, 0.03),
    ],
)
def test_gguf_gives_the_tensors_of_the_folder_it_was_made_from(
    kind: Kind, error: float, tiny: Callable[[str], Any], tmp_path: Path
) -> None:
    folder = tiny("llama wide").folder
    original, found = open_source(folder), open_source(write_gguf(folder, tmp_path / "m.gguf", kind))
    assert found.shape == original.shape
    for name in ["model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"]:
        assert_close(found.tensor(name), original.tensor(name), error)
    for name in GGUF_LAYER_NAMES:
        if original.has(f"model.layers.0.{name}"):
            name = f"model.layers.0.{name}"
            assert_close(found.tensor(name), original.tensor(name), error)


def assert_close(found: np.ndarray, expected: np.ndarray, error: float) -> None:
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, expected, atol=error * np.abs(expected).max())


@pytest.mark.parametrize(("family", "architecture"), [("qwen2", "qwen2"), ("qwen3", "qwen3")])
def test_qwen_files_keep_their_rotary_order(
    family: str, architecture: str, tiny: Callable[[str], Any], tmp_path: Path
) -> None:
    folder = tiny(family).folder
    original = open_source(folder)
    found = open_source(write_gguf(folder, tmp_path / "m.gguf", architecture=architecture))
    assert found.shape == original.shape
    name = "model.layers.0.self_attn.q_proj.weight"
    np.testing.assert_array_equal(found.tensor(name), original.tensor(name))


def test_a_gguf_file_of_llama_3_1_keeps_its_stretched_frequencies(
    tiny: Callable[[str], Any], tmp_path: Path
) -> None:
    """llama.cpp's converter writes Llama 3.1's scaling out as one divisor a frequency (rope_freqs.weight)."""
    folder = tiny("llama 3.1").folder
    original = open_source(folder)
    scaling, half = original.shape.rope_scaling, original.shape.head_dim // 2
    assert scaling is not None
    factors = []
    for index in range(half):
        wave = 2 * math.pi * original.shape.rope_theta ** (index / half)
        turns = scaling.original_max_len / wave
        if turns > scaling.high_freq_factor:
            factors.append(1.0)
        elif turns < scaling.low_freq_factor:
            factors.append(scaling.factor)
        else:
            low, high = scaling.low_freq_factor, scaling.high_freq_factor
            smooth = (turns - low) / (high - low)
            factors.append(1 / ((1 - smooth) / scaling.factor + smooth))
    assert len({*factors}) > 2  # short waves, long ones and what lies between
    letters = [Piece(chr(code), 0.0, 1) for code in range(33, 127)]
    pieces = [Piece("<unk>", 0.0, 2), Piece("<s>", 0.0, 3), Piece("</s>", 0.0, 3), *letters]
    file = write_gguf(folder, tmp_path / "m.gguf", pieces=pieces, rope_factors=np.array(factors, np.float32))
    found = open_source(file)
    assert found.shape.rope_scaling == RopeScaling("factors", factors=tuple(np.float32(factors).tolist()))
    np.testing.assert_allclose(found.shape.rope_frequencies(), original.shape.rope_frequencies(), rtol=1e-6)
    logits = []
    for name, source in (("folder", folder), ("file", file)):
        settings = ExportSettings(quant="fp32", chat_template="none")
        target = OnnxTarget.load(export(source, tmp_path / name, settings))
        logits.append(target.prefill(np.arange(3, 103, dtype=np.int32)).logits)
    np.testing.assert_allclose(*logits, atol=2e-4)


def export_gguf(path: Path, out: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "starsd_edge", "export", str(path), "--out", str(out)]
    command += ["--chat-template", "none"]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_an_unknown_architecture_is_one_clear_line(tiny: Callable[[str], Any], tmp_path: Path) -> None:
    path = write_gguf(tiny("llama grouped").folder, tmp_path / "m.gguf", architecture="mamba")
    done = export_gguf(path, tmp_path / "bundle")
    assert done.returncode == BundleError.exit_code
    assert "architecture 'mamba' is not supported (supported: llama," in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("part", [0.001, 0.01, 0.5, 0.99])
def test_a_cut_gguf_file_is_one_clear_line(part: float, tiny: Callable[[str], Any], tmp_path: Path) -> None:
    path = write_gguf(tiny("llama grouped").folder, tmp_path / "m.gguf")
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * part)])
    with pytest.raises(BundleError, match="cut short"):
        open_source(path)


@pytest.mark.parametrize(
    ("expected", "content"),
    [("neither a GGUF file nor a folder", b"PK\x03\x04"), ("no such file", None)],
)
def test_something_else_is_named(expected: str, content: bytes | None, tmp_path: Path) -> None:
    path = tmp_path / "model"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(BundleError, match=expected):
        open_source(path)


def test_shards_and_half_precision_are_read(tiny: Callable[[str], Any], tmp_path: Path) -> None:
    """Sharded safetensors in bfloat16, as large models come; and .bin files through torch."""
    import torch

    model = tiny("llama grouped")
    half = type(model.reference).from_pretrained(model.folder, dtype=torch.bfloat16)
    half.save_pretrained(tmp_path / "shards", max_shard_size="100KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 1
    (tmp_path / "bin").mkdir()
    torch.save(half.state_dict(), tmp_path / "bin" / "pytorch_model.bin")
    (tmp_path / "bin" / "config.json").write_text((model.folder / "config.json").read_text())
    expected = half.state_dict()
    for folder in ("shards", "bin"):
        source = open_source(tmp_path / folder)
        for name in ("model.embed_tokens.weight", "model.layers.2.mlp.down_proj.weight", "lm_head.weight"):
            np.testing.assert_array_equal(source.tensor(name), expected[name].float().numpy())


def split(folder: Path, out: Path) -> Path:
    """The model in several files, which an index names."""
    import torch

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.save_pretrained(out, max_shard_size="100KB")
    shutil.copy(folder / "tokenizer.json", out)
    return out


def test_a_file_of_several_that_was_not_fetched_is_named(tiny: Callable[[str], Any], tmp_path: Path) -> None:
    folder = split(tiny("llama grouped").folder, tmp_path / "model")
    shard = sorted(folder.glob("*.safetensors"))[2]
    shard.unlink()
    with pytest.raises(
        BundleError, match=rf"{shard} is missing, which model\.safetensors\.index\.json names"
    ):
        open_source(folder)


def test_what_lies_beside_the_files_that_the_index_names_is_not_the_model(
    tiny: Callable[[str], Any], tmp_path: Path
) -> None:
    """Mistral's folders hold the same weights once more, in their author's layout and in one file."""
    folder = split(tiny("llama grouped").folder, tmp_path / "model")
    alone = open_source(folder).sha256()
    shutil.copy(tiny("llama grouped").folder / "model.safetensors", folder / "consolidated.safetensors")
    assert alone == open_source(folder).sha256()


@pytest.mark.parametrize("table", [None, [], {"a": "../model.safetensors"}, {"a": 1}, {"a": "model.gguf"}])
def test_an_index_that_names_no_files_of_the_folder_is_refused(
    table: object, tiny: Callable[[str], Any], tmp_path: Path
) -> None:
    folder = split(tiny("llama grouped").folder, tmp_path / "model")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": table}))
    with pytest.raises(BundleError, match=r"index\.json: names no files of weights"):
        open_source(folder)


def test_a_bin_file_that_would_run_something_is_refused(tiny: Callable[[str], Any], tmp_path: Path) -> None:
    import torch

    class Trap:
        def __reduce__(self) -> Any:
            return Path.touch, (tmp_path / "ran",)

    (tmp_path / "config.json").write_text((tiny("llama grouped").folder / "config.json").read_text())
    torch.save({"model.norm.weight": Trap()}, tmp_path / "pytorch_model.bin")
    with pytest.raises(BundleError, match=r"pytorch_model\.bin: torch cannot read it with weights_only"):
        open_source(tmp_path)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("expected", "changes"),
    [
        (512, {}),
        (512, {"sliding_window": None}),
        (512, {"sliding_window": 128, "use_sliding_window": False}),
        (128, {"sliding_window": 128}),
        (512, {"sliding_window": 4096}),
        (2048, {"max_sequence_length": 2048, "rope_scaling": {"type": "linear", "factor": 4.0}}),
    ],
)
def test_the_context_ends_where_the_configuration_says_or_attention_would_begin_to_slide(
    expected: int, changes: dict[str, Any], tiny: Callable[[str], Any], tmp_path: Path
) -> None:
    """Mistral 7B v0.1 was made for windows of 4096 in a context of 32768; Vicuna 7B v1.5 16k has positions of
    4096, stretched by four, and a "max_sequence_length" of 16384."""
    folder = tiny("llama grouped").folder
    shutil.copytree(folder, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (tmp_path / "model" / "config.json").write_text(json.dumps(config | changes))
    assert expected == open_source(tmp_path / "model").shape.max_len
