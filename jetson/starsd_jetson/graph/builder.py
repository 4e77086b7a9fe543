"""An ONNX graph under construction: nodes in order, small constants inside, weights streamed to a data
file.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

__all__ = ["CONTRIB", "GraphBuilder", "StoredTensor", "TensorData", "WeightFile"]

TensorData = np.ndarray[Any, np.dtype[Any]]

# ONNX Runtime maps the data file; whole pages keep every tensor aligned for vector loads.
ALIGNMENT_BYTES = 4096
AXES_INPUT_OPSET = 18
CONTRIB = "com.microsoft"  # domain of ONNX Runtime's own operators


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where a weight lies in the data file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    num_bytes: int


class WeightFile:
    """The external data of a graph, written front to back and hashed on the way; holds one tensor at a
    time.
    """

    def __init__(self, file: BinaryIO, location: str) -> None:
        self.file = file
        self.location = location
        self.size = 0
        self.digest = hashlib.sha256()
        self.tensors: dict[str, StoredTensor] = {}

    def add(self, name: str, values: TensorData) -> StoredTensor:
        self.write(b"\0" * (-self.size % ALIGNMENT_BYTES))
        offset = self.size
        self.write(np.ascontiguousarray(values).reshape(-1).view(np.uint8).data)
        stored = StoredTensor(name, str(values.dtype), tuple(values.shape), offset, values.nbytes)
        self.tensors[name] = stored
        return stored

    def write(self, data: bytes | memoryview) -> None:
        self.file.write(data)
        self.digest.update(data)
        self.size += len(data)


class GraphBuilder:
    """Appends nodes; every method returns the names of the values it made."""

    def __init__(self, weights: WeightFile, opset: int, domains: Sequence[str] = ()) -> None:
        self.weights = weights
        self.opset = opset
        self.opsets = [helper.make_opsetid("", opset), *(helper.make_opsetid(d, 1) for d in domains)]
        self.nodes: list[onnx.NodeProto] = []
        self.initializers: list[TensorProto] = []
        self.inputs: list[onnx.ValueInfoProto] = []
        self.outputs: list[onnx.ValueInfoProto] = []
        self.constants: dict[tuple[str, tuple[int, ...], bytes], str] = {}

    def input(self, name: str, element: int, shape: Sequence[int | str]) -> str:
        self.inputs.append(helper.make_tensor_value_info(name, element, list(shape)))
        return name

    def output(self, name: str, element: int, shape: Sequence[int | str]) -> None:
        self.outputs.append(helper.make_tensor_value_info(name, element, list(shape)))

    def op(self, kind: str, *inputs: str, name: str = "", domain: str = "", **attributes: Any) -> str:
        """A node with one output."""
        return self.ops(kind, *inputs, outputs=1, name=name, domain=domain, **attributes)[0]

    def ops(
        self, kind: str, *inputs: str, outputs: int, name: str = "", domain: str = "", **attributes: Any
    ) -> list[str]:
        """A node with several outputs."""
        stem = name or f"v{len(self.nodes)}"
        names = [stem] if outputs == 1 else [f"{stem}_{index}" for index in range(outputs)]
        self.nodes.append(helper.make_node(kind, list(inputs), names, domain=domain, **attributes))
        return names

    def constant(self, values: TensorData | list[int]) -> str:
        """A small constant inside the graph file; equal ones are shared. Lists become int64."""
        array = np.asarray(values, np.int64) if isinstance(values, list) else np.asarray(values)
        key = (str(array.dtype), tuple(array.shape), array.tobytes())
        if key not in self.constants:
            name = f"c{len(self.constants)}"
            self.constants[key] = name
            self.initializers.append(numpy_helper.from_array(array, name))
        return self.constants[key]

    def number(self, value: float) -> str:
        """A float32 scalar."""
        return self.constant(np.array(value, np.float32))

    def reduce_mean(self, x: str) -> str:
        """Mean over the last axis, kept; the axes became an input in opset 18."""
        if self.opset < AXES_INPUT_OPSET:
            return self.op("ReduceMean", x, axes=[-1], keepdims=1)
        return self.op("ReduceMean", x, self.constant([-1]), keepdims=1)

    def weight(self, name: str, values: TensorData) -> str:
        """A weight in the data file."""
        stored = self.weights.add(name, values)
        return self.refer(stored, stored.shape, helper.np_dtype_to_tensor_dtype(np.dtype(stored.dtype)))

    def int4_weight(self, name: str, packed: TensorData, shape: tuple[int, ...]) -> str:
        """Signed 4-bit values of `shape`, packed two a byte, low nibble first."""
        return self.refer(self.weights.add(name, packed), shape, TensorProto.INT4)

    def refer(self, stored: StoredTensor, shape: tuple[int, ...], element: int) -> str:
        tensor = TensorProto(name=stored.name, dims=shape, data_location=TensorProto.EXTERNAL)
        tensor.data_type = element
        for key, value in (
            ("location", self.weights.location),
            ("offset", str(stored.offset)),
            ("length", str(stored.num_bytes)),
        ):
            entry = tensor.external_data.add()
            entry.key, entry.value = key, value
        self.initializers.append(tensor)
        return stored.name

    def model(self, graph_name: str) -> bytes:
        graph = helper.make_graph(self.nodes, graph_name, self.inputs, self.outputs, self.initializers)
        model = helper.make_model(graph, opset_imports=self.opsets, producer_name="starsd")
        model.ir_version = 10  # the newest that ONNX Runtime 1.20 reads
        return bytes(model.SerializeToString())
