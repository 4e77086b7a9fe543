"""A draft head whose rows do not feel each other: the same bits for a row, whatever is batched beside it.

Floating-point GEMMs choose kernels, and with them the order of a row's sum, by how many rows there are. Two
formulations are free of that:

* **int8** (CPU): activations quantised per row, weights per output, products summed as integers. Integer sums
  have no order, so a row's result is exact on every machine. It is also the fastest there is on a CPU, since
  drafting reads weights more than it computes. Activations are held unsigned around a zero point: of signed
  ones oneDNN has fast kernels for AMX only, and a reference loop, a thousand times slower, for the rest.
* **float32** with the row count padded to whole blocks; `rows_are_independent` measures whether the machine's
  kernels keep their order then, and blocks of one fixed size are run one by one where they do not.
"""

from __future__ import annotations

import enum
import functools
import math
import time
from collections.abc import Callable
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from starsd_edge.errors import UsageError
from starsd_server.graph_head import MAX_WEIGHTS, GraphHead, SlotAttend, graphs_available
from starsd_server.heads.candidates import candidates, candidates_by_key
from starsd_server.heads.head import EagleHead, HeadKind

__all__ = ["BlockLinear", "Int8Linear", "Precision", "RowHead", "int8_available", "rows_are_independent"]

ROW_BLOCK = 16  # below it CPU GEMMs take other kernels for every row count (measured with oneDNN and MKL)
INT8_MAX = 127.0
ZERO_POINT = 128  # of the activations, held as uint8
# oneDNN compiles and keeps a kernel for every number of rows it meets: a few numbers will do. Up to so many
# rows, to the next multiple of.
PADDING = ((1, 1), (16, 2), (64, 4), (256, 16))
LARGEST_PADDING = 64
SLOW = (
    100.0  # int8 kernels slower than float32 ones by this are a reference loop, however busy the machine is
)
TINY = 1e-30  # keeps the scale of an all-zero row finite


class Precision(enum.Enum):
    """How the head's matrices are held."""

    FLOAT32 = "float32"
    INT8 = "int8"
    FLOAT16 = "float16"  # CUDA
    BFLOAT16 = "bfloat16"  # CUDA


class Int8Linear(nn.Module):
    """A linear layer summed in integers.

    weight  float [out, in]
    parts   the input is that many vectors side by side, each quantised by its own scale: an embedding next
            to a feature a hundred times larger would otherwise vanish
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None, parts: int = 1) -> None:
        super().__init__()
        self._bias = None if bias is None else bias.float()
        self._width = weight.shape[1] // parts
        self._packed: list[tuple[Tensor, Tensor]] = []
        self._zeros = torch.zeros(weight.shape[0], dtype=torch.int32)
        for part in torch.split(weight.float(), self._width, dim=1):
            scale = part.abs().amax(1).clamp_min(TINY) / INT8_MAX  # [out]
            whole = (part / scale[:, None]).round().to(torch.int8).contiguous()
            self._packed.append((torch.ops.onednn.qlinear_prepack(whole, None), scale))

    def forward(self, x: Tensor) -> Tensor:
        """float32 [m, in] -> float32 [m, out]"""
        if len(self._packed) == 1:
            y = self._part(x, *self._packed[0])
        else:
            y = self._part(x[:, : self._width], *self._packed[0])
            for at, (packed, scale) in enumerate(self._packed[1:], start=1):
                y += self._part(x[:, at * self._width : (at + 1) * self._width], packed, scale)
        return y if self._bias is None else y.add_(self._bias)

    def _part(self, x: Tensor, packed: Tensor, scale: Tensor) -> Tensor:
        row_scale = x.abs().amax(1, keepdim=True).mul_(1.0 / INT8_MAX).add_(TINY)  # [m, 1]
        whole = torch.empty((padded(len(x)), x.shape[1]), dtype=torch.uint8)
        whole[: len(x)] = x.div(row_scale).round_().add_(ZERO_POINT)
        y: Tensor = torch.ops.onednn.qlinear_pointwise(
            whole, 1.0, ZERO_POINT, packed, scale, self._zeros, None, 1.0, 0, torch.float32, "none", [], ""
        )
        return y[: len(x)].mul_(row_scale)


class BlockLinear(nn.Module):
    """A float32 linear layer over whole blocks of rows."""

    def __init__(
        self, weight: Tensor, bias: Tensor | None = None, *, one_block_at_a_time: bool = False
    ) -> None:
        super().__init__()
        self._weight = weight.float().contiguous()
        self._bias = None if bias is None else bias.float()
        self._one_by_one = one_block_at_a_time

    def forward(self, x: Tensor) -> Tensor:
        """float32 [m, in] -> float32 [m, out]"""
        rows = len(x)
        padded = F.pad(x, (0, 0, 0, -rows % ROW_BLOCK))
        if self._one_by_one:
            return torch.cat([F.linear(b, self._weight, self._bias) for b in torch.split(padded, ROW_BLOCK)])[
                :rows
            ]
        return F.linear(padded, self._weight, self._bias)[:rows]


class _Network(Protocol):
    """What a RowHead runs: an EagleHead's calls over [n] rows."""

    def forward(self, tokens: Tensor, hidden: Tensor, positions: Tensor, attend: SlotAttend) -> Tensor: ...

    def candidates(self, hidden: Tensor, count: int) -> tuple[Tensor, Tensor]: ...


class _TorchHead:
    """An EagleHead whose products are what `linear` makes of weight, bias and the parts of the input."""

    def __init__(self, head: EagleHead, linear: Callable[[Tensor, Tensor | None, int], nn.Module]) -> None:
        eagle3 = head.config.kind is HeadKind.EAGLE3
        parts = {"qkv_proj": 2} if eagle3 else {"fc": 2, "qkv_proj": 1}
        for name in (*parts, "o_proj", "gate_up_proj", "down_proj"):
            layer = getattr(head, name)
            setattr(head, name, linear(layer.weight, layer.bias, parts.get(name, 1)))
        self._lm_head = linear(head.lm_head.detach(), None, 1)
        head.lm_head = nn.Parameter(torch.empty(0), requires_grad=False)  # held by _lm_head alone
        self._head = head

    def forward(self, tokens: Tensor, hidden: Tensor, positions: Tensor, attend: SlotAttend) -> Tensor:
        def by_head(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            queries = (q / math.sqrt(q.shape[-1])).transpose(0, 1).contiguous()
            return attend(queries, torch.stack((k, v)).transpose(1, 2)).transpose(0, 1)

        return self._head.forward(tokens, hidden, positions, by_head)

    def candidates(self, hidden: Tensor, count: int) -> tuple[Tensor, Tensor]:
        norm = self._head.out_norm
        logits = self._lm_head(hidden if norm is None else norm(hidden))
        return (candidates if logits.device.type == "cpu" else candidates_by_key)(logits, count)


class RowHead:
    """An EagleHead prepared for the engine; the caller's head is consumed."""

    def __init__(self, head: EagleHead, precision: Precision) -> None:
        head = head.eval().requires_grad_(False)
        if head.config.kind is HeadKind.EAGLE3:
            del head.fc  # the edge projects
        self.config, self.precision = head.config, precision
        self.device, self.draft_to_target = head.embedding.device, head.draft_to_target
        self.dtype = {Precision.FLOAT16: torch.float16, Precision.BFLOAT16: torch.bfloat16}.get(
            precision, torch.float32
        )
        self._embedding_bytes = head.embedding.nbytes
        self._network = self._prepared(head)

    @property
    def num_weights(self) -> int:
        """Of all matrices that a row is multiplied with."""
        c = self.config
        eagle3 = c.kind is HeadKind.EAGLE3
        attention_in = 2 * c.hidden_size if eagle3 else c.hidden_size
        weights = 0 if eagle3 else 2 * c.hidden_size * c.hidden_size
        weights += attention_in * (c.num_heads + 2 * c.num_kv_heads) * c.head_dim
        weights += c.num_heads * c.head_dim * c.hidden_size + 3 * c.hidden_size * c.intermediate_size
        return weights + c.draft_vocab_size * c.hidden_size

    @property
    def num_bytes(self) -> int:
        """Of all matrices in this precision, and of the embedding."""
        per_weight = {Precision.INT8: 1, Precision.FLOAT32: 4}.get(self.precision, 2)
        return self.num_weights * per_weight + self._embedding_bytes

    def step(self, tokens: Tensor, hidden: Tensor, positions: Tensor, attend: SlotAttend) -> Tensor:
        """`EagleHead.forward` over [n] rows; `attend` is called once, see there and `SlotAttend`."""
        return self._network.forward(tokens, hidden, positions, attend)

    def candidates(self, hidden: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """The likeliest tokens after [n, H], see `heads.candidates`."""
        return self._network.candidates(hidden, count)

    def _prepared(self, head: EagleHead) -> _Network:
        if self.precision is Precision.FLOAT32:
            return _TorchHead(head, _block_linear)
        if self.precision is not Precision.INT8:
            return _TorchHead(head.to(self.dtype), _plain_linear)
        if self.num_weights <= MAX_WEIGHTS and graphs_available():
            return GraphHead(head)
        if not int8_available():
            raise UsageError(
                "this torch has no exact and fast int8 products on this CPU: use --precision float32"
            )
        return _TorchHead(head, Int8Linear)


def _plain_linear(weight: Tensor, bias: Tensor | None, parts: int) -> nn.Linear:
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    linear.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        linear.bias = nn.Parameter(bias, requires_grad=False)
    return linear


def _block_linear(weight: Tensor, bias: Tensor | None, parts: int) -> BlockLinear:
    return BlockLinear(weight, bias, one_block_at_a_time=not rows_are_independent(weight))


@functools.cache
def padded(rows: int) -> int:
    """The next number of rows that there is a kernel for."""
    step = next((step for limit, step in PADDING if rows <= limit), LARGEST_PADDING)
    return -(-rows // step) * step


def int8_available() -> bool:
    """Whether this torch has int8 products on this CPU that are exact (AVX2 without VNNI saturates partial
    sums) and worth having (some CPUs get a reference loop)."""
    mkldnn = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    if not mkldnn or not hasattr(torch.ops.onednn, "qlinear_prepack"):
        return False
    signs = (
        torch.randint(0, 2, (ROW_BLOCK + 256, 256), generator=torch.Generator().manual_seed(0)) * 2.0 - 1.0
    )
    x, weight = signs[:ROW_BLOCK], signs[ROW_BLOCK:]  # every product the largest there is
    linear = Int8Linear(weight)
    exact = torch.allclose(linear(x), F.linear(x, weight), rtol=1e-5, atol=1e-3)
    return exact and _seconds(lambda: linear(x)) < SLOW * _seconds(lambda: F.linear(x, weight))


def _seconds(run: Callable[[], Tensor]) -> float:
    """The least of a few runs: what the kernel takes, not what else the machine does."""
    best = float("inf")
    for _ in range(10):
        started = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - started)
    return best


def rows_are_independent(weight: Tensor) -> bool:
    """Whether float32 GEMMs over whole blocks give a row the same bits, wherever it is among how many."""
    x = torch.randn(16 * ROW_BLOCK, weight.shape[1], generator=torch.Generator().manual_seed(0))
    whole = F.linear(x, weight.float())
    for blocks in (1, 2, 3, 5, 8):
        rows = torch.randperm(len(x), generator=torch.Generator().manual_seed(blocks))[: blocks * ROW_BLOCK]
        if not torch.equal(F.linear(x[rows], weight.float()), whole[rows]):
            return False
    return True
