"""A small draft head on a CPU: what stands before attention, what stands after it, and the scores, each a
graph of ONNX Runtime.

With a few million weights a step's products take less time than calling an operator after the other from
Python; a graph runs the small ones several times faster. With many weights torch is the faster one: its int8
products make better use of the memory and of several threads (`MAX_WEIGHTS`).

Every operator gives a row the same bits whatever is beside it. Activations are quantised by their own row's
largest magnitude, weights by output, and products are summed as integers, which have no order.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from starsd_edge.types import Float32Array
from starsd_server.heads.head import Attend, EagleHead, HeadKind

__all__ = ["MAX_WEIGHTS", "GraphHead", "GraphLinear", "graphs_available"]

MAX_WEIGHTS = (
    32_000_000  # measured on a Zen 5: with more of them torch's products win back what its calls cost
)
INT8_MAX = 127
ZERO_POINT = 128  # of the activations, held as uint8: x / largest in [-1, 1] becomes 1..255
TINY = 1e-30  # keeps the scale of an output without weights finite
OPSET = 18
IR_VERSION = 9
CONTRIB = "com.microsoft"  # domain of ONNX Runtime's own operators
PROVIDER = "CPUExecutionProvider"
ERRORS_ONLY = 3  # log severity


class GraphHead:
    """The matrices of `head`; the same calls as `EagleHead`, float32 in and out."""

    def __init__(self, head: EagleHead) -> None:
        self._embedding = head.embedding
        self._angle_per_position = head.angle_per_position
        self._num_heads, self._head_dim = head.config.num_heads, head.config.head_dim
        self._before, self._after, self._scores = _before(head), _after(head), _scores(head)

    def forward(self, tokens: Tensor, hidden: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """See `EagleHead.forward`; [n] rows."""
        angles = positions[:, None] * self._angle_per_position  # [n, D / 2]
        rotated, v, *fused = self._before(
            {
                "embedded": self._embedding.index_select(0, tokens).float().numpy(),
                "hidden": hidden.numpy(),
                "cos": angles.cos().numpy(),
                "sin": angles.sin().numpy(),
            }
        )
        heads = rotated.view(len(tokens), -1, self._head_dim)
        q, k = heads[:, : self._num_heads], heads[:, self._num_heads :]
        mixed = attend(q, k, v.view(len(tokens), -1, self._head_dim))
        x = fused[0] if fused else hidden
        (output,) = self._after({"x": x.numpy(), "mixed": mixed.flatten(1).numpy()})
        return _marked(output, hidden, mixed.flatten(1))

    def candidates(self, hidden: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """See `heads.candidates`: the likeliest tokens after [n, H]."""
        log_probs, ids = self._scores({"hidden": hidden.numpy(), "count": np.array([count])})
        return _marked(log_probs, hidden), ids


def _marked(rows: Tensor, *sources: Tensor) -> Tensor:
    """`rows`, NaN where a source's row is not finite: the largest magnitude of a row passes over a NaN."""
    for source in sources:
        flat = source.reshape(-1)
        if not math.isfinite(flat.dot(flat)):
            rows[~source.isfinite().all(1)] = math.nan
    return rows


class GraphLinear:
    """One linear layer: float32 [n, in] -> float32 [n, out]."""

    def __init__(self, weight: Tensor, parts: int = 1) -> None:
        graph = _Graph()
        x = graph.input("x", weight.shape[1])
        graph.output(graph.linear(graph.split(x, parts), weight), weight.shape[0])
        self._run = graph.session()

    def __call__(self, x: Tensor) -> Tensor:
        (y,) = self._run({"x": x.numpy()})
        return y


@functools.cache
def graphs_available() -> bool:
    """Whether ONNX Runtime is here, and its integer products are exact on this CPU: AVX2 without VNNI
    saturates partial sums."""
    try:
        import onnx  # noqa: F401
        import onnxruntime  # noqa: F401
    except ImportError:
        return False
    signs = torch.randint(0, 2, (272, 256), generator=torch.Generator().manual_seed(0)) * 2.0 - 1.0
    x, weight = signs[:16], signs[16:]  # every product the largest there is
    return torch.allclose(GraphLinear(weight)(x), x @ weight.T, rtol=1e-5, atol=1e-3)


def _before(head: EagleHead) -> _Session:
    """embedded, hidden [n, H]; cos, sin [n, D / 2] -> q and k rotated, side by side; v; EAGLE-1: the fused
    vector, where the residual stream begins."""
    c, graph = head.config, _Graph()
    embedded, hidden = graph.input("embedded", c.hidden_size), graph.input("hidden", c.hidden_size)
    cos, sin = graph.input("cos", c.head_dim // 2), graph.input("sin", c.head_dim // 2)
    if head.embed_norm is not None and head.hidden_norm is not None:
        parts = [graph.norm(embedded, head.embed_norm), graph.norm(hidden, head.hidden_norm)]
    else:
        parts = [graph.linear([embedded, hidden], head.fc.weight, head.fc.bias)]
    qkv = graph.linear(parts, head.qkv_proj.weight)
    qk_width, v_width = (c.num_heads + c.num_kv_heads) * c.head_dim, c.num_kv_heads * c.head_dim
    qk, v = graph.op("Split", qkv, graph.constant([qk_width, v_width]), outputs=2, axis=-1)
    first = graph.constant([0])
    (qk,) = graph.op("Unsqueeze", qk, first)  # a batch of one sequence, whose rows have angles of their own
    (qk,) = graph.op("RotaryEmbedding", qk, first, cos, sin, domain=CONTRIB)
    (qk,) = graph.op("Squeeze", qk, first)
    graph.output(qk, qk_width)
    graph.output(v, v_width)
    if head.config.kind is HeadKind.EAGLE1:
        graph.output(parts[0], c.hidden_size)
    return graph.session()


def _after(head: EagleHead) -> _Session:
    """The residual stream x [n, H] and what attention mixed [n, heads * D] -> the output [n, H]."""
    c, graph = head.config, _Graph()
    x, mixed = graph.input("x", c.hidden_size), graph.input("mixed", c.num_heads * c.head_dim)
    (x,) = graph.op("Add", x, graph.linear([mixed], head.o_proj.weight))
    gate, up = graph.split(graph.linear([graph.norm(x, head.mlp_norm)], head.gate_up_proj.weight), 2)
    (opened,) = graph.op("Mul", *graph.op("QuickGelu", gate, domain=CONTRIB, alpha=1.0), up)  # SiLU
    (x,) = graph.op("Add", x, graph.linear([opened], head.down_proj.weight))
    graph.output(x, c.hidden_size)
    return graph.session()


def _scores(head: EagleHead) -> _Session:
    """[n, H] -> log-probabilities and ids of the likeliest tokens, [n, count]; ties by id, as TopK has it."""
    c, graph = head.config, _Graph()
    hidden = graph.input("hidden", c.hidden_size)
    if head.out_norm is not None:
        hidden = graph.norm(hidden, head.out_norm)
    log_probs = graph.op("LogSoftmax", graph.linear([hidden], head.lm_head), axis=-1)
    best, ids = graph.op("TopK", *log_probs, graph.count("count"), outputs=2)
    graph.output(best, "count")
    graph.output(ids, "count", np.int64)
    return graph.session()


class _Session:
    """A loaded graph: arrays by the names of its inputs to tensors in the order of its outputs."""

    def __init__(self, model: bytes) -> None:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        options.inter_op_num_threads = 1
        # The graph is written as it should run: a fusion could bring a kernel that depends on the rows.
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        # Every session has threads of its own: those of one that rests would spin in the others' way.
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        options.log_severity_level = ERRORS_ONLY
        self._session = onnxruntime.InferenceSession(model, options, providers=[PROVIDER])

    def __call__(self, arrays: Mapping[str, NDArray[Any]]) -> list[Tensor]:
        return [torch.from_numpy(array) for array in self._session.run(None, arrays)]


class _Graph:
    """A graph under construction, of float32 rows [n, ...]; methods take and return the names of values."""

    def __init__(self) -> None:
        self._nodes: list[Any] = []
        self._constants: list[Any] = []
        self._inputs: list[Any] = []
        self._outputs: list[Any] = []

    def input(self, name: str, width: int) -> str:
        self._inputs.append(_value(name, np.float32, ["n", width]))
        return name

    def count(self, name: str) -> str:
        """An input that is one number."""
        self._inputs.append(_value(name, np.int64, [1]))
        return name

    def output(self, value: str, width: int | str, dtype: type[np.generic] = np.float32) -> None:
        self._outputs.append(_value(value, dtype, ["n", width]))

    def session(self) -> _Session:
        from onnx import helper

        graph = helper.make_graph(self._nodes, "head", self._inputs, self._outputs, self._constants)
        opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid(CONTRIB, 1)]
        return _Session(
            helper.make_model(graph, opset_imports=opsets, ir_version=IR_VERSION).SerializeToString()
        )

    def op(self, kind: str, *inputs: str, outputs: int = 1, domain: str = "", **attributes: Any) -> list[str]:
        names = [f"{kind}{len(self._nodes)}.{at}" for at in range(outputs)]
        self._add(kind, inputs, names, domain=domain, **attributes)
        return names

    def constant(self, values: NDArray[Any] | Sequence[int]) -> str:
        from onnx import numpy_helper

        name = f"constant{len(self._constants)}"
        self._constants.append(numpy_helper.from_array(np.asarray(values), name))
        return name

    def split(self, x: str, parts: int) -> list[str]:
        """As many vectors side by side."""
        return self.op("Split", x, outputs=parts, axis=-1, num_outputs=parts) if parts > 1 else [x]

    def norm(self, x: str, norm: torch.nn.RMSNorm) -> str:
        gain: Float32Array = norm.weight.detach().float().numpy()
        (y,) = self.op("SimplifiedLayerNormalization", x, self.constant(gain), axis=-1, epsilon=norm.eps)
        return y

    def linear(self, parts: Sequence[str], weight: Tensor, bias: Tensor | None = None) -> str:
        """A product summed in integers.

        The input is `parts` side by side, each quantised by its own scale: an embedding next to a feature a
        hundred times larger would otherwise vanish.
        """
        columns = torch.chunk(weight.detach(), len(parts), dim=1)
        total, *others = [self._product(x, part) for x, part in zip(parts, columns, strict=True)]
        for other in others:
            (total,) = self.op("Add", total, other)
        if bias is not None:
            (total,) = self.op("Add", total, self.constant(bias.detach().float().numpy()))
        return total

    def _product(self, x: str, weight: Tensor) -> str:
        whole = weight.float()
        scale = whole.abs().amax(1).clamp_min(TINY) / INT8_MAX  # [out]
        columns = (whole / scale[:, None]).round_().to(torch.int8).T.contiguous().numpy()  # [in, out]
        zero, step = self.constant(np.uint8(ZERO_POINT)), self.constant(np.float32(1 / INT8_MAX))
        (largest,) = self.op("ReduceMax", *self.op("Abs", x), self.constant([-1]), keepdims=1)  # [n, 1]
        (rows,) = self.op("QuantizeLinear", *self.op("Div", x, largest), step, zero)
        product = self.op(
            "MatMulIntegerToFloat",
            rows,
            self.constant(columns),
            step,
            self.constant(scale.numpy()),
            zero,
            domain=CONTRIB,
        )
        (y,) = self.op("Mul", *product, largest)
        return y

    def _add(self, kind: str, inputs: Sequence[str], outputs: Sequence[str], **attributes: Any) -> None:
        from onnx import helper

        self._nodes.append(helper.make_node(kind, inputs, outputs, **attributes))


def _value(name: str, dtype: type[np.generic], shape: Sequence[int | str]) -> Any:
    from onnx import helper

    return helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(np.dtype(dtype)), shape)
