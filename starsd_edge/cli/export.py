"""`starsd export`: SOURCE -> bundle."""

from __future__ import annotations

import dataclasses
import importlib
import json
import signal
from pathlib import Path
from typing import Any

import click

from starsd_edge.cli.bundle import quality_words
from starsd_edge.cli.drafts import identity_of
from starsd_edge.cli.export_progress import shown
from starsd_edge.errors import MissingDependencyError
from starsd_edge.extras import install_hint

EMBEDDED = "embedded"


@click.command(name="export")
@click.argument("source")
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Folder of the new bundle.")
@click.option(
    "--quant",
    type=click.Choice(["fp32", "fp16", "int8", "int4", "int4-exact"]),
    default="int8",
    show_default=True,
    help="How weights are stored. int4 is fast plainly; a CPU verifies trees of int4-exact.",
)
@click.option(
    "--for",
    "flavour",
    type=click.Choice(["onnxruntime", "tensorrt"]),
    default="onnxruntime",
    show_default=True,
    help="The runtime that will load it.",
)
@click.option(
    "--eagle3",
    metavar="HEAD",
    type=click.Path(path_type=Path),
    help="A converted EAGLE-3 head; the bundle fits it and no other.",
)
@click.option("--chat-template", metavar="NAME|FILE", help="For a source that carries none.")
@click.option(
    "--context",
    type=click.IntRange(64),
    help="Tokens of context, fewer than the model was made for: a TensorRT engine and its cache span all of "
    "them.",
)
@click.option("--replace", is_flag=True, help="Write over an existing bundle.")
@click.option("--json", "as_json", is_flag=True, help="Print the manifest's summary as JSON.")
def command(
    source: str,
    out: Path,
    quant: str,
    flavour: str,
    chat_template: str | None,
    context: int | None,
    *,
    eagle3: Path | None,
    replace: bool,
    as_json: bool,
) -> None:
    """Make a bundle of SOURCE: a Hugging Face folder, a GGUF file, or 'embedded'.

    Nothing appears at OUT before the bundle is complete and has passed its self-test.
    """
    # A terminated export cleans up behind itself like an interrupted one.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    exporter = import_exporter()
    path = (
        importlib.import_module("starsd_jetson.embedded").gguf_path() if source == EMBEDDED else Path(source)
    )
    settings = exporter.ExportSettings(
        quant=quant,
        flavour=flavour,
        eagle3=eagle3,
        context=context,
        replace=replace,
        chat_template=chat_template,
    )
    with shown() as progress:
        bundle = exporter.export(path, out, settings, progress)
    manifest = bundle.manifest
    size = sum(entry.num_bytes for entry in manifest.files.values())
    if as_json:
        written = {
            "path": str(out),
            "target": manifest.identity.name,
            "quantisation": quant,
            "flavour": flavour,
            "max_len": manifest.max_len,
            "identity": identity_of(manifest).digest(),
            "num_bytes": size,
            "quality": dataclasses.asdict(manifest.quality) if manifest.quality.tokens else None,
        }
        click.echo(json.dumps(written))
        return
    click.echo(
        f"{out}: {manifest.identity.name}, {quant} for {flavour}, contexts of {manifest.max_len} tokens, "
        f"{size / 1e6:.0f} MB"
    )
    heads = f"the EAGLE-3 head {eagle3}, and no other" if eagle3 else f"EAGLE-1 heads made for {source}"
    click.echo(f"fits {heads}")
    if manifest.quality.tokens:
        click.echo(quality_words(manifest.quality))


def import_exporter() -> Any:
    try:
        return importlib.import_module("starsd_jetson.export")
    except ModuleNotFoundError as error:
        raise MissingDependencyError(
            f"exporting needs the {error.name} package: {install_hint('export', 'onnx')}"
        ) from error
