"""The tensorrt flavour on a GPU through ONNX Runtime: its CUDA provider, or its TensorRT provider, which
builds engines of its own. For laptops and workstations; a board has TensorRT itself (trt_target.py).

The cache stays on the device, as addresses that a pass is bound to. Not yet run on a GPU: docs/tensorrt.md
lists what is open.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from starsd_edge.bundle import Bundle
from starsd_edge.config import cache_dir
from starsd_edge.decoding.roles import Invariance, TargetOutput, TargetSpec
from starsd_edge.errors import BundleError
from starsd_edge.types import BoolArray, TokenArray
from starsd_jetson.calibrate import measure_invariance
from starsd_jetson.context import MAX_TREE_SIZE, ContextTarget, granted_len
from starsd_jetson.cuda import Cuda
from starsd_jetson.device_cache import DeviceCache, cache_names, value_type
from starsd_jetson.onnx_session import Provider, open_session, share
from starsd_jetson.standard_target import StandardTarget, graph_inputs, graph_outputs
from starsd_jetson.trt_build import PREFILL_ROWS, TYPICAL_PAST

__all__ = ["PROVIDER_TARGETS", "CudaProviderTarget", "ProviderSession", "TensorrtProviderTarget"]


class ProviderSession:
    """A loaded graph and the device that its contexts keep their caches on."""

    def __init__(self, cuda: Cuda, session: Any, free_bytes: int) -> None:
        self.cuda = cuda
        self.session = session
        self.free_bytes = free_bytes


class CudaProviderTarget(ContextTarget):
    """A roles.Target over one context of one bundle of flavour tensorrt."""

    flavour = "tensorrt"
    uses_threads = False
    prefill_chunk = PREFILL_ROWS
    provider: ClassVar[Provider] = Provider.CUDA
    device: ClassVar[str] = "cuda"  # as ONNX Runtime calls the place of the cache

    def __init__(self, bundle: Bundle, session: ProviderSession, max_len: int | None = None) -> None:
        manifest, shapes = bundle.manifest, bundle.manifest.shapes
        self.bundle = bundle
        self.session = session
        self.cuda = session.cuda
        self.dtype = value_type(manifest)
        length = granted_len(bundle, max_len)
        self.cache = DeviceCache(self.cuda, manifest, length)
        spec = TargetSpec(shapes.vocab_size, shapes.feature_size, length, Invariance(bitwise=False))
        super().__init__(spec, self.cache)
        self.spec = replace(self.spec, invariance=measure_invariance(self))

    @classmethod
    def open(cls, bundle: Bundle, threads: int | None, max_len: int | None) -> CudaProviderTarget:
        """Raises MissingDependencyError where the provider does not load, BundleError for weights that it
        cannot compute with."""
        cuda = Cuda()
        free_bytes = cuda.free_bytes()
        session = open_session(bundle.graph_path, None, cls.provider, cls.options(bundle))
        return cls(bundle, ProviderSession(cuda, session, free_bytes), max_len)

    @classmethod
    def options(cls, bundle: Bundle) -> dict[str, str]:
        """Of the provider."""
        if bundle.manifest.quantisation == "int4":
            # It has no kernel for them: the CPU would unpack all weights in every pass.
            raise BundleError(
                f"{bundle.path}: ONNX Runtime's CUDA provider has no int4; "
                "use --provider tensorrt, or export with --quant fp16"
            )
        return {"device_id": "0"}

    def device_bytes(self) -> int:
        return max(0, self.session.free_bytes - self.cuda.free_bytes())

    def run(
        self, tokens: TokenArray, positions: NDArray[Any], mask: BoolArray, logit_rows: NDArray[np.int64]
    ) -> TargetOutput:
        start, rows = self.cache.length, len(tokens)
        shapes = self.bundle.manifest.shapes
        inputs = graph_inputs(tokens, positions, mask, logit_rows, start, self.dtype)
        outputs = graph_outputs(rows, len(logit_rows), shapes, self.dtype)
        binding = self.session.session.io_binding()
        for name, array in inputs.items():
            binding.bind_cpu_input(name, array)
        for name, array in outputs.items():
            binding.bind_ortvalue_output(name, share(array))
        row = (shapes.num_kv_heads, shapes.head_dim)
        place = (self.device, 0, self.dtype)
        for name in self.cache.buffers:
            binding.bind_input(name, *place, (start, *row), self.cache.row(name, 0))
            binding.bind_output(f"{name}.new", *place, (rows, *row), self.cache.row(name, start))
        self.cuda.wait()  # rows of a kept path are moved on a stream that ONNX Runtime does not know
        self.session.session.run_with_iobinding(binding)
        binding.synchronize_outputs()
        return TargetOutput(outputs["logits"], outputs["features"])


class TensorrtProviderTarget(CudaProviderTarget):
    """The same through TensorRT; what it cannot take runs on CUDA. Engines are built at the first load."""

    provider = Provider.TENSORRT

    @classmethod
    def options(cls, bundle: Bundle) -> dict[str, str]:
        folder = cache_dir() / "engines" / f"provider-{bundle.manifest.files['model.onnx'].sha256[:32]}"
        folder.mkdir(parents=True, exist_ok=True)
        least, typical, most = (profile(bundle, *sizes) for sizes in profile_sizes(bundle.manifest.max_len))
        return {
            "device_id": "0",
            "trt_fp16_enable": str(bundle.manifest.quantisation != "fp32"),
            "trt_engine_cache_enable": "True",
            "trt_engine_cache_path": str(folder),
            "trt_timing_cache_enable": "True",
            "trt_timing_cache_path": str(folder),
            "trt_profile_min_shapes": least,
            "trt_profile_opt_shapes": typical,
            "trt_profile_max_shapes": most,
        }


def profile_sizes(max_len: int) -> list[tuple[int, int, int]]:
    """(rows, rows of logits, past rows): fewest, typical, most."""
    most_past = max_len - 1
    return [(1, 1, 0), (8, 8, min(TYPICAL_PAST, most_past)), (PREFILL_ROWS, MAX_TREE_SIZE, most_past)]


def profile(bundle: Bundle, rows: int, logit_rows: int, past: int) -> str:
    """`name:2x3,other:4`, every input."""
    shapes = bundle.manifest.shapes
    sizes = {"tokens": f"{rows}", "positions": f"{rows}", "mask": f"{rows}x{rows}"}
    sizes |= {"past_mask": f"{past}", "logit_rows": f"{logit_rows}"}
    cached = f"{past}x{shapes.num_kv_heads}x{shapes.head_dim}"
    sizes |= dict.fromkeys(cache_names(shapes.num_layers), cached)
    return ",".join(f"{name}:{size}" for name, size in sizes.items())


PROVIDER_TARGETS: dict[str, type[ContextTarget]] = {
    "cpu": StandardTarget,
    "cuda": CudaProviderTarget,
    "tensorrt": TensorrtProviderTarget,
}
