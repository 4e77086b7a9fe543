"""How fast a bundle's model runs on this machine, alone and in turn with llama.cpp on the same weights."""

from __future__ import annotations

import importlib
import importlib.util
import multiprocessing
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from starsd_edge.bundle import Bundle
from starsd_edge.decoding.decoder import GUARD_PER_NOISE
from starsd_edge.decoding.tree import DraftTree
from starsd_edge.errors import MissingDependencyError, ResourceError
from starsd_jetson.calibrate import measure_costs, probe_tokens
from starsd_jetson.context import ContextTarget

__all__ = ["PROMPT_TOKENS", "STEPS", "TargetSpeed", "check_peer", "measure", "measure_apart"]

PROMPT_TOKENS = 128
STEPS = 32  # plain steps a round; rounds of ours and the peer's alternate
ROUNDS = 5
CONTEXT = 512  # tokens: more than any pass here needs, and what a GPU's cache is allocated for
PROCESS = Path("/proc/self/status")

Steps: TypeAlias = Callable[[], float]
"""Runs STEPS plain steps of something and returns their seconds."""


@dataclass(frozen=True, slots=True)
class TargetSpeed:
    """One run of the benchmark.

    threads                  0 where the runtime has no say in them
    first_token_s            a prompt of PROMPT_TOKENS, from an empty cache
    load_to_first_token_s    the same, with loading the bundle before it
    kv_bytes_copied_per_step past rows that a plain step moved; growing the cache is counted apart
    peak_memory_bytes        of the process, before a peer was loaded into it
    device_memory_bytes      of a GPU, beside that; 0 without one
    noise                    largest logit difference between a tree and plain steps; 0 when bitwise
    guard_rate               share of the plain steps' choices that a tree could not be trusted with: each
                             costs a plain step more when it comes up in a tree
    peer_tokens_per_s        llama.cpp, 0 when it was not asked for
    """

    bundle: str
    quantisation: str
    threads: int
    plain_tokens_per_s: float
    first_token_s: float
    load_to_first_token_s: float
    costs_s: dict[int, float]
    kv_bytes_copied_per_step: float
    kv_bytes_copied_by_growth: int
    peak_memory_bytes: int
    device_memory_bytes: int
    bitwise: bool
    exact_tree: bool
    noise: float
    guard_rate: float
    peer_tokens_per_s: float = 0.0

    @property
    def ratio(self) -> float:
        """Ours over the peer's."""
        return self.plain_tokens_per_s / self.peer_tokens_per_s if self.peer_tokens_per_s else 0.0


def measure_apart(
    bundle: Path, runtime: type[ContextTarget], threads: int, peer_gguf: Path | None
) -> TargetSpeed:
    """`measure` in a process of its own: its peak of memory is nobody else's."""
    context = multiprocessing.get_context("spawn")
    try:
        with ProcessPoolExecutor(1, mp_context=context) as pool:
            return pool.submit(_measure_with_gguf, bundle, runtime, threads, peer_gguf).result()
    except BrokenProcessPool as error:
        raise ResourceError(
            f"{bundle}: the process that measured it ended, most likely for lack of memory"
        ) from error


def _measure_with_gguf(
    bundle: Path, runtime: type[ContextTarget], threads: int, gguf: Path | None
) -> TargetSpeed:
    open_peer = partial(llama_cpp, gguf, threads) if gguf is not None else None
    return measure(Bundle.open(bundle), runtime, threads, open_peer)


def measure(
    bundle: Bundle,
    runtime: type[ContextTarget],
    threads: int,
    open_peer: Callable[[], Steps] | None = None,
) -> TargetSpeed:
    """Medians of ROUNDS."""
    start = time.perf_counter()
    target = runtime.load(bundle, threads or None, CONTEXT)
    target.prefill(probe_tokens(target, PROMPT_TOKENS))
    load_to_first_token_s = time.perf_counter() - start
    curve = measure_costs(target)
    round_of(target, [])
    peak_memory_bytes, device_memory_bytes = peak_bytes(), target.device_bytes()
    peer = open_peer() if open_peer is not None else None
    ours, theirs, first = [], [], []
    margins: list[float] = []
    before = target.rows.moved_bytes
    for _ in range(ROUNDS):
        first_token_s, seconds = round_of(target, margins)
        first.append(first_token_s)
        ours.append(seconds)
        if peer is not None:
            theirs.append(peer())
    invariance = target.spec.invariance
    return TargetSpeed(
        bundle=str(bundle.path),
        quantisation=bundle.manifest.quantisation,
        threads=threads,
        plain_tokens_per_s=STEPS / float(np.median(ours)),
        first_token_s=float(np.median(first)),
        load_to_first_token_s=load_to_first_token_s,
        costs_s=dict(zip(curve.sizes, curve.seconds, strict=True)),
        kv_bytes_copied_per_step=(target.rows.moved_bytes - before) / (ROUNDS * STEPS),
        kv_bytes_copied_by_growth=target.rows.grown_bytes,
        peak_memory_bytes=peak_memory_bytes,
        device_memory_bytes=device_memory_bytes,
        bitwise=invariance.bitwise,
        exact_tree=invariance.exact_tree,
        noise=invariance.noise,
        guard_rate=float(np.mean(np.array(margins) < GUARD_PER_NOISE * invariance.noise)),
        peer_tokens_per_s=STEPS / float(np.median(theirs)) if theirs else 0.0,
    )


def round_of(target: ContextTarget, margins: list[float]) -> tuple[float, float]:
    """Seconds of the prompt, and of the steps after it."""
    target.truncate(0)
    start = time.perf_counter()
    target.prefill(probe_tokens(target, PROMPT_TOKENS))
    first_token_s = time.perf_counter() - start
    target.rows.reserve(PROMPT_TOKENS + STEPS)
    return first_token_s, plain_steps(target, margins)


def plain_steps(target: ContextTarget, margins: list[float]) -> float:
    """Seconds of STEPS greedy steps, the choice of the token included; adds by how much each was chosen."""
    token = 1
    seen = []
    start = time.perf_counter()
    for _ in range(STEPS):
        out = target.forward(DraftTree.root_only(token, target.kv_len + 1))
        target.keep([0])
        token = int(out.logits[0].argmax())
        seen.append(out.logits[0])
    seconds = time.perf_counter() - start
    margins += [float(np.ptp(np.partition(logits, -2)[-2:])) for logits in seen]
    return seconds


def peak_bytes(status: Path = PROCESS) -> int:
    """Most memory that this process has had so far; 0 where the system does not say. (ru_maxrss would begin
    with that of the process which started this one.)"""
    try:
        lines = status.read_text("ascii", "replace").splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")), 0)


def check_peer() -> None:
    """Raises MissingDependencyError where llama.cpp is not installed."""
    if importlib.util.find_spec("llama_cpp") is None:
        raise MissingDependencyError("--peer llama.cpp needs the package: pip install llama-cpp-python")


def llama_cpp(gguf: Path, threads: int) -> Steps:
    """STEPS greedy steps of llama.cpp on the same GGUF, after a prompt of the same length."""
    library = importlib.import_module("llama_cpp")
    model: Any = library.Llama(
        str(gguf), n_ctx=1024, n_threads=threads, n_threads_batch=threads, verbose=False
    )
    prompt = [int(token) for token in np.arange(1, PROMPT_TOKENS + 1) * 7919 % model.n_vocab()]

    def steps() -> float:
        model.reset()
        model.eval(prompt)
        token = 1
        start = time.perf_counter()
        for _ in range(STEPS):
            model.eval([token])
            token = int(np.argmax(model.scores[model.n_tokens - 1]))
        return time.perf_counter() - start

    return steps
