"""Does a model fit this machine? Asked before loading, answered with what would fit."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from starsd_edge.bundle import Manifest, Shapes
from starsd_edge.errors import ResourceError

__all__ = ["Needs", "available_bytes", "check_fits", "needs_of"]

MEMINFO = Path("/proc/meminfo")
# Beside weights and cache: the runtime itself, logits and features of a tree, the interpreter.
OVERHEAD_BYTES = 256 << 20
# A context shorter than this is of no use for a chat.
LEAST_CONTEXT = 512
# Bits a weight takes on disk and in memory, scales included.
BITS_PER_WEIGHT = {"fp32": 32.0, "fp16": 16.0, "int8": 8.25, "int4": 4.5}


@dataclass(frozen=True, slots=True)
class Needs:
    """Bytes a model takes: its weights once, its cache for every token of every context."""

    weight_bytes: int
    kv_bytes_per_token: int
    num_weights: int


def needs_of(manifest: Manifest, max_contexts: int = 1) -> Needs:
    """What the manifest of a bundle says of its size; the cache is that of all contexts together."""
    weights = sum(entry.num_bytes for name, entry in manifest.files.items() if name.startswith("model."))
    return Needs(weights, max_contexts * _kv_bytes(manifest), _num_weights(manifest.shapes))


def available_bytes(meminfo: Path = MEMINFO) -> int | None:
    """Memory that can be used without swapping; None where the system does not say."""
    try:
        lines = meminfo.read_text("ascii").splitlines()
    except OSError:
        return None
    for line in lines:
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def check_fits(name: str, needs: Needs, wanted_len: int, free_bytes: int | None) -> int:
    """The context length that fits, at most `wanted_len`.

    Raises ResourceError that says what would fit, when not even a short context does.
    """
    if free_bytes is None:
        return wanted_len
    room = free_bytes - OVERHEAD_BYTES - needs.weight_bytes
    fits = max(room, 0) // needs.kv_bytes_per_token
    if fits >= min(LEAST_CONTEXT, wanted_len):
        return min(wanted_len, fits)
    least = LEAST_CONTEXT * needs.kv_bytes_per_token
    raise ResourceError(
        f"{name} needs {_size(needs.weight_bytes + OVERHEAD_BYTES + least)}, {_size(free_bytes)} are free: "
        + _advice(needs, free_bytes - OVERHEAD_BYTES - least)
    )


def _advice(needs: Needs, weight_room: int) -> str:
    for quant in ("fp16", "int8", "int4"):
        size = int(needs.num_weights * BITS_PER_WEIGHT[quant] / 8)
        if size < needs.weight_bytes and size <= weight_room:
            return f"the same model exported with --quant {quant} would fit ({_size(size)})"
    if weight_room <= 0:
        return "no model fits; end other programs"
    billions = weight_room * 8 / BITS_PER_WEIGHT["int4"] / 1e9
    return f"up to {billions:.1f} billion weights would fit with --quant int4; or end other programs"


def _kv_bytes(manifest: Manifest) -> int:
    """Of a token, as the flavour's runtime keeps them: ONNX Runtime's values have a column of ones beside
    them and are float32, TensorRT's are as wide as its arithmetic."""
    shapes = manifest.shapes
    heads = shapes.num_layers * shapes.num_kv_heads
    if manifest.flavour == "tensorrt":
        return heads * 2 * shapes.head_dim * (4 if manifest.quantisation == "fp32" else 2)
    return heads * (2 * shapes.head_dim + 1) * 4


def _num_weights(shapes: Shapes) -> int:
    """Of a Llama-architecture model with its own LM head."""
    hidden = shapes.hidden_size
    attention = 2 * hidden * shapes.head_dim * (shapes.num_heads + shapes.num_kv_heads)
    layer = attention + 3 * hidden * shapes.ffn_size
    return shapes.num_layers * layer + 2 * shapes.vocab_size * hidden


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.1f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.0f} MB"
