"""The target on TensorRT: past rows are addresses into preallocated buffers, new rows are written behind
them.

Not yet run on a board: what could be checked without one is the graph (on ONNX Runtime,
standard_target.py), the build (with TensorRT for RTX) and the types. docs/tensorrt.md lists what is open.
"""

from __future__ import annotations

import platform
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import numpy as np
from numpy.typing import NDArray

from starsd_edge.board import BoardSources, read_board
from starsd_edge.bundle import Bundle
from starsd_edge.config import cache_dir
from starsd_edge.decoding.roles import Invariance, TargetOutput, TargetSpec
from starsd_edge.errors import BundleError
from starsd_edge.types import BoolArray, TokenArray
from starsd_jetson.calibrate import measure_invariance
from starsd_jetson.context import MAX_TREE_SIZE, ContextTarget
from starsd_jetson.cuda import Cuda, DeviceBuffer
from starsd_jetson.trt_build import PREFILL_ROWS, build_engine, collecting_logger, import_tensorrt
from starsd_jetson.trt_plan import HEADER_BYTES, EngineKey, explain, read_header

__all__ = ["DeviceCache", "TrtTarget", "ready_engine"]

STEP_PROFILE, TREE_PROFILE, PREFILL_PROFILE = range(3)  # the order of trt_build.ROW_BOUNDS


class DeviceCache:
    """Keys and values [max_len, n_kv, dim] of every layer, on the device."""

    def __init__(self, cuda: Cuda, names: list[str], max_len: int, row_bytes: int) -> None:
        self.cuda = cuda
        self.row_bytes = row_bytes
        self.buffers = {name: DeviceBuffer(cuda, max_len * row_bytes) for name in names}
        self.length = 0

    def reserve(self, rows: int) -> bool:
        return False  # all of it is there

    def row(self, name: str, index: int) -> int:
        return self.buffers[name].address + index * self.row_bytes

    def keep(self, path: list[int]) -> None:
        """Rows only ever move towards the front, so moving them in order loses none."""
        for name in self.buffers:
            for target, node in enumerate(path):
                if node != target:
                    rows = self.row(name, self.length + node), self.row(name, self.length + target)
                    self.cuda.move(*rows, self.row_bytes)
        self.length += len(path)

    def truncate(self, length: int) -> None:
        self.length = min(self.length, length)


class TrtTarget(ContextTarget):
    """A roles.Target over one context of one bundle of flavour tensorrt."""

    flavour = "tensorrt"
    prefill_chunk = PREFILL_ROWS

    def __init__(self, bundle: Bundle, session: TrtSession) -> None:
        manifest, shapes = bundle.manifest, bundle.manifest.shapes
        self.bundle = bundle
        self.session = session
        self.cuda = session.cuda
        self.dtype: Any = np.float32 if manifest.quantisation == "fp32" else np.float16
        names = [f"{kind}.{layer}" for layer in range(shapes.num_layers) for kind in "kv"]
        row_bytes = shapes.num_kv_heads * shapes.head_dim * np.dtype(self.dtype).itemsize
        self.cache = DeviceCache(self.cuda, names, manifest.max_len, row_bytes)
        self.staging: dict[str, DeviceBuffer] = {}
        spec = TargetSpec(shapes.vocab_size, shapes.feature_size, manifest.max_len, Invariance(bitwise=False))
        super().__init__(spec, self.cache)
        self.spec = replace(self.spec, invariance=measure_invariance(self))

    @classmethod
    def open(cls, bundle: Bundle, threads: int | None) -> TrtTarget:
        """Build the engine on first use and load it. `threads` is of no use here.

        Raises MissingDependencyError without a GPU or TensorRT, BundleError and ResourceError as the build
        does.
        """
        return cls(bundle, open_session(bundle))

    def run(
        self, tokens: TokenArray, positions: NDArray[Any], mask: BoolArray, logit_rows: NDArray[np.int64]
    ) -> TargetOutput:
        start, rows = self.cache.length, len(tokens)
        shapes = self.bundle.manifest.shapes
        context = self.session.contexts[profile_of(rows)]
        hidden = np.where(mask, 0, np.finfo(self.dtype).min)  # not -inf: a float16 softmax makes NaN of it
        inputs = {
            "tokens": np.ascontiguousarray(tokens, np.int32),
            "positions": np.ascontiguousarray(positions, np.int32),
            "mask": np.ascontiguousarray(hidden, self.dtype),
            "logit_rows": np.ascontiguousarray(logit_rows, np.int32),
        }
        outputs = {
            "logits": np.empty((len(logit_rows), shapes.vocab_size), np.float32),
            "features": np.empty((rows, shapes.feature_size), self.dtype),
        }
        for name, array in inputs.items():
            address = self.staged(name, array.nbytes)
            self.cuda.upload(array, address)
            context.set_input_shape(name, array.shape)
            context.set_tensor_address(name, address)
        for name, array in outputs.items():
            context.set_tensor_address(name, self.staged(name, array.nbytes))
        for name in self.cache.buffers:
            context.set_input_shape(name, (start, shapes.num_kv_heads, shapes.head_dim))
            context.set_tensor_address(name, self.cache.row(name, 0))
            context.set_tensor_address(f"{name}.new", self.cache.row(name, start))
        if not context.execute_async_v3(self.cuda.stream):
            raise BundleError(f"{self.bundle.path}: TensorRT refused a pass over {rows} rows after {start}")
        for name, array in outputs.items():
            self.cuda.download(self.staged(name, array.nbytes), array)
        self.cuda.wait()
        return TargetOutput(outputs["logits"], outputs["features"])

    def staged(self, name: str, num_bytes: int) -> int:
        """Address of a device buffer for an input or output; kept, and larger when it must be."""
        buffer = self.staging.get(name)
        if buffer is None or buffer.num_bytes < num_bytes:
            buffer = self.staging[name] = DeviceBuffer(self.cuda, num_bytes)
        return buffer.address


class TrtSession:
    """An engine and one execution context a profile; contexts of one session take turns."""

    def __init__(self, cuda: Cuda, engine: Any) -> None:
        self.cuda = cuda
        self.engine = engine
        self.contexts = []
        for index in range(PREFILL_PROFILE + 1):
            context = engine.create_execution_context()
            context.set_optimization_profile_async(index, cuda.stream)
            self.contexts.append(context)
        cuda.wait()


def profile_of(rows: int) -> int:
    if rows == 1:
        return STEP_PROFILE
    return TREE_PROFILE if rows <= MAX_TREE_SIZE else PREFILL_PROFILE


def open_session(bundle: Bundle) -> TrtSession:
    cuda = Cuda()  # first: TensorRT without a driver ends the process
    path = ready_engine(bundle)
    trt = import_tensorrt()
    data = path.read_bytes()
    read_header(data[:HEADER_BYTES])
    logger = collecting_logger(trt)
    engine = trt.Runtime(logger).deserialize_cuda_engine(data)
    if engine is None:
        raise BundleError(f"{path}: {explain(logger.text())}")
    return TrtSession(cuda, engine)


def ready_engine(bundle: Bundle) -> Path:
    """The file of the bundle's engine for this device; built now where it is not there yet.

    Raises MissingDependencyError without TensorRT, BundleError and ResourceError as the build does.
    """
    trt = import_tensorrt()
    path = engine_path(bundle, str(trt.__version__))
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        build_engine(trt, bundle, path, lambda line: click.echo(line, err=True))
    return path


def engine_path(bundle: Bundle, version: str) -> Path:
    """Engines lie beside the cache's bundles, never in one: a bundle holds what was exported and nothing
    else.
    """
    files = bundle.manifest.files
    board = read_board(
        BoardSources(
            tegra_release=read_text("/etc/nv_tegra_release"),
            compatible=read_text("/proc/device-tree/compatible"),
        )
    )
    key = EngineKey(
        graph_sha256=files["model.onnx"].sha256,
        data_sha256=files["model.data"].sha256,
        module=board.module or platform.node(),
        release=board.l4t or platform.release(),
        tensorrt=version,
        max_len=bundle.manifest.max_len,
    )
    return cache_dir() / "engines" / key.file_name()


def read_text(path: str) -> str:
    try:
        return Path(path).read_text("utf-8", "replace").replace("\0", "\n")
    except OSError:
        return ""
