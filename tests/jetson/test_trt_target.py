"""TensorRT where there is no GPU: refused in one line, before TensorRT is touched. Engines run only on
boards.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from starsd_edge.bundle import Bundle
from starsd_edge.errors import BundleError, MissingDependencyError
from starsd_jetson import trt_target
from starsd_jetson.cuda import Cuda
from starsd_jetson.export import ExportSettings, export
from starsd_jetson.trt_target import TrtTarget


def has_driver() -> bool:
    try:
        return ctypes.CDLL("libcuda.so.1").cuInit(0) == 0
    except OSError:
        return False


without_gpu = pytest.mark.skipif(has_driver(), reason="there is a GPU here")


@pytest.fixture
def bundle(tiny: Callable[[str], Any], tmp_path: Path) -> Bundle:
    return export(
        tiny("llama grouped").folder, tmp_path / "bundle", ExportSettings(quant="fp16", flavour="tensorrt")
    )


@without_gpu
def test_without_a_driver_tensorrt_is_not_even_imported(bundle: Bundle) -> None:
    """TensorRT's Runtime ends the process when there is no driver."""
    with pytest.raises(MissingDependencyError, match=r"no NVIDIA driver|cannot be used") as raised:
        TrtTarget.load(bundle)
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
    path = trt_target.engine_path(bundle, "10.3.0")
    assert path.parent == tmp_path / "cache" / "engines"
    assert path != trt_target.engine_path(bundle, "10.7.0")


@pytest.mark.parametrize(("rows", "profile"), [(1, 0), (2, 1), (64, 1), (65, 2), (256, 2)])
def test_each_number_of_rows_has_its_profile(rows: int, profile: int) -> None:
    assert trt_target.profile_of(rows) == profile


@pytest.mark.gpu
@pytest.mark.skipif(not has_driver(), reason="needs a CUDA GPU")
def test_device_memory_keeps_what_it_was_given() -> None:
    import numpy as np

    from starsd_jetson.trt_target import DeviceCache

    cuda = Cuda()
    cache = DeviceCache(cuda, ["k.0"], 8, 16)
    rows = np.arange(32, dtype=np.float32).reshape(8, 4)
    cuda.upload(rows, cache.row("k.0", 0))
    cache.length = 2
    cache.keep([0, 2, 5])
    found = np.empty_like(rows)
    cuda.download(cache.row("k.0", 0), found)
    cuda.wait()
    np.testing.assert_array_equal(found[:5], rows[[0, 1, 2, 4, 7]])
