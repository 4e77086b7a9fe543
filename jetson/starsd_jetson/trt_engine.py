"""Engines of this very device: where they are kept, built when missing, looked at and then loaded."""

from __future__ import annotations

import mmap
import platform
from pathlib import Path
from typing import TYPE_CHECKING

import click

from starsd_edge.board import BoardSources, read_board
from starsd_edge.bundle import Bundle
from starsd_edge.config import cache_dir
from starsd_edge.errors import BundleError
from starsd_jetson.cuda import Cuda, initialise_driver
from starsd_jetson.trt_build import ROW_BOUNDS, build_engine, collecting_logger, import_tensorrt
from starsd_jetson.trt_plan import EngineKey, check_plan, explain

if TYPE_CHECKING:  # every call is checked where its stubs are: `make types`
    import tensorrt

__all__ = ["TrtSession", "engine_path", "open_session", "ready_engine"]


class TrtSession:
    """An engine and one execution context a profile; contexts of one session take turns.

    free_bytes  of the GPU's memory, before the engine was loaded
    """

    def __init__(
        self, cuda: Cuda, runtime: tensorrt.Runtime, engine: tensorrt.ICudaEngine, free_bytes: int
    ) -> None:
        self.cuda = cuda
        self.runtime = runtime  # an engine must not outlive it
        self.engine = engine
        self.free_bytes = free_bytes
        self.contexts = []
        for index in range(len(ROW_BOUNDS)):
            context = engine.create_execution_context()
            if context is None:
                raise BundleError("TensorRT has no memory for an execution context; stop other programs")
            context.set_optimization_profile_async(index, cuda.stream)
            self.contexts.append(context)
        cuda.wait()

    def taken_bytes(self) -> int:
        """Of the GPU's memory, since before the engine was loaded; on a board that is the system's memory."""
        return max(0, self.free_bytes - self.cuda.free_bytes())


def open_session(bundle: Bundle) -> TrtSession:
    """The bundle's engine, built if need be. Raises as `ready_engine`, and BundleError for one that does not
    load."""
    cuda = Cuda()  # first: TensorRT without a driver ends the process
    path = ready_engine(bundle)
    trt = import_tensorrt()
    check_plan(path, str(trt.__version__))
    free_bytes = cuda.free_bytes()
    logger = collecting_logger(trt)
    runtime: tensorrt.Runtime = trt.Runtime(logger)
    # Mapped, not read: of the file nothing stays in memory beside the engine.
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as plan:
        engine = runtime.deserialize_cuda_engine(plan)
    if engine is None:
        raise BundleError(f"{path}: {explain(logger.text())}")
    return TrtSession(cuda, runtime, engine, free_bytes)


def ready_engine(bundle: Bundle) -> Path:
    """The file of the bundle's engine for this device; built now where it is not there yet.

    Raises MissingDependencyError without a GPU or TensorRT, BundleError and ResourceError as the build does.
    """
    initialise_driver()  # first: TensorRT without a driver ends the process
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
