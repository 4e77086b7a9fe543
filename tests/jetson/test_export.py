"""Exporting: complete or not there at all, and every refusal is one clear line."""

from __future__ import annotations

import json
import re
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from starsd_edge.bundle import Bundle
from starsd_edge.errors import BundleError, ResourceError, UsageError
from starsd_jetson import export as exporting
from starsd_jetson.export import ExportSettings, export
from starsd_jetson.graph.sources import open_source
from starsd_jetson.onnx_target import OnnxTarget
from starsd_jetson.self_test import run_self_test
from starsd_jetson.trial import runtime_here


def run_export(source: Path, out: Path, *more: str, **limits: int) -> subprocess.CompletedProcess[str]:
    """`starsd export` in a process of its own, whose files may have only so many bytes."""

    def limit() -> None:
        if "file_bytes" in limits:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limits["file_bytes"],) * 2)

    command = [sys.executable, "-m", "starsd_edge", "export", str(source), "--out", str(out), *more]
    return subprocess.run(command, capture_output=True, text=True, check=False, preexec_fn=limit)


def faults(stderr: str) -> list[str]:
    """What was said beside how far it is."""
    return [line for line in stderr.splitlines() if not line.startswith("exporting: ")]


def test_an_exported_bundle_is_whole_and_passes_its_self_test(
    tiny: Callable[[str], Any], tmp_path: Path
) -> None:
    done = run_export(tiny("llama grouped").folder, tmp_path / "bundle")
    assert (done.returncode, faults(done.stderr)) == (0, [])
    bundle = Bundle.open(tmp_path / "bundle")
    bundle.verify()
    run_self_test(OnnxTarget.load(bundle), bundle.manifest.self_test)
    assert bundle.manifest.self_test.expected
    assert [item.name for item in tmp_path.iterdir()] == ["bundle"]


def test_a_full_disk_leaves_nothing_behind(tiny: Callable[[str], Any], tmp_path: Path) -> None:
    done = run_export(tiny("llama grouped").folder, tmp_path / "bundle", file_bytes=100_000)
    assert done.returncode == ResourceError.exit_code
    (fault,) = faults(done.stderr)
    assert "the disk is full" in fault
    assert list(tmp_path.iterdir()) == []


def test_too_little_space_is_refused_before_anything_is_written(
    tiny: Callable[[str], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exporting, "estimate_bytes", lambda shape, settings: 1 << 60)
    with pytest.raises(ResourceError, match="MiB are free"):
        export(tiny("llama grouped").folder, tmp_path / "bundle", ExportSettings())
    assert list(tmp_path.iterdir()) == []


def test_an_interrupt_leaves_nothing_and_keeps_the_old_bundle(
    tiny: Callable[[str], Any], tmp_path: Path
) -> None:
    out = tmp_path / "bundle"
    folder = tiny("llama grouped").folder
    before = export(folder, out, ExportSettings(quant="int8")).manifest

    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        export(folder, out, ExportSettings(quant="fp32", replace=True), interrupt)
    assert Bundle.open(out).manifest == before
    assert [item.name for item in tmp_path.iterdir()] == ["bundle"]


def test_what_a_killed_export_left_is_removed_by_the_next(tiny: Callable[[str], Any], tmp_path: Path) -> None:
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    (tmp_path / f".bundle.partial-{dead.pid}").mkdir()
    export(tiny("llama grouped").folder, tmp_path / "bundle", ExportSettings())
    assert [item.name for item in tmp_path.iterdir()] == ["bundle"]


def test_an_interrupt_between_the_two_renames_puts_the_old_bundle_back(
    tiny: Callable[[str], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, folder, rename = tmp_path / "bundle", tiny("llama grouped").folder, Path.rename
    before = export(folder, out, ExportSettings(quant="int8")).manifest

    def interrupted(path: Path, target: Path) -> Path:
        if target == out and not path.name.endswith("old"):
            raise KeyboardInterrupt
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", interrupted)
    with pytest.raises(KeyboardInterrupt):
        export(folder, out, ExportSettings(quant="fp32", replace=True))
    assert Bundle.open(out).manifest == before
    assert [item.name for item in tmp_path.iterdir()] == ["bundle"]


def test_a_bundle_that_a_killed_export_had_moved_aside_is_put_back(
    tiny: Callable[[str], Any], tmp_path: Path
) -> None:
    out, folder = tmp_path / "bundle", tiny("llama grouped").folder
    before = export(folder, out, ExportSettings(quant="int8")).manifest
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    out.rename(tmp_path / f".bundle.partial-{dead.pid}-old")
    (tmp_path / f".bundle.partial-{dead.pid}").mkdir()
    with pytest.raises(UsageError, match="--replace"):
        export(folder, out, ExportSettings())
    assert Bundle.open(out).manifest == before
    assert [item.name for item in tmp_path.iterdir()] == ["bundle"]


def test_of_a_link_what_it_leads_to_is_replaced(tiny: Callable[[str], Any], tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    export(tiny("llama grouped").folder, tmp_path / "link", ExportSettings())
    assert Bundle.open(tmp_path / "real").manifest
    assert sorted(item.name for item in tmp_path.iterdir()) == ["link", "real"]


def test_nothing_is_written_over_without_being_told(tiny: Callable[[str], Any], tmp_path: Path) -> None:
    folder = tiny("llama grouped").folder
    export(folder, tmp_path / "bundle", ExportSettings())
    with pytest.raises(UsageError, match="--replace"):
        export(folder, tmp_path / "bundle", ExportSettings())
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "letter.txt").write_text("mine")
    with pytest.raises(UsageError, match="not a bundle"):
        export(folder, tmp_path / "other", ExportSettings(replace=True))


def test_a_source_is_the_same_model_whatever_it_is_exported_to(
    tiny: Callable[[str], Any], tmp_path: Path
) -> None:
    folder = tiny("llama grouped").folder
    first = export(folder, tmp_path / "a", ExportSettings(quant="int8")).manifest
    second = export(folder, tmp_path / "b", ExportSettings(quant="fp32")).manifest
    assert first.identity == second.identity
    assert first.files["model.data"] != second.files["model.data"]


def test_a_damaged_bundle_fails_its_self_test(tiny: Callable[[str], Any], tmp_path: Path) -> None:
    """Sizes still fit: only running it, as every load does, or hashing it tells."""
    export(tiny("llama grouped").folder, tmp_path / "bundle", ExportSettings(quant="fp32"))
    data = tmp_path / "bundle" / "model.data"
    data.write_bytes(bytes(len(data.read_bytes())))
    with pytest.raises(BundleError, match="self-test failed"):
        OnnxTarget.load(Bundle.open(tmp_path / "bundle"))


@pytest.mark.parametrize(
    ("expected", "config"),
    [
        ("architecture 'gpt2' is not supported", '{"model_type": "gpt2"}'),
        ("no 'num_attention_heads'", '{"model_type": "llama"}'),
        ("not JSON", "{"),
        ("rope scaling 'yarn' is not supported", None),
    ],
)
def test_a_folder_that_cannot_be_used_says_why(
    expected: str, config: str | None, tiny: Callable[[str], Any], tmp_path: Path
) -> None:
    source = tmp_path / "source"
    source.mkdir()
    original = (tiny("llama grouped").folder / "config.json").read_text()
    yarn = original.replace('"rope_type": "default"', '"rope_type": "yarn"')
    (source / "config.json").write_text(config or yarn)
    with pytest.raises(BundleError, match=expected):
        export(source, tmp_path / "bundle", ExportSettings())


def test_a_cut_weight_file_is_named(tiny: Callable[[str], Any], tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for file in tiny("llama grouped").folder.iterdir():
        data = file.read_bytes()
        (source / file.name).write_bytes(data[: len(data) // 2] if file.suffix == ".safetensors" else data)
    done = run_export(source, tmp_path / "bundle")
    assert done.returncode == BundleError.exit_code
    assert "model.safetensors: cut short" in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("name", ["manifest.json", "model.onnx", "model.data", "tokenizer.json"])
def test_a_changed_byte_anywhere_is_found(
    name: str, tiny: Callable[[str], Any], rng: np.random.Generator, tmp_path: Path
) -> None:
    """Eight places of each file, its first and last byte among them."""
    bundle = export(tiny("llama grouped").folder, tmp_path / "bundle", ExportSettings())
    file = bundle.path / name
    whole = file.read_bytes()
    places = [0, len(whole) - 1, *rng.integers(0, len(whole), 6).tolist()]
    for place in places:
        file.write_bytes(whole[:place] + bytes([whole[place] ^ 0x15]) + whole[place + 1 :])
        with pytest.raises(BundleError):
            Bundle.open(bundle.path).verify()
    file.write_bytes(whole)
    Bundle.open(bundle.path).verify()


def test_an_export_says_how_far_it_is_and_how_good_it_became(
    tiny: Callable[[str], Any], tmp_path: Path
) -> None:
    done = run_export(tiny("llama grouped").folder, tmp_path / "bundle")
    assert done.stderr.splitlines()[-1] == "exporting: all layers written, trying out"
    assert re.search(r"^perplexity [\d.]+ \(source [\d.]+\), top-1 agreement [\d.]+% over", done.stdout, re.M)
    more = ("--replace", "--json", "--context", "128")
    figures = json.loads(run_export(tiny("llama grouped").folder, tmp_path / "bundle", *more).stdout)
    assert figures["quality"]["perplexity"] > 1
    assert 0 <= figures["quality"]["top1_agreement"] <= 1
    assert figures["max_len"] == 128


@pytest.mark.parametrize("flavour", ["onnxruntime", "tensorrt"])
def test_a_shorter_context_says_the_same_up_to_its_end(
    flavour: str, tiny: Callable[[str], Any], tmp_path: Path
) -> None:
    """With rotary angles that depend on the length the model was made for, not on the bundle's."""
    folder = tiny("llama 3.1").folder
    outputs = []
    for context in (None, 96):
        settings = ExportSettings(quant="fp32", flavour=flavour, context=context)
        target = runtime_here(flavour).load(export(folder, tmp_path / f"{context}", settings))
        assert target.spec.max_len == (context or 512)
        outputs.append(target.prefill(np.arange(3, 99, dtype=np.int32)).logits)
        assert (target.max_tree_size() == 0) is (context is not None)
    np.testing.assert_array_equal(*outputs)


def test_a_context_beyond_the_model_s_is_refused(tiny: Callable[[str], Any], tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="made for 512 tokens of context, not for 513"):
        export(tiny("llama grouped").folder, tmp_path / "bundle", ExportSettings(context=513))


@pytest.mark.parametrize(
    ("flavour", "quant"),
    [(flavour, quant) for flavour, kinds in exporting.SUPPORTED.items() for quant in kinds],
)
def test_the_disk_it_takes_is_known_before(
    flavour: str, quant: str, tiny: Callable[[str], Any], tmp_path: Path
) -> None:
    """Norms and scales are left out, and the blocks of int4 weights are as small as they may be."""
    folder = tiny("llama wide").folder
    settings = ExportSettings(quant=quant, flavour=flavour)
    size = export(folder, tmp_path / "bundle", settings).manifest.files["model.data"].num_bytes
    estimate = exporting.estimate_bytes(open_source(folder).shape, settings)
    assert 0.9 * size < estimate < 1.2 * size
