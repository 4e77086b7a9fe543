"""Between the host's memory and that of the head."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

__all__ = ["Arrival", "Mark", "PinnedMemory", "Queue", "SameMemory", "Transfers"]

KINDS = {
    np.dtype(np.int32): torch.int32,
    np.dtype(np.int64): torch.int64,
    np.dtype(np.float32): torch.float32,
}


class Arrival(Protocol):
    """Arrays on their way to the host."""

    def wait(self) -> list[NDArray[Any]]: ...


class Transfers(Protocol):
    """The two ways."""

    def up(self, arrays: Sequence[NDArray[Any]]) -> list[Tensor]:
        """The same arrays for the head to compute with. They stay as they are until the step is collected."""
        ...

    def down(self, tensors: Sequence[Tensor]) -> Arrival:
        """What the head has computed, or will have: they arrive once everything before is done. The largest
        elements come first."""
        ...


class SameMemory:
    """A head that computes on the host, and has computed when its call returns."""

    def up(self, arrays: Sequence[NDArray[Any]]) -> list[Tensor]:
        return [torch.from_numpy(array) for array in arrays]

    def down(self, tensors: Sequence[Tensor]) -> Arrival:
        return _Here([tensor.numpy() for tensor in tensors])


class _Here:
    def __init__(self, arrays: list[NDArray[Any]]) -> None:
        self._arrays = arrays

    def wait(self) -> list[NDArray[Any]]:
        return self._arrays


class Mark(Protocol):
    """A place in a queue, as `torch.cuda.Event` has it."""

    def query(self) -> bool:
        """Whether everything before it is done."""
        ...

    def synchronize(self) -> None:
        """Wait until it is."""
        ...

    def elapsed_time(self, end_event: Any) -> float:
        """Milliseconds from here to a later mark. Both are past."""
        ...


class Queue(Protocol):
    """An accelerator does what is put on it in order, while the host goes on."""

    device: torch.device

    def host_memory(self, num_bytes: int) -> Tensor:
        """uint8 [num_bytes] of the host that the accelerator copies from and to by itself."""
        ...

    def copy(self, source: Tensor, into: Tensor) -> None:
        """Put on the queue: copy to host memory of the kind above, or from it."""
        ...

    def mark(self) -> Mark:
        """Put on the queue: a mark."""
        ...


class PinnedMemory:
    """A head on an accelerator. Whatever goes one way goes in one copy, for which nobody waits."""

    def __init__(self, queue: Queue) -> None:
        self._queue = queue

    def up(self, arrays: Sequence[NDArray[Any]]) -> list[Tensor]:
        order = sorted(range(len(arrays)), key=lambda place: -arrays[place].itemsize)  # each begins aligned
        parts = [arrays[place].reshape(-1).view(np.uint8) for place in order]
        sizes = [len(part) for part in parts]
        host = self._queue.host_memory(sum(sizes))
        there = torch.empty_like(host, device=self._queue.device)
        if parts:
            np.concatenate(parts, out=host.numpy())
            self._queue.copy(host, there)
        tensors: list[Tensor] = [there] * len(arrays)
        for place, part in zip(order, torch.split(there, sizes), strict=True):
            tensors[place] = part.view(KINDS[arrays[place].dtype]).view(arrays[place].shape)
        return tensors

    def down(self, tensors: Sequence[Tensor]) -> Arrival:
        host = self._queue.host_memory(sum(tensor.nbytes for tensor in tensors))
        if tensors:
            self._queue.copy(torch.cat([tensor.reshape(-1).view(torch.uint8) for tensor in tensors]), host)
        kinds = [(tensor.dtype, tensor.shape) for tensor in tensors]
        return _OnItsWay(self._queue.mark(), host, kinds)


class _OnItsWay:
    def __init__(self, mark: Mark, host: Tensor, kinds: list[tuple[torch.dtype, torch.Size]]) -> None:
        self._mark, self._host, self._kinds = mark, host, kinds

    def wait(self) -> list[NDArray[Any]]:
        self._mark.synchronize()
        arrays: list[NDArray[Any]] = []
        end = 0
        for dtype, shape in self._kinds:
            start, end = end, end + dtype.itemsize * shape.numel()
            arrays.append(self._host[start:end].view(dtype).view(shape).numpy())
        return arrays
