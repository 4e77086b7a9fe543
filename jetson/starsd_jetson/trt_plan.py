"""What is known of a TensorRT engine without TensorRT: whose it is, under which key it is kept, why it
failed.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path

from starsd_edge.errors import BundleError

__all__ = ["EngineKey", "PlanHeader", "check_plan", "explain", "read_header"]

PLAN_MAGIC = b"ftrt"
RTX_MAGIC = b"vtrt"
HEADER_BYTES = 28  # magic, zero, and at 24 the version (NVIDIA/TensorRT samples/common/sampleEngines.cpp)


@dataclass(frozen=True, slots=True)
class PlanHeader:
    """Version of the TensorRT that built a plan, as major.minor.patch.build."""

    version: str


def read_header(data: bytes) -> PlanHeader:
    """Raises BundleError when these are not the first bytes of a TensorRT plan (>= 8.6)."""
    if data[:4] == RTX_MAGIC:
        raise BundleError(
            "the engine was built by TensorRT for RTX, which TensorRT cannot load; build it here"
        )
    if len(data) < HEADER_BYTES or data[:4] != PLAN_MAGIC or data[4:8] != bytes(4):
        raise BundleError("the file is no TensorRT engine, or of a version before 8.6; build it again")
    return PlanHeader(".".join(str(part) for part in data[24:28]))


def check_plan(path: Path, version: str) -> None:
    """Look at a plan's first bytes before all of it is loaded by the TensorRT of `version`, whose plans are
    its own: "10.3.0" loads what 10.3.0.30 built.

    Raises BundleError for a file that is none, or of another version.
    """
    with path.open("rb") as file:
        head = file.read(HEADER_BYTES)
    try:
        built_by = read_header(head).version
    except BundleError as error:
        raise BundleError(f"{path}: {error}") from error
    if any(ours != theirs for ours, theirs in zip(version.split("."), built_by.split("."), strict=False)):
        raise BundleError(
            f"{path}: built by TensorRT {built_by}, this is {version}; "
            "delete it, it is built again at the next start"
        )


@dataclass(frozen=True, slots=True)
class EngineKey:
    """An engine fits exactly what it was built for: graph, module, system release, TensorRT, row limits."""

    graph_sha256: str
    data_sha256: str
    module: str
    release: str
    tensorrt: str
    max_len: int

    def file_name(self) -> str:
        parts = (
            self.graph_sha256,
            self.data_sha256,
            self.module,
            self.release,
            self.tensorrt,
            str(self.max_len),
        )
        return f"{hashlib.sha256('|'.join(parts).encode()).hexdigest()[:32]}.engine"


# What TensorRT, CUDA, the kernel, pip and ssh say on boards, and what it means; the first that fits counts.
# tests/jetson/board_failures.txt has one of each as it was seen.
FAILURES: tuple[tuple[str, str], ...] = (
    (r"kEXPECTED_MAGIC_TAG|incompatible serialization version",
     "the file is no engine of this TensorRT; delete it, it is built again at the next start"),
    (r"Version tag does not match|not compatible with this version of TensorRT|[sS]erializationVersion"
     r"|Error Code 1: Serialization",
     "the engine was built by another TensorRT; delete it, it is built again at the next start"),
    (r"incompatible device|expecting compute|across different models of devices",
     "the engine was built on another kind of GPU; engines cannot be copied between models of board"),
    (r"VMM reserv|cudaHostRegister",
     "this program asks a GPU for memory in a way that boards do not know; use a build made for Jetson"),
    (r"OutOfMemory|could not be allocated|NvMapMem|out of memory|error 12\b|std::bad_alloc|\bKilled\b"
     r"|exit(ed)?( code| status)? 137",
     "not enough GPU memory; stop other programs, add swap for the build, or use int4"),
    (r"Engine deserialization failed|NoneType.*create_execution_context",
     "TensorRT cannot load the engine; delete it, it is built again at the next start"),
    (r"NoKernelImageForDevice|no kernel image",
     "this CUDA build has no code for this board's GPU; install the packages made for its JetPack"),
    (r"No module named 'tensorrt'|libnvonnxparser|libnvinfer[\w.]*: cannot open",
     "TensorRT does not load; apt install python3-libnvinfer, and a venv with --system-site-packages"),
    (r"trtexec: No such file", "TensorRT is not installed: sudo apt install nvidia-jetpack"),
    (r"NvRmMemInitNvmap failed with Permission denied|no CUDA-capable device|cuInit\(0\)=999|/dev/nvmap",
     "no access to the GPU; add the user to the groups video and render, then log in again"),
    (r"driver version is insufficient|cudaError 35",
     "no NVIDIA driver is loaded, or it is older than this CUDA"),
    (r"No space left on device|Errno 28",
     "the disk is full; an engine needs 2.5 times the size of the weights"),
    (r"externally-managed-environment",
     "this system's Python takes no packages from pip; make a venv with --system-site-packages"),
    (r"is not a supported wheel",
     "this wheel is for another Python or processor; take the one for this board's Python and aarch64"),
    (r"404.*jetson-ai-lab|jetson-ai-lab.*404",
     "the package index has no such wheel for this JetPack (any more); use TensorRT from apt instead"),
    (r"Release file .*is not valid yet",
     "this board's clock is behind, as without a battery after every start; set it and try again"),
    (r"throttled due to over-current",
     "the board drew more than its supply gives and slowed down; use a lower power mode or another supply"),
    (r"a password is required",
     "sudo asks for a password here; what needs it must be run by a person on the board"),
    (r"BadHostKey|REMOTE HOST IDENTIFICATION HAS CHANGED",
     "the board's host key is another one, as after flashing; check it, then forget the old key"),
    (r"no optimization profile", "the graph and its profiles do not fit: this is a bug, please report it"),
    (r"symmetric quantization", "this TensorRT takes symmetric int4 only; export the bundle again"),
)  # fmt: skip


def explain(log: str) -> str:
    """One clear line for TensorRT's error log; its own last line when it is none we know."""
    for pattern, meaning in FAILURES:
        if re.search(pattern, log):
            return meaning
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    return lines[-1] if lines else "TensorRT gave no reason"
