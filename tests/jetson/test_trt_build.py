"""Engines: sniffed, keyed, refused with a reason; built by the real builder of tensorrt-rtx where it is
installed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from starsd_edge.bundle import Bundle
from starsd_edge.errors import BundleError, ResourceError
from starsd_jetson import trt_build
from starsd_jetson.export import ExportSettings, export
from starsd_jetson.trt_plan import EngineKey, explain, read_header


def test_a_plan_says_which_tensorrt_built_it() -> None:
    assert read_header(b"ftrt" + bytes(20) + bytes([10, 3, 0, 30])).version == "10.3.0.30"


@pytest.mark.parametrize(
    ("expected", "data"),
    [
        ("TensorRT for RTX", b"vtrt" + bytes(24)),
        ("no TensorRT engine", b"PK\x03\x04" + bytes(24)),
        ("no TensorRT engine", b"ftrt" + bytes(4)),
        ("no TensorRT engine", b""),
    ],
)
def test_other_files_are_refused_before_they_are_loaded(expected: str, data: bytes) -> None:
    with pytest.raises(BundleError, match=expected):
        read_header(data)


def test_an_engine_is_kept_under_everything_it_depends_on() -> None:
    key = EngineKey("a", "b", "p3701-0005", "36.4", "10.3.0.30", 4096)
    others = [
        replace(key, graph_sha256="x"),
        replace(key, data_sha256="x"),
        replace(key, module="p3767-0003"),
        replace(key, release="36.5"),
        replace(key, tensorrt="10.7.0"),
        replace(key, max_len=2048),
    ]
    assert len({entry.file_name() for entry in [key, *others]}) == 7


@pytest.mark.parametrize(
    ("expected", "log"),
    [
        (
            "built by another TensorRT",
            "Error Code 1: Serialization (Serialization assertion stdVersionRead == "
            "kSERIALIZATION_VERSION failed.Version tag does not match. Note: Current "
            "Version: 240, Serialized Engine Version: 239)",
        ),
        (
            "built by another TensorRT",
            "6: The engine plan file is not compatible with this version of TensorRT, "
            "expecting library version 8.0.0 got 8.0.1, please rebuild.",
        ),
        (
            "another kind of GPU",
            "6: The engine plan file is generated on an incompatible device, "
            "expecting compute 8.6 got compute 7.5",
        ),
        (
            "not enough GPU memory",
            "Requested amount of GPU memory (1073741824 bytes) could not be allocated.",
        ),
        (
            "built by another TensorRT",
            "Error Code 1: Serialization (Serialization assertion stdVersionRead == "
            "serializationVersion failed.Version tag does not match. Note: Current "
            "Version: 232, Serialized Engine Version: 213)",
        ),
        (
            "built by another TensorRT",
            "[stdArchiveReader.cpp::StdArchiveReader::35] Error Code 1: Serialization (Serialization "
            "assertion safeVersionRead == safeSerializationVersion failed.Version tag does not match.)",
        ),
        (
            "no engine of this TensorRT",
            "Serialization assertion header.magicTag == kEXPECTED_MAGIC_TAG failed.Trying to load an engine "
            "created with incompatible serialization version (0).",
        ),
        (
            "another kind of GPU",
            "Using an engine plan file across different models of devices is not recommended and is likely "
            "to affect performance or even cause errors.",
        ),
        (
            "cannot load the engine",
            "4: [runtime.cpp::deserializeCudaEngine::50] Error Code 4: Internal Error (Engine "
            "deserialization failed.)",
        ),
        (
            "cannot load the engine",
            "AttributeError: 'NoneType' object has no attribute 'create_execution_context'",
        ),
        ("not enough GPU memory", "[TRT] [E] 2: [virtualMemoryBuffer.cpp] Error Code 2: OutOfMemory"),
        ("not enough GPU memory", "NvMapMemHandleAlloc: error 0"),
        ("not enough GPU memory", "cudaMalloc failed: out of memory"),
        ("no code for this board", "CUDA failure 209: cudaErrorNoKernelImageForDevice"),
        ("groups video and render", "cuInit(0)=999"),
        ("groups video and render", "cudaGetDeviceCount returned 100 -> no CUDA-capable device is detected"),
        ("apt install python3-libnvinfer", "ModuleNotFoundError: No module named 'tensorrt'"),
        (
            "apt install python3-libnvinfer",
            "ImportError: libnvonnxparser.so.11: cannot open shared object file: No such file or directory",
        ),
        ("nvidia-jetpack", "/usr/src/tensorrt/bin/trtexec: No such file or directory"),
        (
            "this is a bug",
            "4: Network has dynamic or shape inputs, but no optimization profile has been defined.",
        ),
        ("symmetric int4 only", "TensorRT only supports symmetric quantization"),
        ("not enough GPU memory", "NvMapMemAllocInternalTagged: 1075072515 error 12"),
        ("groups video and render", "NvRmMemInitNvmap failed with Permission denied"),
        ("no NVIDIA driver", "cudaError 35: CUDA driver version is insufficient for CUDA runtime version"),
        ("disk is full", "OSError: [Errno 28] No space left on device"),
        ("something new", "first line\nsomething new\n"),
        ("no reason", ""),
    ],
)
def test_every_known_failure_is_one_clear_line(expected: str, log: str) -> None:
    line = explain(log)
    assert expected in line
    assert "\n" not in line


def test_a_build_that_cannot_fit_is_refused_first(
    tiny: Callable[[str], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = make_bundle(tiny, tmp_path)
    monkeypatch.setattr(trt_build, "available_memory", lambda: 1 << 10)
    with pytest.raises(ResourceError, match="memory and swap"):
        trt_build.check_room(bundle, tmp_path)
    monkeypatch.setattr(trt_build.shutil, "disk_usage", lambda folder: SimpleNamespace(free=1 << 10))
    with pytest.raises(ResourceError, match="of disk"):
        trt_build.check_room(bundle, tmp_path)


def make_bundle(tiny: Callable[[str], Any], tmp_path: Path, quant: str = "fp16") -> Bundle:
    settings = ExportSettings(quant=quant, flavour="tensorrt")
    return export(tiny("llama grouped").folder, tmp_path / quant, settings)


@pytest.mark.parametrize("quant", ["fp16", "int4"])
def test_the_builder_takes_every_profile(quant: str, tiny: Callable[[str], Any], tmp_path: Path) -> None:
    """With the public wheel of TensorRT for RTX, which builds without a GPU; skipped where it is missing."""
    trt = pytest.importorskip("tensorrt_rtx", reason="pip install tensorrt-rtx")
    bundle = make_bundle(tiny, tmp_path, quant)
    said: list[str] = []
    trt_build.build_engine(trt, bundle, tmp_path / "model.engine", said.append)
    assert (tmp_path / "model.engine").read_bytes()[:4] == b"vtrt"
    assert said
    assert all(line.startswith("building the engine, once: ") for line in said)


def test_a_graph_that_is_refused_says_why(tiny: Callable[[str], Any], tmp_path: Path) -> None:
    trt = pytest.importorskip("tensorrt_rtx", reason="pip install tensorrt-rtx")
    bundle = make_bundle(tiny, tmp_path)
    bundle.graph_path.write_bytes(b"no graph")
    with pytest.raises(BundleError, match="refuses the graph"):
        trt_build.build_plan(trt, bundle)
