"""`starsd draft train`: a draft head for any exported model, from text that the model writes itself."""

from __future__ import annotations

import importlib
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from starsd_server.train.evaluate import Acceptance
    from starsd_server.train.loop import Progress

__all__ = ["command"]


@click.command("train")
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Folder to write the head to.")
@click.option(
    "--work", type=click.Path(path_type=Path), help="Folder for texts and checkpoints.  [default: OUT.work]"
)
@click.option("--name", help="Name of the head.  [default: the folder's]")
@click.option("--tokens", default=500_000, show_default=True, help="Tokens of chats that the model writes.")
@click.option(
    "--text",
    "texts",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    multiple=True,
    help="Plain text that the model reads besides; cheap. May be repeated.",
)
@click.option(
    "--chats",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    multiple=True,
    help="Chats the model wrote before, as JSON lines {t: token ids, s: index of the answer, temp}; cheap.",
)
@click.option("--steps", default=3000, show_default=True, help="Updates.")
@click.option("--rows", default=2048, show_default=True, help="Rows of a batch.")
@click.option("--unroll", default=3, show_default=True, help="Draft steps the head is trained for.")
@click.option("--draft-vocab", default=8192, show_default=True, help="Tokens the head can propose.")
@click.option("--seed", default=0, show_default=True, help="Same seed, same texts and same head.")
@click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True)
@click.option("--threads", type=int, help="CPU threads.  [default: all]")
@click.option("--json", "as_json", is_flag=True, help="Print the acceptance reached as JSON.")
def command(
    bundle: Path,
    out: Path,
    work: Path | None,
    name: str | None,
    tokens: int,
    texts: Sequence[Path],
    chats: Sequence[Path],
    steps: int,
    rows: int,
    unroll: int,
    draft_vocab: int,
    seed: int,
    device: str,
    threads: int | None,
    as_json: bool,
) -> None:
    """Train an EAGLE head for the model in BUNDLE.

    The model first writes chats by itself and reads the given texts; then the head learns to guess it. Each
    part goes on where it was interrupted: run the same command again.
    """
    import torch

    from starsd_edge.bundle import Bundle
    from starsd_edge.errors import UsageError
    from starsd_server.train.loop import Settings
    from starsd_server.train.run import Listener, Plan, collect_texts, train_head

    if device == "cuda" and not torch.cuda.is_available():
        raise UsageError("no CUDA GPU can be used here; train with --device cpu")
    if threads:
        torch.set_num_threads(threads)
    work = work or out.with_name(out.name + ".work")
    opened = Bundle.open(bundle)
    settings = Settings(rows=rows, steps=steps, unroll=unroll, cooldown=max(1, steps // 4), seed=seed)
    plan = Plan(
        chat_tokens=tokens,
        texts=texts,
        chats=chats,
        draft_vocab_size=draft_vocab,
        device=device,
        settings=settings,
    )
    teller = _Teller(tokens, steps)
    # The runtime belongs to another product of the same installation, hence by name.
    runtime = importlib.import_module("starsd_jetson.onnx_target").OnnxTarget
    collect_texts(opened, lambda: runtime.load(opened, threads), plan, work / "corpus", teller.texts)
    listener = Listener(teller.progress, teller.curve)
    trained = train_head(opened, name or out.resolve().name, plan, work, out, listener)
    if as_json:
        click.echo(json.dumps([_plain(reached) for reached in trained.acceptance]))
    click.echo(f"{out}: head '{trained.manifest.name}' for {trained.manifest.identity.target}", err=as_json)


class _Teller:
    """One line on stderr that is overwritten, and a lasting one for each point of the curve."""

    def __init__(self, tokens: int, steps: int) -> None:
        self._tokens, self._steps, self._began = tokens, steps, time.monotonic()

    def texts(self, tokens: int) -> None:
        rate = tokens / max(1e-9, time.monotonic() - self._began)
        click.echo(f"\r{tokens:,} tokens of text, {rate:.0f} tokens/s   ", err=True, nl=False)

    def progress(self, progress: Progress) -> None:
        shares = " ".join(f"{share:.3f}" for share in progress.agreement)
        click.echo(
            f"\rupdate {progress.step} of {self._steps}, {progress.rows_per_s:.0f} rows/s, loss "
            f"{progress.cross_entropy[0]:.3f}, agreement per step {shares}   ",
            err=True,
            nl=False,
        )

    def curve(self, step: int, reached: Sequence[Acceptance]) -> None:
        parts = ", ".join(f"{_tree(item)} {item.tau:.3f}" for item in reached)
        click.echo(f"\rupdate {step}: held-out tokens per round: {parts}", err=True)


def _tree(item: Acceptance) -> str:
    shape = item.shape
    return f"chain of {shape.depth}" if shape.width == 1 else f"{shape.size} nodes"


def _plain(item: Acceptance) -> dict[str, object]:
    shape = item.shape
    return {
        "depth": shape.depth,
        "width": shape.width,
        "size": shape.size,
        "acceptance_length": round(item.tau, 4),
        "acceptance_per_depth": [round(share, 4) for share in item.per_depth],
        "rounds": item.rounds,
    }
