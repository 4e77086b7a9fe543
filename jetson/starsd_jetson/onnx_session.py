"""Opening ONNX Runtime sessions: which package, which options."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from starsd_edge.errors import BundleError, MissingDependencyError
from starsd_edge.extras import install_hint
from starsd_jetson.huge_pages import huge_pages_of_new_memory

__all__ = ["import_onnxruntime", "open_session", "share"]

# The graphs keep their cache in the process's memory and are exact on a CPU only: no other is taken silently.
PROVIDER = "CPUExecutionProvider"


def share(array: NDArray[Any]) -> Any:
    """The array as ONNX Runtime's value, over the same memory."""
    import onnxruntime

    return onnxruntime.OrtValue.ortvalue_from_numpy(array)


def open_session(graph: Path, threads: int | None) -> Any:
    ort = import_onnxruntime()
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads or 0
    options.inter_op_num_threads = 1
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 3
    try:
        with huge_pages_of_new_memory():
            session = ort.InferenceSession(str(graph), options, providers=[PROVIDER])
    except Exception as error:  # its exceptions share no public base class
        raise BundleError(
            f"{graph}: ONNX Runtime {ort.__version__} cannot load it: {first_line(error)}"
        ) from error
    if session.get_providers() != [PROVIDER]:
        found = ", ".join(session.get_providers())
        raise BundleError(f"{graph}: ONNX Runtime {ort.__version__} runs it on {found}, not on {PROVIDER}")
    return session


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
