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
from typing import Any, TypeAlias

import click
import numpy as np
import torch
from safetensors.torch import save_file

from starsd_edge.bench.report import json_option, write_json
from starsd_server.config import HeadSource, ServiceConfig
from starsd_server.emulate.machine import resident_mib
from starsd_server.engine import Engine
from starsd_server.heads.grow import GrowthLimits
from starsd_server.heads.head import HeadKind
from starsd_server.scheduling import Limits
from starsd_server.step import Extend, Grow, TreeReady, WorkItem
from starsd_server.worker import open_engine

__all__ = ["command", "measure"]

Shapes: TypeAlias = dict[str, tuple[int, ...]]

# lmsys/vicuna-7b-v1.5 and yuhuili/EAGLE-Vicuna-7B-v1.3
VICUNA_7B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "max_position_embeddings": 2048,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "rms_norm_eps": 1e-06,
    "vocab_size": 32_000,
}
TARGET_LAYERS = 32
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
@click.option("--eagle3", is_flag=True, help="An EAGLE-3 head instead of an EAGLE-1 head.")
@json_option
def command(sessions: int, threads: int, json_file: Path | None, *, eagle3: bool) -> None:
    """Convert, load and draft with a random head of Vicuna-7B's shape; needs 2.5 GB of disk and memory."""
    kind = HeadKind.EAGLE3 if eagle3 else HeadKind.EAGLE1
    with tempfile.TemporaryDirectory() as name:
        found = measure(
            Path(name), VICUNA_7B, kind, sessions, threads, lambda text: click.echo(text, err=True)
        )
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


def measure(
    folder: Path,
    shape: dict[str, Any],
    kind: HeadKind,
    sessions: int,
    threads: int,
    report: Callable[[str], None],
) -> Found:
    """With a head of `shape`, which is a published config.json less the layers."""
    report("writing a head and a target's two matrices")
    published, target, head = folder / "published", folder / "target", folder / "head"
    write_published(published, target, shape, kind)
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
    engine = open_engine(ServiceConfig(heads=(source,), bind="", folder="", limits=limits), source, MAX_LEN)
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


def write_published(head: Path, target: Path, shape: dict[str, Any], kind: HeadKind) -> None:
    """A head as SafeAILab lays it out, and a Hugging Face folder with what a head borrows of its target."""
    h, vocab = shape["hidden_size"], shape["vocab_size"]
    borrowed = {"model.embed_tokens.weight": (vocab, h), "lm_head.weight": (vocab, h)}
    own = eagle1_shapes(shape) if kind is HeadKind.EAGLE1 else eagle3_shapes(shape)
    for folder, layers, tensors in ((head, 1, own), (target, TARGET_LAYERS, borrowed)):
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(shape | {"num_hidden_layers": layers}))
        save_file({name: random(size) for name, size in tensors.items()}, folder / "model.safetensors")
    (target / "tokenizer.model").write_bytes(b"random")  # nothing but its hash is asked for


def eagle1_shapes(shape: dict[str, Any]) -> Shapes:
    h = shape["hidden_size"]
    return {"fc.weight": (h, 2 * h), "fc.bias": (h,), **layer_shapes("layers.0", shape, h)}


def eagle3_shapes(shape: dict[str, Any]) -> Shapes:
    h = shape["hidden_size"]
    return {
        "fc.weight": (h, 3 * h),
        "norm.weight": (h,),
        "lm_head.weight": (shape["vocab_size"], h),
        "midlayer.hidden_norm.weight": (h,),
        "midlayer.input_layernorm.weight": (h,),
        **layer_shapes("midlayer", shape, 2 * h),
    }


def layer_shapes(name: str, shape: dict[str, Any], attention_in: int) -> Shapes:
    h, f = shape["hidden_size"], shape["intermediate_size"]
    return {
        **{f"{name}.self_attn.{letter}_proj.weight": (h, attention_in) for letter in "qkv"},
        f"{name}.self_attn.o_proj.weight": (h, h),
        f"{name}.post_attention_layernorm.weight": (h,),
        f"{name}.mlp.gate_proj.weight": (f, h),
        f"{name}.mlp.up_proj.weight": (f, h),
        f"{name}.mlp.down_proj.weight": (h, f),
    }


def random(shape: tuple[int, ...]) -> torch.Tensor:
    """Outputs of about the size of the inputs."""
    return torch.empty(shape, dtype=torch.float16).normal_(0.0, shape[-1] ** -0.5)


def draft(engine: Engine, sessions: int) -> tuple[float, float, int]:
    """Milliseconds of a prompt and of a tree of one session, best of some rounds, and the tree's nodes; all
    sessions are used."""
    rng, config = np.random.default_rng(0), engine.head.config
    prompt_ms, tree_ms, nodes = [], [], 0
    for slot in range(sessions):
        session = engine.reset(slot)
        for round_ in range(ROUNDS):
            n = PROMPT if round_ == 0 else 2
            tokens = rng.integers(0, config.vocab_size, n).astype(np.int32)
            features = rng.standard_normal((n, config.hidden_size)).astype(np.float16)
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
