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
from tests.jetson.fake_tensorrt import Config, make_tensorrt


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


FAILURES = [
    tuple(line.split("\t"))
    for line in (Path(__file__).parent / "board_failures.txt").read_text("utf-8").splitlines()
    if not line.startswith("#")
]


@pytest.mark.parametrize(
    ("expected", "log"), [*FAILURES, ("something new", "first line\nsomething new\n"), ("no reason", "")]
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


# The build code itself, against what the API of each version has (fake_tensorrt.py) ----------------------


@pytest.mark.parametrize(
    ("version", "flags", "types"),
    [("8.6.2", 1 << 0, {0}), ("10.3.0", 1 << 1, set()), ("11.4.1", 1 << 0, set())],
    ids=["8.6: weakly typed, told to use float16", "10: strongly typed", "11: always strongly typed"],
)
def test_a_float16_graph_is_built_in_float16(
    version: str, flags: int, types: set[int], tiny: Callable[[str], Any], tmp_path: Path
) -> None:
    trt = make_tensorrt(version)
    networks = []
    create = trt.Builder.create_network
    trt.Builder.create_network = lambda self, kind: networks.append(create(self, kind)) or networks[-1]
    trt_build.build_engine(trt, make_bundle(tiny, tmp_path), tmp_path / "model.engine")
    assert [network.flags for network in networks] == [flags]
    assert Config.made.flags == types
    assert len(Config.made.profiles) == len(trt_build.ROW_BOUNDS)
    assert str(read_header((tmp_path / "model.engine").read_bytes()).version) == f"{version}.30"


@pytest.mark.parametrize("version", ["8.6.2", "10.3.0", "11.4.1"])
def test_int4_needs_the_parser_of_10(version: str, tiny: Callable[[str], Any], tmp_path: Path) -> None:
    trt, bundle = make_tensorrt(version), make_bundle(tiny, tmp_path, "int4")
    if version.startswith("8."):
        with pytest.raises(BundleError, match=r"int4 needs TensorRT 10 .* this is 8\.6\.2; .*--quant fp16"):
            trt_build.build_plan(trt, bundle)
    else:
        assert trt_build.build_plan(trt, bundle)
        assert not Config.made.flags


@pytest.mark.parametrize(("version", "tells"), [("8.6.2", False), ("10.3.0", True), ("11.4.1", True)])
def test_a_build_tells_how_far_it_is_where_tensorrt_does(
    version: str, tells: bool, tiny: Callable[[str], Any], tmp_path: Path
) -> None:
    said: list[str] = []
    trt_build.build_plan(make_tensorrt(version), make_bundle(tiny, tmp_path), None, said.append)
    assert bool(said) is tells


def test_a_second_build_starts_from_the_timings_of_the_first(
    tiny: Callable[[str], Any], tmp_path: Path
) -> None:
    trt, bundle = make_tensorrt("10.3.0"), make_bundle(tiny, tmp_path)
    for expected in (b"", b"timings"):
        trt_build.build_engine(trt, bundle, tmp_path / "model.engine")
        assert Config.made.timings == expected
