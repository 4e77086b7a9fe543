"""`starsd bench target`: how fast a bundle's model runs here, and next to llama.cpp with the same weights."""

from __future__ import annotations

import dataclasses
import resource
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np
from rich.console import Console
from rich.table import Table

from starsd_edge.bench.report import json_option, write_json
from starsd_edge.bundle import Bundle
from starsd_edge.decoding.decoder import GUARD_PER_NOISE
from starsd_edge.decoding.tree import DraftTree
from starsd_edge.errors import MissingDependencyError
from starsd_jetson import embedded
from starsd_jetson.calibrate import measure_costs, probe_tokens
from starsd_jetson.onnx_target import OnnxTarget

__all__ = ["TargetSpeed", "command", "measure"]

PROMPT_TOKENS = 128
STEPS = 32  # plain steps a round; rounds of ours and the peer's alternate
ROUNDS = 5


@dataclass(frozen=True, slots=True)
class TargetSpeed:
    """One run of the benchmark.

    first_token_s            a prompt of PROMPT_TOKENS, from an empty cache
    load_to_first_token_s    the same, with loading the bundle before it
    kv_bytes_copied_per_step past rows that a plain step moved; growing the cache is counted apart
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
    bitwise: bool
    exact_tree: bool
    noise: float
    guard_rate: float
    peer_tokens_per_s: float = 0.0

    @property
    def ratio(self) -> float:
        """Ours over the peer's."""
        return self.plain_tokens_per_s / self.peer_tokens_per_s if self.peer_tokens_per_s else 0.0


def measure(bundle: Bundle, threads: int, peer: Callable[[], float] | None = None) -> TargetSpeed:
    """Medians of ROUNDS; `peer` runs STEPS plain steps of something else and returns their seconds."""
    start = time.perf_counter()
    target = OnnxTarget.load(bundle, threads)
    target.prefill(probe_tokens(target, PROMPT_TOKENS))
    load_to_first_token_s = time.perf_counter() - start
    ours, theirs, first = [], [], []
    margins: list[float] = []
    copied = 0
    for _ in range(ROUNDS):
        target.truncate(0)
        start = time.perf_counter()
        target.prefill(probe_tokens(target, PROMPT_TOKENS))
        first.append(time.perf_counter() - start)
        target.cache.reserve(PROMPT_TOKENS + STEPS)
        before = target.cache.moved_bytes
        ours.append(plain_steps(target, margins))
        copied += target.cache.moved_bytes - before
        if peer is not None:
            theirs.append(peer())
    curve = measure_costs(target)
    invariance = target.spec.invariance
    return TargetSpeed(
        bundle=str(bundle.path),
        quantisation=bundle.manifest.quantisation,
        threads=threads,
        plain_tokens_per_s=STEPS / float(np.median(ours)),
        first_token_s=float(np.median(first)),
        load_to_first_token_s=load_to_first_token_s,
        costs_s=dict(zip(curve.sizes, curve.seconds, strict=True)),
        kv_bytes_copied_per_step=copied / (ROUNDS * STEPS),
        kv_bytes_copied_by_growth=target.cache.grown_bytes,
        peak_memory_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        bitwise=invariance.bitwise,
        exact_tree=invariance.exact_tree,
        noise=invariance.noise,
        guard_rate=float(np.mean(np.array(margins) < GUARD_PER_NOISE * invariance.noise)),
        peer_tokens_per_s=STEPS / float(np.median(theirs)) if theirs else 0.0,
    )


def plain_steps(target: OnnxTarget, margins: list[float]) -> float:
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


def llama_cpp(gguf: Path, threads: int) -> Callable[[], float]:
    """STEPS greedy steps of llama.cpp on the same GGUF, after a prompt of the same length."""
    try:
        from llama_cpp import Llama
    except ImportError as error:
        raise MissingDependencyError(
            "--peer llama.cpp needs the package: pip install llama-cpp-python"
        ) from error
    model: Any = Llama(str(gguf), n_ctx=1024, n_threads=threads, n_threads_batch=threads, verbose=False)
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


@click.command(name="target")
@click.argument("bundle", default="embedded")
@click.option("--quant", default="int8", show_default=True, help="Precision of the embedded model.")
@click.option("--threads", type=int, multiple=True, default=(1, 2), show_default=True)
@click.option("--peer", type=click.Choice(["llama.cpp"]), help="Run this next to it, interleaved.")
@click.option(
    "--gguf", type=click.Path(path_type=Path), help="The peer's weights; the embedded model's by default."
)
@json_option
def command(
    bundle: str,
    quant: str,
    threads: tuple[int, ...],
    peer: str | None,
    gguf: Path | None,
    json_file: Path | None,
) -> None:
    """Plain speed and the cost of trees for BUNDLE, on this machine."""
    opened = Bundle.open(embedded.bundle_path(quant) if bundle == "embedded" else Path(bundle))
    speeds = []
    for count in threads:
        rival = llama_cpp(gguf or embedded.gguf_path(), count) if peer else None
        speeds.append(measure(opened, count, rival))
    Console().print(table(speeds))
    for speed in speeds:
        if speed.peer_tokens_per_s:
            click.echo(f"{speed.threads} threads: {speed.ratio:.2f}x {peer}")
    rows = [dataclasses.asdict(speed) | {"ratio": speed.ratio} for speed in speeds]
    write_json(json_file, {"peer": peer, "rows": rows})


def table(speeds: list[TargetSpeed]) -> Table:
    """A column a number of threads."""
    out = Table(title=f"{speeds[0].bundle} ({speeds[0].quantisation})")
    out.add_column("threads")
    for speed in speeds:
        out.add_column(str(speed.threads), justify="right")
    columns = [lines(speed) for speed in speeds]
    for label in columns[0]:
        out.add_row(label, *(column[label] for column in columns))
    return out


def lines(speed: TargetSpeed) -> dict[str, str]:
    costs = {f"{size} rows, ms": f"{seconds * 1e3:.1f}" for size, seconds in speed.costs_s.items()}
    return {
        "plain tokens/s": f"{speed.plain_tokens_per_s:.1f}",
        f"first token after {PROMPT_TOKENS}, ms": f"{speed.first_token_s * 1e3:.0f}",
        "load to first token, s": f"{speed.load_to_first_token_s:.2f}",
        **costs,
        "KV bytes copied a step": f"{speed.kv_bytes_copied_per_step:.0f}",
        "peak memory, MB": f"{speed.peak_memory_bytes / 1e6:.0f}",
        "trees against plain steps": exactness(speed),
        "peer tokens/s": f"{speed.peer_tokens_per_s:.1f}" if speed.peer_tokens_per_s else "-",
    }


def exactness(speed: TargetSpeed) -> str:
    if speed.bitwise:
        return "same bits"
    if speed.exact_tree:
        return f"noise {speed.noise:.2g}, {speed.guard_rate:.0%} guarded"
    return f"noise {speed.noise:.2g}: plain only"
