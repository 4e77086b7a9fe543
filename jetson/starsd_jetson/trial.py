"""Try a bundle out before it goes live: record its self-test and judge its quality."""

from __future__ import annotations

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass

import numpy as np
from tokenizers import Tokenizer

from starsd_edge.bundle import Bundle, Quality, SelfTest
from starsd_edge.errors import ResourceError
from starsd_edge.types import Float32Array, TokenArray
from starsd_jetson.graph.reference import ReferenceRun
from starsd_jetson.graph.shape import ModelShape
from starsd_jetson.onnx_target import OnnxTarget
from starsd_jetson.quality import judge
from starsd_jetson.sample_text import CALIBRATION, HELD_OUT
from starsd_jetson.self_test import make_self_test
from starsd_jetson.standard_target import StandardTarget

__all__ = ["Trial", "reference_run", "runtime_here", "try_out"]

PART_TOKENS = 384  # of each sample text: enough to see every outlier channel, seconds even for a large model
# Keys and values of the judged text. A token's take 1 MiB in a 7B model whose heads share none.
JUDGED_KV_BYTES = 128 << 20
# A bundle above this runs in a process of its own: the exporter's memory stays bounded by the largest
# tensors.
APART_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class Trial:
    self_test: SelfTest
    quality: Quality


def reference_run(shape: ModelShape, tokenizer_json: str) -> ReferenceRun | None:
    """A run of the source over both sample texts; None when its tokenizer makes no two tokens of them."""
    tokenizer = Tokenizer.from_str(tokenizer_json)

    def tokens(text: str) -> TokenArray:
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        known = [token for token in ids if token < shape.vocab_size]
        return np.array(known[: min(PART_TOKENS, shape.max_len // 2)], np.int32)

    calibration, held_out = tokens(CALIBRATION), tokens(HELD_OUT)
    if not len(calibration) or not len(held_out):
        return None
    return ReferenceRun(shape, calibration, held_out[: JUDGED_KV_BYTES // kv_bytes(shape)])


def kv_bytes(shape: ModelShape) -> int:
    """Of a token's keys and values in float32, all layers."""
    return shape.num_layers * shape.num_kv_heads * (2 * shape.head_dim + 1) * 4


def try_out(bundle: Bundle, reference: ReferenceRun | None, logits: Float32Array | None) -> Trial:
    """Load the bundle, record its self-test and compare it with the source's `logits` of the held-out
    text.
    """
    tokens = None if reference is None else reference.judged
    size = sum(entry.num_bytes for entry in bundle.manifest.files.values())
    if size < APART_BYTES:
        return run(bundle, tokens, logits)
    context = multiprocessing.get_context("spawn")
    try:
        with ProcessPoolExecutor(1, mp_context=context) as pool:
            return pool.submit(run, bundle, tokens, logits).result()
    except BrokenProcessPool as error:
        raise ResourceError(
            f"the bundle of {size >> 20} MiB could not be tried out: "
            "its process ended, most likely for lack of memory"
        ) from error


def runtime_here(flavour: str) -> type[OnnxTarget] | type[StandardTarget]:
    """What can run a flavour on the machine that exports it."""
    return OnnxTarget if flavour == "onnxruntime" else StandardTarget


def run(bundle: Bundle, tokens: TokenArray | None, logits: Float32Array | None) -> Trial:
    target = runtime_here(bundle.manifest.flavour).load(bundle)
    quality = Quality() if tokens is None or logits is None else judge(target, tokens, logits)
    return Trial(make_self_test(bundle, target), quality)
