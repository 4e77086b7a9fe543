"""`starsd bench head`: a random head of Vicuna-7B's shape, from published files to drafts, and its memory.

The weights say nothing; names, shapes, sizes and the way they go are those of the published head and its
target's embedding and LM head.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import click
import numpy as np
import torch
from safetensors.torch import save_file

from starsd_edge.bench.report import json_option, write_json
from starsd_server.config import HeadSource, ServiceConfig
from starsd_server.emulate.machine import resident_mib
from starsd_server.engine import Engine, Extend, Grow, TreeReady, WorkItem
from starsd_server.heads.grow import GrowthLimits
from starsd_server.scheduling import Limits
from starsd_server.worker import open_engine

__all__ = ["command"]

# lmsys/vicuna-7b-v1.5 and yuhuili/EAGLE-Vicuna-7B-v1.3
HIDDEN, INTERMEDIATE, HEADS, VOCAB = 4096, 11008, 32, 32_000
SHAPE = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_act": "silu",
    "hidden_size": HIDDEN,
    "intermediate_size": INTERMEDIATE,
    "max_position_embeddings": 2048,
    "model_type": "llama",
    "num_attention_heads": HEADS,
    "num_hidden_layers": 1,
    "num_key_value_heads": HEADS,
    "rms_norm_eps": 1e-06,
    "vocab_size": VOCAB,
}
MAX_LEN = 2048
PROMPT = 64  # tokens
ROUNDS = 3
TREE = GrowthLimits(max_nodes=60, top_k=10, steps=6)
SLACK_MIB = 256  # the allocator's, torch's scratch and the rows of a step


@dataclass(frozen=True, slots=True)
class Found:
    """What was measured. Memory is what loading and drafting added to a process with torch in it."""

    convert_s: float
    load_s: float
    weights_mib: float
    kv_mib: float
    loaded_mib: float
    drafted_mib: float
    prompt_ms: float
    tree_ms: float
    tree_nodes: int

    @property
    def within(self) -> bool:
        return self.drafted_mib <= self.weights_mib + self.kv_mib + SLACK_MIB


@click.command("head")
@click.option("--sessions", default=4, show_default=True, type=click.IntRange(1), help="KV slots of 2,048.")
@click.option("--threads", default=2, show_default=True, type=click.IntRange(1))
@json_option
def command(sessions: int, threads: int, json_file: Path | None) -> None:
    """Convert, load and draft with a random head of Vicuna-7B's shape; needs 2.5 GB of disk and memory."""
    with tempfile.TemporaryDirectory() as name:
        found = measure(Path(name), sessions, threads, lambda text: click.echo(text, err=True))
    click.echo(
        f"converted in {found.convert_s:.1f} s, loaded in {found.load_s:.1f} s\n"
        f"weights {found.weights_mib:.0f} MiB, KV of {sessions} x {MAX_LEN} tokens {found.kv_mib:.0f} MiB\n"
        f"memory: {found.loaded_mib:.0f} MiB after loading, {found.drafted_mib:.0f} MiB after drafting\n"
        f"a prompt of {PROMPT} tokens {found.prompt_ms:.0f} ms, a tree of {found.tree_nodes} nodes "
        f"{found.tree_ms:.0f} ms"
    )
    write_json(json_file, asdict(found))
    if not found.within:
        click.echo(f"memory exceeds weights and KV by more than {SLACK_MIB} MiB", err=True)
        sys.exit(1)


def measure(folder: Path, sessions: int, threads: int, report: Callable[[str], None]) -> Found:
    report("writing a head and a target's two matrices")
    published, target, head = folder / "published", folder / "target", folder / "head"
    write_published(published, target)
    report("converting")
    started_s = time.monotonic()
    convert = [sys.executable, "-m", "starsd_edge", "draft", "convert", str(published), str(target)]
    subprocess.run([*convert, "--out", str(head)], check=True, stdout=subprocess.DEVNULL)
    convert_s = time.monotonic() - started_s
    torch.set_num_threads(threads)
    torch.zeros(1)
    before_mib, started_s = resident_mib(), time.monotonic()
    source = HeadSource(str(head))
    limits = Limits(max_sessions=sessions)
    engine = open_engine(ServiceConfig(heads=(source,), bind="", folder="", limits=limits), source)
    load_s, loaded_mib = time.monotonic() - started_s, resident_mib() - before_mib
    report("drafting")
    prompt_ms, tree_ms, nodes = draft(engine, sessions)
    weights = engine.head.num_bytes
    return Found(
        convert_s=convert_s,
        load_s=load_s,
        weights_mib=weights / 2**20,
        kv_mib=engine.kv.num_bytes / 2**20,
        loaded_mib=loaded_mib,
        drafted_mib=resident_mib() - before_mib,
        prompt_ms=prompt_ms,
        tree_ms=tree_ms,
        tree_nodes=nodes,
    )


def write_published(head: Path, target: Path) -> None:
    """A head as SafeAILab lays it out, and a Hugging Face folder with what a head borrows of its target."""
    h, f = HIDDEN, INTERMEDIATE
    shapes = {
        "fc.weight": (h, 2 * h),
        "fc.bias": (h,),
        **{f"layers.0.self_attn.{name}_proj.weight": (h, h) for name in "qkvo"},
        "layers.0.post_attention_layernorm.weight": (h,),
        "layers.0.mlp.gate_proj.weight": (f, h),
        "layers.0.mlp.up_proj.weight": (f, h),
        "layers.0.mlp.down_proj.weight": (h, f),
    }
    borrowed = {"model.embed_tokens.weight": (VOCAB, h), "lm_head.weight": (VOCAB, h)}
    for folder, tensors in ((head, shapes), (target, borrowed)):
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(SHAPE))
        save_file({name: random(shape) for name, shape in tensors.items()}, folder / "model.safetensors")


def random(shape: tuple[int, ...]) -> torch.Tensor:
    """Outputs of about the size of the inputs."""
    return torch.empty(shape, dtype=torch.float16).normal_(0.0, shape[-1] ** -0.5)


def draft(engine: Engine, sessions: int) -> tuple[float, float, int]:
    """Milliseconds of a prompt and of a tree of one session, best of some rounds, and the tree's nodes; all
    sessions are used."""
    rng = np.random.default_rng(0)
    prompt_ms, tree_ms, nodes = [], [], 0
    for slot in range(sessions):
        session = engine.reset(slot)
        for round_ in range(ROUNDS):
            n = PROMPT if round_ == 0 else 2
            tokens = rng.integers(0, VOCAB, n).astype(np.int32)
            features = rng.standard_normal((n, HIDDEN)).astype(np.float16)
            started_s = time.monotonic()
            engine.step([Extend(session, tokens, features, session.committed)])
            extended_s = time.monotonic()
            none = tokens[:0], features[:0]
            items: list[WorkItem] = [Extend(session, *none, session.committed, TREE)]
            while True:
                (outcome,) = engine.step(items)
                if isinstance(outcome, TreeReady):
                    break
                items = [Grow(session)]
            nodes = len(outcome.tokens) + 1
            tree_ms.append((time.monotonic() - extended_s) * 1e3)
            if round_ == 0:
                prompt_ms.append((extended_s - started_s) * 1e3)
    return min(prompt_ms), min(tree_ms), nodes
