"""The hardware that a head runs on: what the user named, or why it cannot be that."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from starsd_edge.errors import ResourceError, UsageError

__all__ = ["chosen_device", "memory_for"]


def chosen_device(name: str) -> torch.device:
    """Raises UsageError for a name that is none, ResourceError for a GPU that is not here."""
    try:
        device = torch.device(name)
    except RuntimeError:
        device = torch.device("meta")
    if device.type not in ("cpu", "cuda"):
        raise UsageError(f"--device {name}: choose cpu or cuda, or one GPU of several as cuda:1")
    if device.type == "cpu":
        return device
    if torch.version.cuda is None:
        raise ResourceError(
            f"--device {name}: this PyTorch ({torch.__version__}) was built for CPUs alone; "
            "install one that was built for CUDA, or draft with --device cpu"
        )
    count = torch.cuda.device_count()
    if (device.index or 0) >= count:
        there = f"PyTorch sees {count} of them" if count else "PyTorch sees none (compare nvidia-smi)"
        raise ResourceError(f"--device {name}: no such NVIDIA GPU here, {there}; or draft with --device cpu")
    return device


@contextlib.contextmanager
def memory_for(what: str, device: torch.device) -> Iterator[None]:
    """Raises ResourceError where there is too little memory for `what`, which is done meanwhile."""
    try:
        yield
    except RuntimeError as error:  # a CPU's allocator has no class of its own for it
        if not isinstance(error, torch.OutOfMemoryError) and "can't allocate memory" not in str(error):
            raise
        raise ResourceError(f"{what} do not fit into the memory of {device}") from error
