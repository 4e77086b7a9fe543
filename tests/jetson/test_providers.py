"""Providers of ONNX Runtime: the asked one computes, or one line says why not. No GPU is needed: what is
checked of CUDA is what ONNX Runtime is told, and that the same passes over addresses are right on a CPU.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnxruntime
import pytest

from starsd_edge.bundle import Bundle
from starsd_edge.cli.runtime import target_class
from starsd_edge.decoding.tree import NO_PARENT, DraftTree
from starsd_edge.errors import BundleError, MissingDependencyError, UsageError
from starsd_jetson.export import ExportSettings, export
from starsd_jetson.onnx_session import Provider, open_session
from starsd_jetson.onnx_target import OnnxTarget
from starsd_jetson.provider_targets import PROVIDER_TARGETS, CudaProviderTarget, TensorrtProviderTarget
from starsd_jetson.standard_target import StandardTarget
from starsd_jetson.trt_target import TrtTarget
from tests.jetson.fake_tensorrt import HostCuda

CPU, CUDA, TENSORRT = (provider.value for provider in Provider)


@pytest.fixture(scope="module")
def bundle(tiny: Callable[[str], Any], tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    settings = ExportSettings(quant="fp16", flavour="tensorrt")
    return export(tiny("llama grouped").folder, tmp_path_factory.mktemp("bundles") / "bundle", settings)


class FakeOrt:
    """An onnxruntime whose sessions say that they run on `loaded`; `asked` is what they were told."""

    __version__ = "1.32.0"
    SessionOptions = SimpleNamespace
    GraphOptimizationLevel = SimpleNamespace(ORT_DISABLE_ALL=0)

    def __init__(self, available: list[str], loaded: list[str]) -> None:
        self.available, self.loaded = available, loaded
        self.asked: list[tuple[str, dict[str, str]]] = []

    def get_available_providers(self) -> list[str]:
        return self.available

    def InferenceSession(self, graph: str, options: Any, providers: list[Any]) -> Any:  # noqa: N802
        self.asked = providers
        return SimpleNamespace(get_providers=lambda: self.loaded)


def install(monkeypatch: pytest.MonkeyPatch, available: list[str], loaded: list[str]) -> FakeOrt:
    fake = FakeOrt(available, loaded)
    monkeypatch.setitem(sys.modules, "onnxruntime", fake)
    return fake


@pytest.mark.parametrize("provider", [Provider.CUDA, Provider.TENSORRT])
@pytest.mark.skipif(CUDA in onnxruntime.get_available_providers(), reason="a package for GPUs is installed")
def test_a_package_without_the_provider_says_what_to_install(provider: Provider, bundle: Bundle) -> None:
    with pytest.raises(
        MissingDependencyError, match=r"has no (CUDA|Tensorrt), only .*CPU.*\[gpu\]"
    ) as raised:
        open_session(bundle.graph_path, None, provider)
    assert len(str(raised.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("provider", "loaded"),
    [
        (Provider.CUDA, [CPU]),
        (Provider.TENSORRT, [CPU]),
        (Provider.TENSORRT, [CUDA, CPU]),
        (Provider.CPU, [CUDA, CPU]),
        (Provider.CPU, []),
    ],
)
def test_another_provider_in_the_place_of_the_asked_one_is_no_session(
    provider: Provider, loaded: list[str], bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ONNX Runtime goes on without a provider whose libraries it does not find, and only logs it."""
    install(monkeypatch, [TENSORRT, CUDA, CPU], loaded)
    with pytest.raises(MissingDependencyError, match="does not load here; instead it would run on") as raised:
        open_session(bundle.graph_path, None, provider)
    assert len(str(raised.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("provider", "loaded"),
    [(Provider.CPU, [CPU]), (Provider.CUDA, [CUDA, CPU]), (Provider.TENSORRT, [TENSORRT, CUDA, CPU])],
)
def test_the_asked_provider_comes_first_and_has_its_options(
    provider: Provider, loaded: list[str], bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = install(monkeypatch, [TENSORRT, CUDA, CPU], loaded)
    open_session(bundle.graph_path, None, provider, {"device_id": "0"})
    assert [(name, {}) for name in loaded[1:]] == fake.asked[1:]
    assert (loaded[0], {"device_id": "0"}) == fake.asked[0]


def test_the_tensorrt_provider_is_told_the_bounds_of_every_input(
    bundle: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STARSD_CACHE", str(tmp_path))
    options = TensorrtProviderTarget.options(bundle)
    least, most = options["trt_profile_min_shapes"].split(","), options["trt_profile_max_shapes"].split(",")
    session = onnxruntime.InferenceSession(str(bundle.graph_path), providers=[CPU])
    assert {value.name for value in session.get_inputs()} == {entry.split(":")[0] for entry in least}
    assert {"tokens:1", "mask:1x1", "k.0:0x2x16"} <= set(least)
    assert {"tokens:256", "mask:256x256", "logit_rows:64", "v.2:511x2x16"} <= set(most)
    assert Path(options["trt_engine_cache_path"]).is_dir()


def test_int4_is_no_work_for_the_cuda_provider(
    bundle: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STARSD_CACHE", str(tmp_path))
    int4 = replace(bundle, manifest=replace(bundle.manifest, quantisation="int4"))
    with pytest.raises(BundleError, match="--provider tensorrt"):
        CudaProviderTarget.options(int4)
    assert TensorrtProviderTarget.options(int4)["trt_fp16_enable"] == "True"


class OnThisMachine(CudaProviderTarget):
    """The same passes over addresses, which are those of this process."""

    provider = Provider.CPU
    device = "cpu"

    @classmethod
    def options(cls, bundle: Bundle) -> dict[str, str]:
        return {}


def test_passes_over_addresses_say_what_passes_over_arrays_do(
    bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("starsd_jetson.provider_targets.Cuda", HostCuda)
    reference, target = StandardTarget.load(bundle), OnThisMachine.load(bundle, max_len=100)
    assert target.spec.max_len == 100
    tree = DraftTree(np.array([5, 6, 7, 8, 9], np.int32), np.array([NO_PARENT, 0, 0, 2, 2], np.int32), 71)
    step = DraftTree.root_only(11, 74)
    outputs = []
    for each in (reference, target):
        each.prefill(np.arange(3, 73, dtype=np.int32))
        first = each.forward(tree)
        each.keep([0, 2, 4])
        outputs.append((first, each.forward(step)))
    for expected, found in zip(*outputs, strict=True):
        np.testing.assert_allclose(expected.logits, found.logits, atol=0.02)
        np.testing.assert_allclose(expected.features, found.features, atol=0.05)
    assert target.device_bytes() > 0


def test_a_provider_is_chosen_for_the_graph_that_it_takes(bundle: Bundle) -> None:
    manifest = bundle.manifest
    assert TrtTarget is target_class(manifest)
    for name, chosen in PROVIDER_TARGETS.items():
        assert chosen is target_class(manifest, name)
    cpu = replace(manifest, flavour="onnxruntime")
    assert OnnxTarget is target_class(cpu) is target_class(cpu, "cpu")
    with pytest.raises(UsageError, match="export the model --for tensorrt"):
        target_class(cpu, "cuda")
