"""The target on TensorRT: past rows are addresses into preallocated buffers, new rows are moved behind them.

A pass is given more of the past than is filled, masked, so that shapes repeat and CUDA graphs of them can be
launched (trt_graphs.py).

Not yet run on a board: what could be checked without one is the graph (on ONNX Runtime,
standard_target.py), the build (with TensorRT for RTX), the types, and every call made here against a fake of
TensorRT's API. docs/tensorrt.md lists what is open.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from starsd_edge.bundle import Bundle
from starsd_edge.decoding.roles import Invariance, TargetOutput, TargetSpec
from starsd_edge.errors import BundleError
from starsd_edge.types import BoolArray, TokenArray
from starsd_jetson.calibrate import measure_invariance
from starsd_jetson.context import MAX_TREE_SIZE, ContextTarget, granted_len
from starsd_jetson.cuda import DeviceBuffer
from starsd_jetson.device_cache import DeviceCache, value_type
from starsd_jetson.trt_build import PREFILL_ROWS, past_room
from starsd_jetson.trt_engine import TrtSession, open_session
from starsd_jetson.trt_graphs import PassGraphs

if TYPE_CHECKING:  # every call is checked where its stubs are: `make types`
    import tensorrt

__all__ = ["TrtTarget", "bucket_of", "profile_of"]

STEP_PROFILE, TREE_PROFILE, PREFILL_PROFILE = range(3)  # the order of trt_build.ROW_BOUNDS


class TrtTarget(ContextTarget):
    """A roles.Target over one context of one bundle of flavour tensorrt."""

    flavour = "tensorrt"
    uses_threads = False
    prefill_chunk = PREFILL_ROWS

    def __init__(self, bundle: Bundle, session: TrtSession, max_len: int | None = None) -> None:
        manifest, shapes = bundle.manifest, bundle.manifest.shapes
        self.bundle = bundle
        self.session = session
        self.cuda = session.cuda
        self.dtype = np.dtype(value_type(manifest))
        length = granted_len(bundle, max_len)
        self.cache = DeviceCache(self.cuda, manifest, past_room(length))
        self.staging: dict[str, DeviceBuffer] = {}
        self.graphs = PassGraphs(self.cuda)
        self.staged("past_mask", past_room(length) * self.dtype.itemsize)
        spec = TargetSpec(shapes.vocab_size, shapes.feature_size, length, Invariance(bitwise=False))
        super().__init__(spec, self.cache)
        self.spec = replace(self.spec, invariance=measure_invariance(self))

    @classmethod
    def open(cls, bundle: Bundle, threads: int | None, max_len: int | None) -> TrtTarget:
        """Build the engine on first use and load it. `threads` is of no use here.

        Raises MissingDependencyError without a GPU or TensorRT, BundleError and ResourceError as the build
        does.
        """
        return cls(bundle, open_session(bundle), max_len)

    @classmethod
    def files_read(cls, bundle: Bundle) -> Collection[str]:
        """The engine stands for graph and weights, which its build reads and proves."""
        return ("tokenizer.json",)

    def device_bytes(self) -> int:
        return self.session.taken_bytes()

    def run(
        self, tokens: TokenArray, positions: NDArray[Any], mask: BoolArray, logit_rows: NDArray[np.int64]
    ) -> TargetOutput:
        start, rows, asked = self.cache.length, len(tokens), len(logit_rows)
        size, past = bucket_of(rows), past_room(start)
        inputs = {
            "tokens": padded(tokens, size),
            "positions": padded(positions, size),
            "mask": self.additive(mask, size),
            "past_mask": self.visible(start, past),
            # Of a tree all rows are asked for, of a prompt's piece the last.
            "logit_rows": padded(logit_rows, size if asked == rows else asked),
        }
        outputs = {
            "logits": np.empty((asked, self.bundle.manifest.shapes.vocab_size), np.float32),
            "features": np.empty((rows, self.bundle.manifest.shapes.feature_size), self.dtype),
        }
        made_rows = {"logits": len(inputs["logit_rows"]), "features": size}
        places = {name: self.staged(name, array.nbytes) for name, array in inputs.items()}
        places |= {
            name: self.staged(name, made_rows[name] * array[0].nbytes) for name, array in outputs.items()
        }
        new = {name: self.staged(f"{name}.new", size * self.cache.row_bytes) for name in self.cache.buffers}
        places |= {f"{name}.new": place for name, place in new.items()}
        for name, array in inputs.items():
            self.cuda.upload(array, places[name])
        key = (size, made_rows["logits"], past)
        if not self.graphs.launch(key):
            context = self.bound(inputs, past, places)
            queue = partial(context.execute_async_v3, self.cuda.stream)
            if not queue():
                raise BundleError(
                    f"{self.bundle.path}: TensorRT refused a pass over {rows} rows after {start}"
                )
            if size <= MAX_TREE_SIZE:
                self.graphs.ran(key, queue)
        for name, place in new.items():
            self.cuda.move(place, self.cache.row(name, start), rows * self.cache.row_bytes)
        for name, array in outputs.items():
            self.cuda.download(places[name], array)
        self.cuda.wait()
        return TargetOutput(outputs["logits"], outputs["features"])

    def bound(
        self, inputs: dict[str, NDArray[Any]], past: int, places: dict[str, int]
    ) -> tensorrt.IExecutionContext:
        """The context of this many rows, with a shape and an address for whatever it reads or writes."""
        context = self.session.contexts[profile_of(len(inputs["tokens"]))]
        for name, array in inputs.items():
            self.shape(context, name, array.shape)
        shapes = self.bundle.manifest.shapes
        for name in self.cache.buffers:
            self.shape(context, name, (past, shapes.num_kv_heads, shapes.head_dim))
            context.set_tensor_address(name, self.cache.row(name, 0))
        for name, place in places.items():
            context.set_tensor_address(name, place)
        return context

    def shape(self, context: tensorrt.IExecutionContext, name: str, shape: tuple[int, ...]) -> None:
        if not context.set_input_shape(name, shape):
            raise BundleError(
                f"{self.bundle.path}: its engine takes no {name} of {list(shape)}; export the bundle again"
            )

    def visible(self, filled: int, past: int) -> NDArray[Any]:
        """What is added to scores over the past [past]: rows beyond the filled ones are seen by nobody."""
        added = np.zeros(past, self.dtype)
        added[filled:] = np.finfo(self.dtype).min
        return added

    def additive(self, mask: BoolArray, size: int) -> NDArray[Any]:
        """What is added to scores [size, size]; a padded row sees itself only, and nobody sees it."""
        seen = np.eye(size, dtype=np.bool_)
        seen[: len(mask), : len(mask)] = mask
        lowest = np.finfo(self.dtype).min  # not -inf: a float16 softmax makes NaN of it
        return np.where(seen, 0, lowest).astype(self.dtype)

    def staged(self, name: str, num_bytes: int) -> int:
        """Address of a device buffer for an input or output; kept, and larger when it must be."""
        buffer = self.staging.get(name)
        if buffer is None or buffer.num_bytes < num_bytes:
            self.graphs.forget()
            buffer = self.staging[name] = DeviceBuffer(self.cuda, num_bytes)
        return buffer.address


def padded(values: NDArray[Any], size: int) -> NDArray[np.int32]:
    """As int32 [size]: the last value again and again."""
    return np.pad(values.astype(np.int32), (0, size - len(values)), mode="edge")


def bucket_of(rows: int) -> int:
    """Rows that a pass over `rows` is padded to: few sizes, so that shapes repeat. A long piece of a prompt
    is bound by arithmetic, and runs as it is."""
    return rows if rows > MAX_TREE_SIZE else 1 << (rows - 1).bit_length()


def profile_of(rows: int) -> int:
    if rows == 1:
        return STEP_PROFILE
    return TREE_PROFILE if rows <= MAX_TREE_SIZE else PREFILL_PROFILE
