"""`starsd bench target`: how fast a bundle's model runs here, and next to llama.cpp with the same weights."""

from __future__ import annotations

import dataclasses
import importlib
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from starsd_edge.bench.report import json_option, write_json
from starsd_edge.cli.model_options import provider_option
from starsd_edge.cli.runtime import EMBEDDED, ModelChoice, open_bundle, target_class
from starsd_edge.errors import UsageError
from starsd_jetson.target_speed import PROMPT_TOKENS, TargetSpeed, check_peer, measure_apart

__all__ = ["command"]

CPU_THREADS = (1, 2)


@click.command(name="target")
@click.argument("bundle", default=EMBEDDED)
@click.option("--quant", default="int8", show_default=True, help="Precision of the embedded model.")
@click.option("--threads", type=click.IntRange(1), multiple=True, help="Of a CPU; repeatable.  [1 and 2]")
@click.option("--peer", type=click.Choice(["llama.cpp"]), help="Run this next to it, interleaved.")
@click.option(
    "--gguf",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="The peer's weights; the embedded model's for the embedded model.",
)
@provider_option
@json_option
def command(
    bundle: str,
    quant: str,
    threads: tuple[int, ...],
    peer: str | None,
    gguf: Path | None,
    provider: str | None,
    json_file: Path | None,
) -> None:
    """Plain speed, the cost of trees and their noise for BUNDLE, on this machine, in the runtime that serves
    it. Every row is measured in a process of its own."""
    if peer and gguf is None and bundle != EMBEDDED:
        raise UsageError(f"--peer {peer} needs the weights of {bundle} as a GGUF file: --gguf FILE")
    if peer:
        check_peer()
    opened = open_bundle(ModelChoice(bundle, quant), lambda line: click.echo(line, err=True))
    runtime = target_class(opened.manifest, provider)
    if threads and not runtime.uses_threads:
        raise UsageError(f"--threads is for a CPU: {bundle} runs on a GPU here")
    if peer and gguf is None:
        gguf = importlib.import_module("starsd_jetson.embedded").gguf_path()
    counts = threads or (CPU_THREADS if runtime.uses_threads else (0,))
    speeds = [measure_apart(opened.path, runtime, count, gguf if peer else None) for count in counts]
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
        out.add_column(str(speed.threads or "-"), justify="right")
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
        "KV bytes copied as it grew": f"{speed.kv_bytes_copied_by_growth}",
        "peak memory, MB": f"{speed.peak_memory_bytes / 1e6:.0f}",
        "GPU memory, MB": f"{speed.device_memory_bytes / 1e6:.0f}" if speed.device_memory_bytes else "-",
        "trees against plain steps": exactness(speed),
        "peer tokens/s": f"{speed.peer_tokens_per_s:.1f}" if speed.peer_tokens_per_s else "-",
    }


def exactness(speed: TargetSpeed) -> str:
    if speed.bitwise:
        return "same bits"
    if speed.exact_tree:
        return f"noise {speed.noise:.2g}, {speed.guard_rate:.0%} guarded"
    return f"noise {speed.noise:.2g}: plain only"
