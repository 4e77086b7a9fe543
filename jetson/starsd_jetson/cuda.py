"""The few CUDA calls a target needs, through ctypes: a device has the libraries, seldom a Python package
for them.

Not yet run on a board.
"""

from __future__ import annotations

import ctypes
from typing import Any

from numpy.typing import NDArray

from starsd_edge.errors import MissingDependencyError, ResourceError

__all__ = ["Cuda", "CudaGraph", "DeviceBuffer", "initialise_driver"]

DRIVER = "libcuda.so.1"
RUNTIMES = ("libcudart.so.13", "libcudart.so.12", "libcudart.so.11.0", "libcudart.so")
TO_DEVICE, TO_HOST, ON_DEVICE = 1, 2, 3  # cudaMemcpyKind
THREAD_LOCAL = 1  # cudaStreamCaptureMode: what other threads do meanwhile is allowed
CUDA_ERRORS = {
    2: "out of memory; stop other programs, use a shorter context, or int4",
    35: "the NVIDIA driver is older than this CUDA",
    100: "no CUDA-capable device; is the user in the groups video and render?",
    999: "the driver does not answer; is the user in the groups video and render?",
}


def load_library(names: tuple[str, ...]) -> ctypes.CDLL:
    for name in names:
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    raise MissingDependencyError(f"no NVIDIA driver or CUDA here: {names[0]} is not found")


def initialise_driver() -> None:
    """Must succeed before TensorRT is touched: without a driver its Runtime ends the process.

    Raises MissingDependencyError."""
    status = load_library((DRIVER,)).cuInit(0)
    if status:
        raise MissingDependencyError(f"the GPU cannot be used: {explain(status)}")


def explain(status: int) -> str:
    return CUDA_ERRORS.get(status, f"CUDA error {status}")


class DeviceBuffer:
    """Bytes on the device, freed with the object."""

    def __init__(self, cuda: Cuda, num_bytes: int) -> None:
        self.cuda = cuda
        self.num_bytes = num_bytes
        self.address = 0  # until there is one: a refused allocation has nothing to free
        self.address = cuda.allocate(num_bytes)

    def __del__(self) -> None:
        if self.address:
            self.cuda.free(self.address)


class CudaGraph:
    """What was captured, ready to be launched; freed with the object."""

    def __init__(self, cuda: Cuda, handle: int) -> None:
        self.cuda = cuda
        self.handle = handle

    def __del__(self) -> None:
        self.cuda.drop_graph(self.handle)


class Cuda:
    """One stream, and copies on it. Raises ResourceError for whatever CUDA refuses."""

    def __init__(self) -> None:
        initialise_driver()
        self.library = load_library(RUNTIMES)
        handle = ctypes.c_void_p()
        self.check(self.library.cudaStreamCreate(ctypes.byref(handle)), "create a stream")
        self.stream = handle.value or 0

    def check(self, status: int, doing: str) -> None:
        if status:
            raise ResourceError(f"the GPU cannot {doing}: {explain(status)}")

    def allocate(self, num_bytes: int) -> int:
        pointer = ctypes.c_void_p()
        size = ctypes.c_size_t(max(num_bytes, 1))
        self.check(self.library.cudaMalloc(ctypes.byref(pointer), size), f"allocate {num_bytes >> 20} MiB")
        return pointer.value or 0

    def free(self, address: int) -> None:
        self.library.cudaFree(ctypes.c_void_p(address))

    def free_bytes(self) -> int:
        """Of the GPU's memory, whoever uses the rest; on a board it is the system's."""
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self.check(self.library.cudaMemGetInfo(ctypes.byref(free), ctypes.byref(total)), "tell its memory")
        return free.value

    def upload(self, array: NDArray[Any], address: int) -> None:
        assert array.flags.c_contiguous
        self.copy(address, array.ctypes.data, array.nbytes, TO_DEVICE)

    def download(self, address: int, array: NDArray[Any]) -> None:
        assert array.flags.c_contiguous
        self.copy(array.ctypes.data, address, array.nbytes, TO_HOST)

    def move(self, source: int, target: int, num_bytes: int) -> None:
        """Inside the device; the ranges do not overlap."""
        self.copy(target, source, num_bytes, ON_DEVICE)

    def copy(self, target: int, source: int, num_bytes: int, kind: int) -> None:
        status = self.library.cudaMemcpyAsync(
            ctypes.c_void_p(target),
            ctypes.c_void_p(source),
            ctypes.c_size_t(num_bytes),
            ctypes.c_int(kind),
            ctypes.c_void_p(self.stream),
        )
        self.check(status, "copy memory")

    def clear(self, address: int, num_bytes: int) -> None:
        """Zeros."""
        status = self.library.cudaMemsetAsync(
            ctypes.c_void_p(address),
            ctypes.c_int(0),
            ctypes.c_size_t(num_bytes),
            ctypes.c_void_p(self.stream),
        )
        self.check(status, "clear memory")

    def begin_capture(self) -> None:
        """What is queued from here on is recorded, not run."""
        status = self.library.cudaStreamBeginCapture(ctypes.c_void_p(self.stream), ctypes.c_int(THREAD_LOCAL))
        self.check(status, "capture a pass")

    def end_capture(self) -> CudaGraph:
        """What was recorded. The capture is over in any case."""
        graph, launchable = ctypes.c_void_p(), ctypes.c_void_p()
        status = self.library.cudaStreamEndCapture(ctypes.c_void_p(self.stream), ctypes.byref(graph))
        self.check(status, "capture a pass")
        status = self.library.cudaGraphInstantiateWithFlags(
            ctypes.byref(launchable), graph, ctypes.c_ulonglong(0)
        )
        self.library.cudaGraphDestroy(graph)
        self.check(status, "make a graph of a pass")
        return CudaGraph(self, launchable.value or 0)

    def launch(self, graph: CudaGraph) -> None:
        status = self.library.cudaGraphLaunch(ctypes.c_void_p(graph.handle), ctypes.c_void_p(self.stream))
        self.check(status, "launch a pass")

    def drop_graph(self, handle: int) -> None:
        self.library.cudaGraphExecDestroy(ctypes.c_void_p(handle))

    def wait(self) -> None:
        self.check(self.library.cudaStreamSynchronize(ctypes.c_void_p(self.stream)), "finish a pass")
