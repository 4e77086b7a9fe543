"""Opening ONNX Runtime sessions: which package, which options."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from starsd_edge.errors import BundleError, MissingDependencyError
from starsd_edge.extras import install_hint
from starsd_jetson.amx import without_amx
from starsd_jetson.huge_pages import huge_pages_of_new_memory

__all__ = ["Provider", "import_onnxruntime", "open_session", "share"]


class Provider(Enum):
    """What computes, as ONNX Runtime calls it. Never chosen silently: a CPU is exact, a GPU is not."""

    CPU = "CPUExecutionProvider"
    CUDA = "CUDAExecutionProvider"
    TENSORRT = "TensorrtExecutionProvider"


# What may take nodes that the asked one leaves (shapes, mostly), in this order; a CPU takes all.
HELPERS = {
    Provider.CPU: (),
    Provider.CUDA: (Provider.CPU,),
    Provider.TENSORRT: (Provider.CUDA, Provider.CPU),
}


def share(array: NDArray[Any]) -> Any:
    """The array as ONNX Runtime's value, over the same memory."""
    import onnxruntime

    return onnxruntime.OrtValue.ortvalue_from_numpy(array)


def open_session(
    graph: Path,
    threads: int | None,
    provider: Provider = Provider.CPU,
    provider_options: Mapping[str, str] | None = None,
) -> Any:
    """Raises MissingDependencyError where the provider is not there or does not load: ONNX Runtime itself
    would go on without it, on the CPU. BundleError for a graph that does not load."""
    ort = import_onnxruntime()
    providers = [
        (each.value, dict(provider_options or {}) if each is provider else {})
        for each in (provider, *HELPERS[provider])
    ]
    check_available(ort, provider)
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads or 0
    options.inter_op_num_threads = 1
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 3
    try:
        with huge_pages_of_new_memory():
            session = ort.InferenceSession(str(graph), options, providers=providers)
    except Exception as error:  # its exceptions share no public base class
        raise BundleError(
            f"{graph}: ONNX Runtime {ort.__version__} cannot load it: {first_line(error)}"
        ) from error
    loaded = session.get_providers()
    if loaded[:1] != [provider.value] or (provider is Provider.CPU and len(loaded) > 1):
        raise MissingDependencyError(
            f"ONNX Runtime {ort.__version__} has {short(provider.value)}, which does not load here; instead "
            f"it would run on {', '.join(map(short, loaded)) or 'nothing'}: install the CUDA, cuDNN (and "
            "TensorRT) that it was built for"
        )
    return session


def check_available(ort: Any, provider: Provider) -> None:
    available = ort.get_available_providers()
    if provider.value not in available:
        raise MissingDependencyError(
            f"ONNX Runtime {ort.__version__} has no {short(provider.value)}, only "
            f"{', '.join(map(short, available))}: {install_hint('gpu')} instead of the package for a CPU"
        )
    if provider is not Provider.CPU and hasattr(ort, "preload_dlls"):  # ONNX Runtime >= 1.21
        ort.preload_dlls()  # CUDA and cuDNN as pip installs them are on no path of the system


def short(provider: str) -> str:
    return provider.removesuffix("ExecutionProvider")


def first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or ["no reason given"])[0]


def import_onnxruntime() -> Any:
    """Raises MissingDependencyError when it is missing, or installed twice: both wheels unpack into one
    folder.
    """
    installed = [name for name in ("onnxruntime", "onnxruntime-gpu") if is_installed(name)]
    if len(installed) > 1:
        raise MissingDependencyError(
            "onnxruntime and onnxruntime-gpu are both installed and overwrite each other; "
            "uninstall both, then install one: pip install '.[onnx]' or '.[gpu]' in this project's folder"
        )
    try:
        with without_amx():  # it asks for it as it is imported
            import onnxruntime
    except ImportError as error:
        raise MissingDependencyError(
            f"onnxruntime does not load ({first_line(error)}); {install_hint('onnx')}"
        ) from error
    return onnxruntime


def is_installed(distribution: str) -> bool:
    try:
        importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True
