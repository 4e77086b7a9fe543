"""TensorRT where there is no GPU: refused in one line, before TensorRT is touched; and with a fake of its API
and of the device (fake_tensorrt.py), every call that a target makes. Real engines run only on boards.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from starsd_edge.bundle import Bundle
from starsd_edge.decoding.roles import TargetOutput
from starsd_edge.decoding.tree import NO_PARENT, DraftTree
from starsd_edge.errors import BundleError, MissingDependencyError, ResourceError
from starsd_jetson import trt_engine, trt_target
from starsd_jetson.calibrate import measure_invariance
from starsd_jetson.cuda import Cuda, DeviceBuffer
from starsd_jetson.device_cache import DeviceCache
from starsd_jetson.export import ExportSettings, export
from starsd_jetson.self_test import run_self_test
from starsd_jetson.standard_target import StandardTarget
from starsd_jetson.trt_target import TrtTarget
from tests.jetson.fake_tensorrt import HostCuda, has_driver, install

without_gpu = pytest.mark.skipif(has_driver(), reason="there is a GPU here")


@pytest.fixture(scope="module")
def bundle(tiny: Callable[[str], Any], tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    settings = ExportSettings(quant="fp16", flavour="tensorrt")
    return export(tiny("llama grouped").folder, tmp_path_factory.mktemp("bundles") / "bundle", settings)


@without_gpu
@pytest.mark.parametrize("touch", [TrtTarget.load, trt_engine.ready_engine], ids=["load", "build"])
def test_without_a_driver_tensorrt_is_not_even_imported(bundle: Bundle, touch: Callable[..., Any]) -> None:
    """TensorRT's Builder and Runtime end the process when there is no driver."""
    with pytest.raises(MissingDependencyError, match=r"no NVIDIA driver|cannot be used") as raised:
        touch(bundle)
    assert len(str(raised.value).splitlines()) == 1
    assert "tensorrt" not in sys.modules


def test_a_bundle_for_onnx_runtime_is_refused(tiny: Callable[[str], Any], tmp_path: Path) -> None:
    other = export(tiny("llama grouped").folder, tmp_path / "bundle", ExportSettings())
    with pytest.raises(BundleError, match="made for onnxruntime"):
        TrtTarget.load(other)


def test_engines_are_kept_beside_bundles(
    bundle: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STARSD_CACHE", str(tmp_path / "cache"))
    path = trt_engine.engine_path(bundle, "10.3.0")
    assert path.parent == tmp_path / "cache" / "engines"
    assert path != trt_engine.engine_path(bundle, "10.7.0")


@pytest.mark.parametrize(("rows", "profile"), [(1, 0), (2, 1), (64, 1), (65, 2), (256, 2)])
def test_each_number_of_rows_has_its_profile(rows: int, profile: int) -> None:
    assert trt_target.profile_of(rows) == profile


@pytest.mark.parametrize(
    ("size", "rows"),
    [(1, 1), (2, 2), (4, 3), (4, 4), (8, 5), (16, 16), (32, 17), (64, 33), (64, 64), (65, 65), (256, 256)],
)
def test_trees_are_padded_to_few_sizes(size: int, rows: int) -> None:
    assert trt_target.bucket_of(rows) == size


# With the fake --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", ["8.6.2", "10.3.0", "11.4.1"])
def test_a_board_computes_what_the_exporter_recorded(
    version: str, bundle: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without ONNX Runtime, which no board that runs TensorRT needs."""
    reference = StandardTarget.load(bundle)
    tree = DraftTree(np.array([5, 6, 7, 8, 9], np.int32), np.array([NO_PARENT, 0, 0, 2, 2], np.int32), 71)
    prompt = np.arange(3, 73, dtype=np.int32)  # more than a tree's profile takes
    reference.prefill(prompt)
    expected = reference.forward(tree)
    reference.keep([0, 2, 4])
    step = DraftTree.root_only(11, 74)
    next_expected = reference.forward(step)
    install(monkeypatch, version, tmp_path / "cache")
    target = TrtTarget.load(bundle)
    run_self_test(target, bundle.manifest.self_test)
    target.prefill(prompt)
    found = target.forward(tree)
    assert expected.logits.shape == found.logits.shape
    assert expected.features.shape == found.features.shape
    np.testing.assert_allclose(expected.logits, found.logits, atol=0.02)
    np.testing.assert_allclose(expected.features, found.features, atol=0.05)
    target.keep([0, 2, 4])
    assert target.kv_len == 73
    np.testing.assert_allclose(next_expected.logits, target.forward(step).logits, atol=0.02)


def test_the_context_can_be_filled_to_its_end(
    bundle: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Padded rows of the last tree lie behind the end."""
    install(monkeypatch, "10.3.0", tmp_path / "cache")
    target = TrtTarget.load(bundle, max_len=100)
    target.prefill(np.arange(3, 100, dtype=np.int32))
    assert target.max_tree_size() == 3
    logits = target.forward(DraftTree.chain([4, 5, 6], target.kv_len + 1)).logits
    assert np.isfinite(logits).all()
    target.keep([0, 1, 2])
    assert target.max_tree_size() == 0


def test_a_shorter_context_takes_less_memory_and_the_same_engine(
    bundle: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, "10.3.0", tmp_path / "cache")
    whole, short = TrtTarget.load(bundle), TrtTarget.load(bundle, max_len=64)
    assert (bundle.manifest.max_len, 64) == (whole.spec.max_len, short.spec.max_len)
    shapes = bundle.manifest.shapes
    row = 2 * shapes.num_layers * shapes.num_kv_heads * shapes.head_dim * 2  # float16
    cache = (bundle.manifest.max_len - 256) * row  # rounded up
    assert cache <= whole.device_bytes() - short.device_bytes() <= cache + 1024  # and the mask of the past
    assert len(list((tmp_path / "cache" / "engines").glob("*.engine"))) == 1
    assert 64 == TrtTarget(bundle, short.session, 64).spec.max_len


def test_memory_that_is_not_there_is_said(
    bundle: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, "10.3.0", tmp_path / "cache")
    monkeypatch.setattr("tests.jetson.fake_tensorrt.DEVICE_BYTES", 1 << 10)
    with pytest.raises(ResourceError, match="cannot allocate"):
        TrtTarget.load(bundle)


def test_a_plan_of_another_version_is_refused_before_it_is_loaded(
    bundle: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that was copied here under the right name all the same."""
    trt = install(monkeypatch, "10.3.0", tmp_path / "cache")
    plan = trt_engine.ready_engine(bundle)
    data = plan.read_bytes()
    loaded: list[Any] = []
    monkeypatch.setattr(trt.Runtime, "deserialize_cuda_engine", lambda self, data: loaded.append(data))
    for expected, found in [
        (r"built by TensorRT 10\.7\.0\.30, this is 10\.3\.0", data[:25] + b"\x07" + data[26:]),
        ("TensorRT for RTX", b"vtrt" + data[4:]),
        ("no TensorRT engine", b"PK"),
    ]:
        plan.write_bytes(found)
        with pytest.raises(BundleError, match=expected):
            TrtTarget.load(bundle)
    assert not loaded


def test_an_engine_that_does_not_load_says_why(
    bundle: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, "10.3.0", tmp_path / "cache")
    plan = trt_engine.ready_engine(bundle)
    data = plan.read_bytes()
    plan.write_bytes(data[:27] + b"\x1f" + data[28:])  # another build of the same version: not seen before
    with pytest.raises(BundleError, match="built by another TensorRT"):
        TrtTarget.load(bundle)


def test_a_damaged_bundle_becomes_no_engine(
    bundle: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, "10.3.0", tmp_path / "cache")
    folder = shutil.copytree(bundle.path, tmp_path / "copy")
    content = bytearray((folder / "model.data").read_bytes())
    content[100] ^= 1
    (folder / "model.data").write_bytes(content)
    with pytest.raises(BundleError, match=r"model\.data is damaged"):
        TrtTarget.load(Bundle.open(folder))
    assert not list((tmp_path / "cache" / "engines").glob("*"))


def test_noise_is_measured_where_rows_are_padded(
    bundle: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, "10.3.0", tmp_path / "cache")
    target = TrtTarget.load(bundle)
    assert target.spec.invariance == measure_invariance(target)
    assert target.spec.invariance.exact_tree


def test_passes_that_come_again_are_launched_as_graphs(
    bundle: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps and trees over a past that outgrows the shapes that were captured; a tree that is larger than any
    before it takes other addresses."""
    small = [[3], [4], [5], [6, 7], [8, 9], [7, 6], [10], [11], [12], [13], [14], [15]]
    passes = [*small, list(range(3, 40)), [9]]

    def outputs(target: Any) -> list[tuple[TargetOutput, int]]:
        """Of each pass, and how many graphs were launched for it."""
        found = []
        target.prefill((np.arange(248) % 90 + 3).astype(np.int32))
        for tokens in passes:
            before = getattr(target, "cuda", HostCuda).launched
            out = target.forward(DraftTree.chain(tokens, target.kv_len + 1))
            found.append((out, getattr(target, "cuda", HostCuda).launched - before))
            target.keep([0])
        return found

    expected = outputs(StandardTarget.load(bundle))
    install(monkeypatch, "10.3.0", tmp_path / "cache")
    found = outputs(TrtTarget.load(bundle))
    for (ours, _), (other, _) in zip(expected, found, strict=True):
        np.testing.assert_allclose(ours.logits, other.logits, atol=0.02)
        np.testing.assert_allclose(ours.features, other.features, atol=0.05)
    # From the tenth on there are more than 256 rows before a pass.
    assert [0, 0, 1, 0, 0, 1, 1, 1, 1, 0, 0, 1, 0, 0] == [launched for _, launched in found]


def test_a_pass_that_cannot_be_captured_is_queued_as_ever(
    bundle: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(self: HostCuda) -> None:
        raise ResourceError("the GPU cannot capture a pass: CUDA error 900")

    monkeypatch.setattr(HostCuda, "begin_capture", refuse)
    install(monkeypatch, "10.3.0", tmp_path / "cache")
    target = TrtTarget.load(bundle)
    run_self_test(target, bundle.manifest.self_test)
    assert [record.message for record in caplog.records] == [
        "passes are queued kernel by kernel: the GPU cannot capture a pass: CUDA error 900"
    ]


# On the device --------------------------------------------------------------------------------------------


def cuda_of(kind: str) -> Any:
    if kind == "host":
        return HostCuda()
    if not has_driver():
        pytest.skip("needs a CUDA GPU")
    return Cuda()


@pytest.mark.parametrize("kind", ["host", pytest.param("device", marks=pytest.mark.gpu)])
def test_device_memory_keeps_what_it_was_given(kind: str, bundle: Bundle) -> None:
    cuda = cuda_of(kind)
    cache = DeviceCache(cuda, bundle.manifest, 8)
    assert cache.row_bytes == 64
    rows = np.arange(128, dtype=np.float32).reshape(8, 16)
    cuda.upload(rows, cache.row("k.0", 0))
    cache.length = 2
    cache.keep([0, 2, 5])
    found = np.empty_like(rows)
    cuda.download(cache.row("k.0", 0), found)
    cuda.wait()
    np.testing.assert_array_equal(found[:5], rows[[0, 1, 2, 4, 7]])
    assert cache.moved_bytes == 2 * len(cache.buffers) * 64


def test_what_could_not_be_allocated_is_not_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = HostCuda()
    monkeypatch.setattr("tests.jetson.fake_tensorrt.DEVICE_BYTES", 8)
    with pytest.raises(ResourceError):
        DeviceBuffer(cuda, 16)  # type: ignore[arg-type]
    assert not cuda.memory
