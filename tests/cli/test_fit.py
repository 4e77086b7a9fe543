"""A model that does not fit is refused before it is loaded."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from starsd_edge.bundle import Bundle
from starsd_edge.cli.fit import Needs, available_bytes, check_fits, needs_of
from starsd_edge.errors import ResourceError
from starsd_jetson.export import ExportSettings
from starsd_jetson.trial import runtime_here
from tests.cli.tiny_bundle import make_bundle

GB = 10**9
VICUNA = Needs(
    weight_bytes=int(13.48 * GB), kv_bytes_per_token=2 * 32 * 32 * 128 * 4, num_weights=int(6.74e9)
)


def test_a_model_that_fits_keeps_its_context() -> None:
    assert 2048 == check_fits("vicuna", VICUNA, 2048, 32 * GB)
    assert 2048 == check_fits("vicuna", VICUNA, 2048, None)


def test_a_context_that_does_not_fit_is_shortened() -> None:
    assert 512 <= check_fits("vicuna", VICUNA, 4096, 15 * GB) < 4096


@pytest.mark.parametrize(
    ("advice", "free_bytes"),
    [
        ("--quant int8 would fit", 9 * GB),
        ("--quant int4 would fit", 6 * GB),
        ("billion weights would fit with --quant int4", 3 * GB),
        ("no model fits", GB // 4),
    ],
)
def test_what_would_fit_is_said(advice: str, free_bytes: int) -> None:
    with pytest.raises(ResourceError, match=advice) as caught:
        check_fits("vicuna", VICUNA, 2048, free_bytes)
    assert "vicuna needs 14.3 GB" in str(caught.value)


@given(free_bytes=st.integers(0, 64 * GB), wanted=st.integers(1, 10**5))
def test_what_is_promised_fits(free_bytes: int, wanted: int) -> None:
    try:
        context = check_fits("vicuna", VICUNA, wanted, free_bytes)
    except ResourceError:
        return
    assert 0 < context <= wanted
    assert VICUNA.weight_bytes + context * VICUNA.kv_bytes_per_token <= free_bytes


def test_memory_is_read_from_the_system(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:       16303412 kB\nMemAvailable:    9000000 kB\n")
    assert 9000000 * 1024 == available_bytes(meminfo)
    assert available_bytes(tmp_path / "missing") is None


@pytest.mark.parametrize(
    ("value_bytes", "settings"),
    [
        (2, ExportSettings(quant="fp16", flavour="tensorrt", chat_template="chatml")),
        (4, ExportSettings(quant="fp32", flavour="tensorrt", chat_template="chatml")),
        (4, ExportSettings(quant="int8", chat_template="chatml")),
    ],
    ids=["TensorRT", "TensorRT, fp32", "ONNX Runtime"],
)
def test_the_cache_is_counted_as_the_runtime_keeps_it(
    value_bytes: int, settings: ExportSettings, tmp_path: Path
) -> None:
    bundle = Bundle.open(make_bundle(tmp_path, settings))
    target = runtime_here(settings.flavour).load(bundle, 1, 64)
    buffers = target.cache.buffers.values()
    assert {value_bytes} == {buffer.itemsize for buffer in buffers}
    tokens = 64 if settings.flavour == "tensorrt" else target.cache.capacity
    assert sum(buffer.nbytes for buffer in buffers) == tokens * needs_of(bundle.manifest).kv_bytes_per_token
