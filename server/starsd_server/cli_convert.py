"""`starsd draft convert`: a published EAGLE checkpoint becomes a head of ours."""

from __future__ import annotations

import json
from pathlib import Path

import click

__all__ = ["command"]


@click.command("convert")
@click.argument("source", type=click.Path(path_type=Path))
@click.argument("target", type=click.Path(path_type=Path))
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Folder to write the head to.")
@click.option("--dtype", type=click.Choice(["fp16", "fp32"]), default="fp16", show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Say what was written as JSON.")
def command(source: Path, target: Path, out: Path, dtype: str, as_json: bool) -> None:
    """Read an EAGLE-1 or EAGLE-3 head as published.

    SOURCE is its folder: config.json with pytorch_model.bin or safetensors. TARGET is the model it was made
    for, whose embedding and LM head it needs: a bundle, a GGUF file or a Hugging Face folder.
    """
    import torch

    from starsd_server.heads.convert import convert

    manifest = convert(source, target, out, torch.float32 if dtype == "fp32" else torch.float16)
    head = manifest.head
    if as_json:
        kind, digest = head.kind.value, manifest.identity.digest()
        click.echo(json.dumps({"head": str(out), "kind": kind, "name": manifest.name, "identity": digest}))
        return
    click.echo(
        f"{out}: {head.kind.name} head '{manifest.name}' for {manifest.identity.target}, "
        f"{head.draft_vocab_size} of {head.vocab_size} tokens"
    )
