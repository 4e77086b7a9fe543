"""`starsd export`: SOURCE -> bundle."""

from __future__ import annotations

import importlib
import json
import signal
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from starsd_edge.cli.drafts import identity_of
from starsd_edge.errors import MissingDependencyError
from starsd_edge.extras import install_hint

EMBEDDED = "embedded"


@click.command(name="export")
@click.argument("source")
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Folder of the new bundle.")
@click.option(
    "--quant",
    type=click.Choice(["fp32", "fp16", "int8", "int4"]),
    default="int8",
    show_default=True,
    help="How weights are stored.",
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
@click.option("--replace", is_flag=True, help="Write over an existing bundle.")
@click.option("--json", "as_json", is_flag=True, help="Print the manifest's summary as JSON.")
def command(
    source: str,
    out: Path,
    quant: str,
    flavour: str,
    chat_template: str | None,
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
        quant=quant, flavour=flavour, eagle3=eagle3, replace=replace, chat_template=chat_template
    )
    terminal = Console(stderr=True)
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[count]}"),
        TimeRemainingColumn(),
        console=terminal,
        transient=True,
        disable=not terminal.is_terminal,
    )
    with bar:
        task = bar.add_task("reading", total=None, count="")

        def progress(done: int, total: int) -> None:
            what = "exporting" if done < total else "trying out"
            bar.update(task, completed=done, total=total, description=what, count=f"{done}/{total} layers")

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
        }
        click.echo(json.dumps(written))
        return
    click.echo(
        f"{out}: {manifest.identity.name}, {quant} for {flavour}, contexts of {manifest.max_len} tokens, "
        f"{size / 1e6:.0f} MB"
    )
    heads = f"the EAGLE-3 head {eagle3}, and no other" if eagle3 else f"EAGLE-1 heads made for {source}"
    click.echo(f"fits {heads}")


def import_exporter() -> Any:
    try:
        return importlib.import_module("starsd_jetson.export")
    except ModuleNotFoundError as error:
        raise MissingDependencyError(
            f"exporting needs the {error.name} package: {install_hint('export', 'onnx')}"
        ) from error
