"""`starsd draft convert`: a published EAGLE checkpoint becomes a head of ours."""

from __future__ import annotations

import json
from pathlib import Path

import click

from starsd_edge.errors import BundleError, UsageError

__all__ = ["command"]


@click.command("convert")
@click.argument("source", type=click.Path(path_type=Path))
@click.argument("target", type=click.Path(path_type=Path))
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Folder to write the head to.")
@click.option("--dtype", type=click.Choice(["fp16", "fp32"]), default="fp16", show_default=True)
@click.option("--replace", is_flag=True, help="Write over an existing head.")
@click.option("--json", "as_json", is_flag=True, help="Say what was written as JSON.")
def command(source: Path, target: Path, out: Path, dtype: str, *, replace: bool, as_json: bool) -> None:
    """Read an EAGLE-1 or EAGLE-3 head as published.

    SOURCE is its folder: config.json with pytorch_model.bin or safetensors. TARGET is the model it was made
    for, whose embedding and LM head it needs: a bundle, a GGUF file or a Hugging Face folder.
    """
    import torch

    from starsd_server.heads.convert import convert
    from starsd_server.heads.head import HeadKind

    check_place(out, replace=replace)
    manifest = convert(source, target, out, torch.float32 if dtype == "fp32" else torch.float16)
    head, identity = manifest.head, manifest.identity
    if as_json:
        written = {
            "head": str(out),
            "kind": head.kind.value,
            "name": manifest.name,
            "target": identity.target,
            "trained_len": manifest.trained_len,
            "identity": identity.digest(),
        }
        click.echo(json.dumps(written))
        return
    trained = f"{manifest.trained_len} tokens" if manifest.trained_len else "a length that it does not tell"
    click.echo(
        f"{out}: {head.kind.label} head '{manifest.name}' for {identity.target}, trained on contexts of "
        f"{trained}, proposes {head.draft_vocab_size} of {head.vocab_size} tokens"
    )
    fits = "any bundle" if head.kind is HeadKind.EAGLE1 else f"bundles exported with --eagle3 {out}"
    click.echo(f"fits {fits} of {target}")


def check_place(out: Path, *, replace: bool) -> None:
    """Raises UsageError where something is in the way: a published head's own folder, a trained head."""
    from starsd_server.heads.checkpoint import read_manifest

    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return
    try:
        name = read_manifest(out).name
    except BundleError:
        raise UsageError(f"{out} exists and is not a head of ours; choose another --out") from None
    if not replace:
        raise UsageError(f"{out} already holds the head '{name}'; give --replace to write over it")
