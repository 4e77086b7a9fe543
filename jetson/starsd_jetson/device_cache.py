"""Keys and values of one context in the memory of a GPU, for graphs that take past rows as inputs and give
new ones (graph/standard_ops.py): the past is an address, and so is the place behind it."""

from __future__ import annotations

from typing import Any

import numpy as np

from starsd_edge.bundle import Manifest
from starsd_jetson.cuda import Cuda, DeviceBuffer

__all__ = ["DeviceCache", "cache_names", "value_type"]


def cache_names(num_layers: int) -> list[str]:
    """The graph's inputs for past rows; its outputs for new ones end in `.new`."""
    return [f"{kind}.{layer}" for layer in range(num_layers) for kind in "kv"]


def value_type(manifest: Manifest) -> Any:
    """Of cache, features and mask in graphs of flavour tensorrt."""
    return np.float32 if manifest.quantisation == "fp32" else np.float16


class DeviceCache:
    """[rows, n_kv, dim] a layer for keys and for values; the first `length` rows are committed.

    moved_bytes  rows of kept paths that were moved up, in all
    """

    grown_bytes = 0  # it never grows: all of it is there from the beginning

    def __init__(self, cuda: Cuda, manifest: Manifest, rows: int) -> None:
        shapes = manifest.shapes
        self.cuda = cuda
        value_bytes: int = np.dtype(value_type(manifest)).itemsize
        self.row_bytes = shapes.num_kv_heads * shapes.head_dim * value_bytes
        names = cache_names(shapes.num_layers)
        self.buffers = {name: DeviceBuffer(cuda, rows * self.row_bytes) for name in names}
        for buffer in self.buffers.values():  # a masked row's weight is zero, and 0 * NaN is NaN
            cuda.clear(buffer.address, buffer.num_bytes)
        self.length = 0
        self.moved_bytes = 0

    def reserve(self, rows: int) -> bool:
        return False

    def row(self, name: str, index: int) -> int:
        """Its address."""
        return self.buffers[name].address + index * self.row_bytes

    def keep(self, path: list[int]) -> None:
        """Rows only ever move towards the front, so moving them in order loses none."""
        for name in self.buffers:
            for target, node in enumerate(path):
                if node != target:
                    rows = self.row(name, self.length + node), self.row(name, self.length + target)
                    self.cuda.move(*rows, self.row_bytes)
                    self.moved_bytes += self.row_bytes
        self.length += len(path)

    def truncate(self, length: int) -> None:
        self.length = min(self.length, length)
