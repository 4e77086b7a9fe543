"""`--device`: what is not here is told with what is wrong, on a machine with a GPU as on one without."""

from __future__ import annotations

import pytest
import torch

from starsd_edge.errors import ResourceError
from starsd_server.hardware import chosen_device, memory_for


@pytest.mark.parametrize(
    ("cuda", "gpus", "says"),
    [
        (None, 0, "was built for CPUs alone"),
        ("13.0", 0, r"PyTorch sees none \(compare nvidia-smi\)"),
        ("13.0", 2, "PyTorch sees 2 of them"),
    ],
)
def test_a_gpu_that_is_not_here_is_told_with_the_reason(
    cuda: str | None, gpus: int, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    with pytest.raises(ResourceError, match=f"--device cuda:2: .*{says}.*--device cpu"):
        chosen_device("cuda:2")
    if gpus:
        assert torch.device("cuda", 1) == chosen_device("cuda:1")


def test_a_full_gpu_is_told_as_such_and_nothing_else_is() -> None:
    gpu = torch.device("cuda")
    with pytest.raises(ResourceError, match="weights do not fit into the memory of cuda"):
        raise_for(gpu, torch.OutOfMemoryError("CUDA out of memory"))
    with pytest.raises(RuntimeError, match="another"):
        raise_for(gpu, RuntimeError("another"))


def raise_for(device: torch.device, error: Exception) -> None:
    with memory_for("weights", device):
        raise error
