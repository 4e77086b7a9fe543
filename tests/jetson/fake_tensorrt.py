"""TensorRT's Python API as far as engines are built and run with it, for machines without a GPU.

`make_tensorrt("8.6.2")` has what 8.6 has and lacks what it lacks (10 brought strong typing, INT4 and the
progress monitor, 11 dropped the precision flags), and refuses what the real one refuses: shapes outside a
profile, a plan of another version, a float16 graph without the flag. A context computes with ONNX Runtime on
the addresses that it was given, which are addresses of this process: `HostCuda` stands for the device.
"""

from __future__ import annotations

import ctypes
import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from numpy.typing import NDArray

from starsd_edge.errors import ResourceError
from starsd_jetson.cuda import CudaGraph

__all__ = ["Config", "Context", "HostCuda", "has_driver", "install", "make_tensorrt"]

TYPES = {onnx.TensorProto.FLOAT: np.float32, onnx.TensorProto.FLOAT16: np.float16}
TYPES |= {onnx.TensorProto.INT32: np.int32}
DEVICE_BYTES = 1 << 30
ERROR = 1  # ILogger.Severity.ERROR


class HostCuda:
    """starsd_jetson.cuda.Cuda over memory of this process."""

    stream = 7
    capturing: list[Callable[[], None]] | None = None  # what a context was asked to run meanwhile
    launched = 0

    def __init__(self) -> None:
        self.memory: dict[int, NDArray[np.uint8]] = {}
        self.graphs: dict[int, list[Callable[[], None]]] = {}

    def allocate(self, num_bytes: int) -> int:
        if num_bytes > self.free_bytes():
            raise ResourceError(f"the GPU cannot allocate {num_bytes >> 20} MiB: out of memory")
        block = np.full(max(num_bytes, 1), 0xFF, np.uint8)  # NaN, as whatever was there before may be
        self.memory[block.ctypes.data] = block
        return block.ctypes.data

    def free(self, address: int) -> None:
        del self.memory[address]

    def free_bytes(self) -> int:
        return DEVICE_BYTES - sum(block.nbytes for block in self.memory.values())

    def clear(self, address: int, num_bytes: int) -> None:
        assert HostCuda.capturing is None
        ctypes.memset(address, 0, num_bytes)

    def begin_capture(self) -> None:
        HostCuda.capturing = []

    def end_capture(self) -> CudaGraph:
        recorded, HostCuda.capturing = HostCuda.capturing, None
        assert recorded
        handle = max(self.graphs, default=0) + 1
        self.graphs[handle] = recorded
        return CudaGraph(self, handle)  # type: ignore[arg-type]

    def launch(self, graph: CudaGraph) -> None:
        self.launched += 1
        for run in self.graphs[graph.handle]:
            run()

    def drop_graph(self, handle: int) -> None:
        del self.graphs[handle]

    def upload(self, array: NDArray[Any], address: int) -> None:
        assert HostCuda.capturing is None
        assert array.flags.c_contiguous
        ctypes.memmove(address, array.ctypes.data, array.nbytes)

    def download(self, address: int, array: NDArray[Any]) -> None:
        assert array.flags.c_contiguous
        ctypes.memmove(array.ctypes.data, address, array.nbytes)

    def move(self, source: int, target: int, num_bytes: int) -> None:
        assert abs(source - target) >= num_bytes
        ctypes.memmove(target, source, num_bytes)

    def wait(self) -> None:
        """Everything is done at once."""


class Flags:
    """An enum of TensorRT: members that turn into numbers, and nothing else."""

    def __init__(self, *names: str) -> None:
        self.__dict__.update({name: number for number, name in enumerate(names)})


class Tensor:
    def __init__(self, value: Any) -> None:
        self.name = value.name
        self.type = TYPES[value.type.tensor_type.elem_type]
        self.shape = tuple(d.dim_value or -1 for d in value.type.tensor_type.shape.dim)


class Network:
    def __init__(self, flags: int) -> None:
        self.flags = flags
        self.graph_path = ""
        self.inputs: list[Tensor] = []

    @property
    def num_inputs(self) -> int:
        return len(self.inputs)

    def get_input(self, index: int) -> Tensor:
        return self.inputs[index]


class Profile:
    def __init__(self) -> None:
        self.bounds: dict[str, list[list[int]]] = {}

    def set_shape(self, name: str, least: Any, typical: Any, most: Any) -> None:
        assert all(a <= b <= c for a, b, c in zip(least, typical, most, strict=True)), name
        self.bounds[name] = [list(least), list(typical), list(most)]


class TimingCache:
    def __init__(self, data: bytes) -> None:
        self.data = data

    def serialize(self) -> bytes:
        return b"timings"


class Config:
    """`made` is the last one, for tests to look at."""

    made: Config

    def __init__(self) -> None:
        Config.made = self
        self.profiles: list[Profile] = []
        self.flags: set[int] = set()
        self.timings: bytes | None = None
        self.progress_monitor: Any = None

    def set_memory_pool_limit(self, pool: int, num_bytes: int) -> None:
        assert num_bytes > 0

    def set_flag(self, flag: int) -> None:
        self.flags.add(flag)

    def create_timing_cache(self, data: bytes) -> TimingCache:
        return TimingCache(data)

    def set_timing_cache(self, cache: TimingCache, ignore_mismatch: bool) -> bool:
        self.timings = cache.data
        return True

    def add_optimization_profile(self, profile: Profile) -> int:
        self.profiles.append(profile)
        return len(self.profiles) - 1


class Runner:
    """Both an engine and its execution contexts. `size` bytes of the plan stand for its weights."""

    def __init__(self, plan: dict[str, Any]) -> None:
        self.plan = plan
        graph = onnx.load(plan["graph"], load_external_data=False).graph
        self.types = {value.name: Tensor(value).type for value in (*graph.input, *graph.output)}
        self.session = onnxruntime.InferenceSession(plan["graph"], providers=["CPUExecutionProvider"])
        self.outputs = {value.name: Tensor(value) for value in graph.output}

    def create_execution_context(self) -> Context:
        return Context(self)


class Context:
    noise = 0.0  # logits: a pass of several rows differs by up to that much, as float16 kernels do

    def __init__(self, engine: Runner) -> None:
        self.engine = engine
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.addresses: dict[str, int] = {}
        self.bounds: dict[str, list[list[int]]] = {}

    def set_optimization_profile_async(self, index: int, stream: int) -> bool:
        assert stream == HostCuda.stream
        self.bounds = self.engine.plan["profiles"][index]
        return True

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        least, _, most = self.bounds[name]
        inside = len(shape) == len(least) and all(
            a <= size <= b for a, size, b in zip(least, shape, most, strict=True)
        )
        if inside:
            self.shapes[name] = shape
        return inside

    def set_tensor_address(self, name: str, address: int) -> bool:
        assert name in self.engine.types
        assert address
        self.addresses[name] = address
        return True

    def execute_async_v3(self, stream: int) -> bool:
        assert stream == HostCuda.stream
        assert set(self.addresses) == set(self.engine.types)
        run = partial(self.compute, dict(self.shapes), dict(self.addresses))
        if HostCuda.capturing is None:
            run()
        else:
            HostCuda.capturing.append(run)
        return True

    def compute(self, shapes: dict[str, tuple[int, ...]], addresses: dict[str, int]) -> None:
        binding = self.engine.session.io_binding()
        for name, shape in shapes.items():
            binding.bind_input(name, "cpu", 0, self.engine.types[name], shape, addresses[name])
        rows, asked = len_of(shapes["tokens"]), len_of(shapes["logit_rows"])
        for name, tensor in self.engine.outputs.items():
            shape = (asked if name == "logits" else rows, *tensor.shape[1:])
            binding.bind_output(name, "cpu", 0, tensor.type, shape, addresses[name])
        self.engine.session.run_with_iobinding(binding)
        if rows > 1 and self.noise:
            self.disturb(addresses["logits"], asked * self.engine.outputs["logits"].shape[1])

    def disturb(self, address: int, count: int) -> None:
        logits = np.ctypeslib.as_array((ctypes.c_float * count).from_address(address))
        logits += np.random.default_rng(0).uniform(-self.noise, self.noise, count).astype(np.float32)


def len_of(shape: tuple[int, ...]) -> int:
    return shape[0]


def make_tensorrt(version: str) -> Any:
    """A module that says it is `version` ("8.6.2", "10.3.0", "11.4.1")."""
    trt: Any = ModuleType("tensorrt")
    trt.__version__ = version
    major = int(version.split(".")[0])
    header = b"ftrt" + bytes(20) + bytes([*(int(part) for part in version.split(".")), 30])

    class Logger:
        Severity = SimpleNamespace(INTERNAL_ERROR=0, ERROR=ERROR, WARNING=2, INFO=3)

    class Builder:
        def __init__(self, logger: Any) -> None:
            self.logger = logger

        def create_network(self, flags: int) -> Network:
            return Network(flags)

        def create_builder_config(self) -> Config:
            return Config()

        def create_optimization_profile(self) -> Profile:
            return Profile()

        def build_serialized_network(self, network: Network, config: Config) -> bytes | None:
            if not config.profiles:
                self.logger.log(ERROR, "4: no optimization profile has been defined.")
                return None
            halves = any(tensor.type is np.float16 for tensor in network.inputs)
            if major < 10 and halves and trt.BuilderFlag.FP16 not in config.flags:
                self.logger.log(ERROR, "4: a float16 network input without BuilderFlag.FP16")
                return None
            if config.progress_monitor is not None:
                watch(config.progress_monitor)
            profiles = [profile.bounds for profile in config.profiles]
            assert all(set(bounds) == {tensor.name for tensor in network.inputs} for bounds in profiles)
            return header + json.dumps({"graph": network.graph_path, "profiles": profiles}).encode()

    class OnnxParser:
        def __init__(self, network: Network, logger: Any) -> None:
            self.network = network
            self.errors: list[str] = []

        @property
        def num_errors(self) -> int:
            return len(self.errors)

        def get_error(self, index: int) -> str:
            return self.errors[index]

        def parse_from_file(self, path: str) -> bool:
            explicit = getattr(trt.NetworkDefinitionCreationFlag, "EXPLICIT_BATCH", None)
            if major < 10 and not self.network.flags & 1 << explicit:
                self.errors.append("In function importModel: this parser needs an explicit batch")
                return False
            graph = onnx.load(path, load_external_data=False).graph
            if major < 10 and any(node.op_type == "DequantizeLinear" for node in graph.node):
                self.errors.append("In node 3 (importDequantizeLinear): unsupported type INT4")
                return False
            self.network.graph_path = path
            self.network.inputs = [Tensor(value) for value in graph.input]
            return True

    class Runtime:
        def __init__(self, logger: Any) -> None:
            self.logger = logger

        def deserialize_cuda_engine(self, plan: Any) -> Runner | None:
            with memoryview(plan) as view:
                data = bytes(view)
            if data[: len(header)] != header:
                said = "IRuntime::deserializeCudaEngine: Error Code 1: Serialization (tag does not match)"
                self.logger.log(ERROR, said)
                return None
            return Runner(json.loads(data[len(header) :]))

    trt.ILogger, trt.Builder, trt.OnnxParser, trt.Runtime = Logger, Builder, OnnxParser, Runtime
    trt.MemoryPoolType = Flags("WORKSPACE")
    if major < 10:
        trt.NetworkDefinitionCreationFlag = Flags("EXPLICIT_BATCH", "EXPLICIT_PRECISION")
    elif major < 11:
        trt.NetworkDefinitionCreationFlag = Flags("EXPLICIT_BATCH", "STRONGLY_TYPED")
    else:
        trt.NetworkDefinitionCreationFlag = Flags("STRONGLY_TYPED")
    trt.BuilderFlag = Flags("FP16", "INT8", "TF32") if major < 11 else Flags("TF32")
    if major >= 10:
        trt.IProgressMonitor = type("IProgressMonitor", (), {})
    return trt


def has_driver() -> bool:
    """Whether there is a GPU after all."""
    try:
        return ctypes.CDLL("libcuda.so.1").cuInit(0) == 0
    except OSError:
        return False


def watch(monitor: Any) -> None:
    """What a build tells its monitor."""
    monitor.phase_start("Building Engine", None, 20)
    monitor.phase_start("Timing Graph Nodes", "Building Engine", 3)
    for step in range(20):
        assert monitor.step_complete("Building Engine", step)
        monitor.step_complete("Timing Graph Nodes", step % 3)
    monitor.phase_finish("Timing Graph Nodes")
    monitor.phase_finish("Building Engine")


def install(monkeypatch: pytest.MonkeyPatch, version: str, cache: Path) -> Any:
    """Make this process one with a GPU and TensorRT `version`, and without ONNX Runtime, as a board is. The
    module is returned."""
    trt = make_tensorrt(version)
    monkeypatch.setitem(sys.modules, "tensorrt", trt)
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    monkeypatch.setattr("starsd_jetson.trt_engine.Cuda", HostCuda)
    monkeypatch.setattr("starsd_jetson.trt_engine.initialise_driver", lambda: None)
    monkeypatch.setenv("STARSD_CACHE", str(cache))
    return trt
