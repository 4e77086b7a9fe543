"""CUDA graphs of passes: what TensorRT queues for a pass, hundreds of kernels, is launched in one call.

A graph has its shapes and addresses built in, so passes are alike by their numbers of rows: `trt_target` pads
trees to a few sizes and the past to steps of PAST_STEP, and gives every input and output its own place.

Not yet run on a board: the order of calls is the one TensorRT's documentation asks for (a pass as usual, then
the capture of the same one), on a fake of CUDA.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeAlias

from starsd_edge.errors import ResourceError
from starsd_jetson.cuda import Cuda, CudaGraph

__all__ = ["PassGraphs", "PassKey"]

log = logging.getLogger("starsd.tensorrt")

MAX_GRAPHS = 24  # seven sizes of trees at the past of now, the next one, and one conversation more
PassKey: TypeAlias = tuple[int, ...]
"""Whatever shapes a pass: rows, rows of logits, past rows."""


class PassGraphs:
    """Captures a pass when it comes for the second time, and launches it from then on."""

    def __init__(self, cuda: Cuda) -> None:
        self.cuda = cuda
        self.graphs: dict[PassKey, CudaGraph] = {}
        self.seen: set[PassKey] = set()
        self.refused = False

    def launch(self, key: PassKey) -> bool:
        """Whether the pass is under way: it was captured before."""
        graph = self.graphs.get(key)
        if graph is not None:
            self.cuda.launch(graph)
        return graph is not None

    def ran(self, key: PassKey, queue: Callable[[], bool]) -> None:
        """The pass was queued as usual by `queue`, with everything bound: capture it the second time."""
        if self.refused or key not in self.seen:
            self.seen.add(key)
            return
        if len(self.graphs) >= MAX_GRAPHS:
            self.graphs.pop(next(iter(self.graphs)))
        try:
            self.cuda.begin_capture()
            try:
                queued = queue()
            finally:
                graph = self.cuda.end_capture()
        except ResourceError as error:
            self.refused = True
            log.warning("passes are queued kernel by kernel: %s", error)
            return
        if queued:
            self.graphs[key] = graph

    def forget(self) -> None:
        """An address that is built into them is no longer valid."""
        self.graphs.clear()
        self.seen.clear()
