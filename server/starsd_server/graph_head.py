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
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from starsd_edge.extras import install_hint
from starsd_edge.types import Float32Array
from starsd_server.heads.head import EagleHead, HeadKind

__all__ = ["MAX_WEIGHTS", "GraphHead", "GraphLinear", "SlotAttend", "graphs_available"]

log = logging.getLogger("starsd.worker")

SlotAttend = Callable[[Tensor, Tensor], Tensor]
"""(queries [heads, n, D], over sqrt(D); new keys and values [2, kv_heads, n, D]) -> [heads, n, D]"""


MAX_WEIGHTS = 32_000_000  # with more of them torch's products win back what its calls cost (on a Zen 5)
FIRST_POSITIONS = 4096  # whose angles are computed at the start
INT8_MAX = 127
ZERO_POINT = 128  # of the activations, held as uint8: x / largest in [-1, 1] becomes 1..255
TINY = 1e-30  # keeps the scale of an output without weights finite
OPSET = 18
IR_VERSION = 9
CONTRIB = "com.microsoft"  # domain of ONNX Runtime's own operators
PROVIDER = "CPUExecutionProvider"
ERRORS_ONLY = 3  # log severity
FLOAT = 1  # ONNX's number of the type


class GraphHead:
    """The matrices of `head`; float32 in and out."""

    def __init__(self, head: EagleHead) -> None:
        stored = head.embedding.float() if head.embedding.dtype is torch.bfloat16 else head.embedding
        self._embedding: NDArray[Any] = stored.numpy()
        self._angle_per_position = head.angle_per_position
        self._cos, self._sin = self._rotations(FIRST_POSITIONS)
        self._before = _before(head, self._embedding.dtype)
        self._after, self._scores = _after(head), _scores(head)

    def forward(self, tokens: Tensor, hidden: Tensor, positions: Tensor, attend: SlotAttend) -> Tensor:
        """See `EagleHead.forward`; [n] rows."""
        at = positions.numpy().astype(np.int64)
        if (last := int(at.max())) >= len(self._cos):
            self._cos, self._sin = self._rotations(2 * last)
        rows: Float32Array = hidden.numpy()
        queries, fresh, *fused = self._before(
            {
                "embedded": self._embedding.take(tokens.numpy(), axis=0),
                "hidden": rows,
                "positions": at[None],
                "cos": self._cos,
                "sin": self._sin,
            }
        )
        mixed: Float32Array = attend(torch.from_numpy(queries), torch.from_numpy(fresh)).numpy()
        (output,) = self._after({"x": fused[0] if fused else rows, "mixed": mixed})
        return torch.from_numpy(_marked(_marked(output, rows, 1), mixed, (0, 2)))

    def candidates(self, hidden: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """See `heads.candidates`: the likeliest tokens after [n, H]."""
        rows: Float32Array = hidden.numpy()
        log_probs, ids = self._scores({"hidden": rows, "count": np.array([count])})
        return torch.from_numpy(_marked(log_probs, rows, 1)), torch.from_numpy(ids)

    def _rotations(self, positions: int) -> tuple[Float32Array, Float32Array]:
        """Cosines and sines of [positions, D / 2]."""
        angles = torch.arange(positions)[:, None] * self._angle_per_position
        return angles.cos().numpy(), angles.sin().numpy()


def _marked(rows: Float32Array, source: Float32Array, axes: int | tuple[int, ...]) -> Float32Array:
    """`rows`, NaN where `source` is not finite along `axes`: a row's largest magnitude passes over a NaN."""
    flat = source.reshape(-1)
    if not math.isfinite(flat.dot(flat)):
        rows[~np.isfinite(source).all(axis=axes)] = math.nan
    return rows


class GraphLinear:
    """One linear layer: float32 [n, in] -> float32 [n, out]."""

    def __init__(self, weight: Tensor, parts: int = 1) -> None:
        graph = _Graph()
        x = graph.input("x", ["n", weight.shape[1]])
        graph.output(graph.linear(graph.split(x, parts), weight), ["n", weight.shape[0]])
        self._run = graph.session()

    def __call__(self, x: Tensor) -> Tensor:
        (y,) = self._run({"x": x.numpy()})
        return torch.from_numpy(y)


@functools.cache
def graphs_available() -> bool:
    """Whether ONNX Runtime is here, and its integer products are exact on this CPU: AVX2 without VNNI
    saturates partial sums."""
    try:
        import onnx  # noqa: F401
        import onnxruntime  # noqa: F401
    except ImportError:
        log.info("a small head drafts about twice as fast here with %s", install_hint("onnx", "export"))
        return False
    signs = torch.randint(0, 2, (272, 256), generator=torch.Generator().manual_seed(0)) * 2.0 - 1.0
    x, weight = signs[:16], signs[16:]  # every product the largest there is
    return torch.allclose(GraphLinear(weight)(x), x @ weight.T, rtol=1e-5, atol=1e-3)


def _before(head: EagleHead, stored: np.dtype[Any]) -> _Session:
    """embedded as it is stored, hidden [n, H], positions [1, n], cos and sin of all positions -> queries and
    fresh as `SlotAttend` has them; EAGLE-1: the fused vector, where the residual stream begins."""
    c, graph = head.config, _Graph()
    embedded = graph.input("embedded", ["n", c.hidden_size], stored.type)
    if stored != np.float32:
        (embedded,) = graph.op("Cast", embedded, to=FLOAT)
    hidden = graph.input("hidden", ["n", c.hidden_size])
    positions = graph.input("positions", [1, "n"], np.int64)
    cos, sin = (graph.input(name, ["positions", c.head_dim // 2]) for name in ("cos", "sin"))
    if head.embed_norm is not None and head.hidden_norm is not None:
        parts = [graph.norm(embedded, head.embed_norm), graph.norm(hidden, head.hidden_norm)]
    else:
        parts = [graph.linear([embedded, hidden], head.fc.weight, head.fc.bias)]
    weight, bias = head.qkv_proj.weight.detach().float().clone(), None
    weight[: c.num_heads * c.head_dim] /= math.sqrt(c.head_dim)
    if head.qkv_proj.bias is not None:
        bias = head.qkv_proj.bias.detach().float().clone()
        bias[: c.num_heads * c.head_dim] /= math.sqrt(c.head_dim)
    all_heads = c.num_heads + 2 * c.num_kv_heads
    (rows,) = graph.op(
        "Reshape", graph.linear(parts, weight, bias), graph.constant([1, -1, all_heads, c.head_dim])
    )
    (heads,) = graph.op("Transpose", rows, perm=[0, 2, 1, 3])  # [1, heads, n, D]
    sizes = graph.constant([all_heads - c.num_kv_heads, c.num_kv_heads])
    qk, v = graph.op("Split", heads, sizes, outputs=2, axis=1)
    (qk,) = graph.op("RotaryEmbedding", qk, positions, cos, sin, domain=CONTRIB)
    q, k = graph.op("Split", qk, graph.constant([c.num_heads, c.num_kv_heads]), outputs=2, axis=1)
    (queries,) = graph.op("Squeeze", q, graph.constant([0]))
    graph.output(queries, [c.num_heads, "n", c.head_dim])
    (fresh,) = graph.op("Concat", k, v, axis=0)
    graph.output(fresh, [2, c.num_kv_heads, "n", c.head_dim])
    if c.kind is HeadKind.EAGLE1:
        graph.output(parts[0], ["n", c.hidden_size])
    return graph.session()


def _after(head: EagleHead) -> _Session:
    """The residual stream x [n, H] and what attention mixed [heads, n, D] -> the output [n, H]."""
    c, graph = head.config, _Graph()
    x, mixed = graph.input("x", ["n", c.hidden_size]), graph.input("mixed", [c.num_heads, "n", c.head_dim])
    rows = graph.op("Transpose", mixed, perm=[1, 0, 2])
    rows = graph.op("Reshape", *rows, graph.constant([-1, c.num_heads * c.head_dim]))
    (x,) = graph.op("Add", x, graph.linear(rows, head.o_proj.weight))
    gate, up = graph.split(graph.linear([graph.norm(x, head.mlp_norm)], head.gate_up_proj.weight), 2)
    opened = graph.op("Mul", *graph.op("QuickGelu", gate, domain=CONTRIB, alpha=1.0), up)  # SiLU
    (x,) = graph.op("Add", x, graph.linear(opened, head.down_proj.weight))
    graph.output(x, ["n", c.hidden_size])
    return graph.session()


def _scores(head: EagleHead) -> _Session:
    """[n, H] -> log-probabilities and ids of the likeliest tokens, [n, count]; ties by id, as TopK has it."""
    c, graph = head.config, _Graph()
    hidden = graph.input("hidden", ["n", c.hidden_size])
    if head.out_norm is not None:
        hidden = graph.norm(hidden, head.out_norm)
    log_probs = graph.op("LogSoftmax", graph.linear([hidden], head.lm_head), axis=-1)
    best, ids = graph.op("TopK", *log_probs, graph.input("count", [1], np.int64), outputs=2)
    graph.output(best, ["n", "count"])
    graph.output(ids, ["n", "count"], np.int64)
    return graph.session()


class _Session:
    """A loaded graph: arrays by the names of its inputs to arrays in the order of its outputs."""

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

    def __call__(self, arrays: Mapping[str, NDArray[Any]]) -> list[NDArray[Any]]:
        outputs: list[NDArray[Any]] = self._session.run(None, arrays)
        return outputs


class _Graph:
    """A graph under construction, of float32 rows [n, ...]; methods take and return the names of values."""

    def __init__(self) -> None:
        self._nodes: list[Any] = []
        self._constants: list[Any] = []
        self._inputs: list[Any] = []
        self._outputs: list[Any] = []

    def input(self, name: str, shape: Sequence[int | str], dtype: type[np.generic] = np.float32) -> str:
        self._inputs.append(_value(name, dtype, shape))
        return name

    def output(self, value: str, shape: Sequence[int | str], dtype: type[np.generic] = np.float32) -> None:
        self._outputs.append(_value(value, dtype, shape))

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
