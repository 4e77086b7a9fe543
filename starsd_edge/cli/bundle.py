"""`starsd bundle`: look at a bundle, or prove that it is whole."""

from __future__ import annotations

import dataclasses
import importlib
import json
from pathlib import Path

import click

from starsd_edge.bundle import Bundle, Manifest, Quality
from starsd_edge.errors import UsageError

BUNDLE = click.argument("folder", type=click.Path(path_type=Path))


@click.group(name="bundle")
def command() -> None:
    """Look at a bundle, or prove that it is whole."""


@command.command()
@BUNDLE
@click.option("--json", "as_json", is_flag=True, help="The manifest as JSON.")
def show(folder: Path, *, as_json: bool) -> None:
    """What FOLDER holds."""
    manifest = Bundle.open(folder).manifest
    if as_json:
        click.echo(json.dumps(dataclasses.asdict(manifest), ensure_ascii=False))
        return
    for label, value in summary(manifest).items():
        click.echo(f"{label:<15}{value}")


def summary(manifest: Manifest) -> dict[str, str]:
    shapes, quality = manifest.shapes, manifest.quality
    features = ", ".join(str(layer) for layer in manifest.feature_layers)
    lines = {
        "model": manifest.identity.name,
        "source sha256": manifest.identity.source_sha256,
        "architecture": f"{shapes.architecture}, {shapes.num_layers} layers of {shapes.hidden_size}, "
        f"{shapes.num_heads} heads over {shapes.num_kv_heads}, vocabulary {shapes.vocab_size}",
        "runtime": f"{manifest.flavour}, {manifest.quantisation}",
        "context": f"{manifest.max_len} tokens",
        "features": f"inputs of layers {features}, projected for one EAGLE-3 head"
        if features
        else "output of the final norm",
        "stop tokens": ", ".join(str(token) for token in manifest.stop_tokens),
        "chat template": "yes" if manifest.chat_template else "none",
    }
    if quality.tokens:
        lines["quality"] = quality_words(quality)
    for name, entry in manifest.files.items():
        lines[name] = f"{entry.num_bytes / 1e6:.1f} MB"
    return lines


def quality_words(quality: Quality) -> str:
    """Against the source, on the built-in text."""
    return (
        f"perplexity {quality.perplexity:.2f} (source {quality.source_perplexity:.2f}), "
        f"top-1 agreement {quality.top1_agreement:.1%} over {quality.tokens} tokens"
    )


@command.command()
@BUNDLE
@click.option("--no-run", is_flag=True, help="Check the hashes only; do not load the model.")
@click.option(
    "--on-device", is_flag=True, help="In the runtime that serves it here, as `starsd serve` would."
)
def verify(folder: Path, *, no_run: bool, on_device: bool) -> None:
    """Hash every file of FOLDER and run its self-test. Ends with an error at the first difference.

    A bundle for TensorRT is run by ONNX Runtime, so that it can be tried where it was exported; with
    --on-device by TensorRT, whose engine is built if it is not there yet.
    """
    bundle = Bundle.open(folder)
    bundle.verify()
    if not no_run:
        if on_device:
            runtime = importlib.import_module("starsd_edge.cli.runtime").target_class(bundle.manifest)
        else:
            runtime = importlib.import_module("starsd_jetson.trial").runtime_here(bundle.manifest.flavour)
        target = runtime.load(bundle)
        importlib.import_module("starsd_jetson.self_test").run_self_test(target, bundle.manifest.self_test)
    click.echo(f"{folder}: complete" + ("" if no_run else ", self-test passed"))


@command.command(short_help="Have the TensorRT engine of FOLDER for this device.")
@BUNDLE
def engine(folder: Path) -> None:
    """Have the TensorRT engine of FOLDER for this very device: built if it is not there. Prints its file."""
    bundle = Bundle.open(folder)
    if bundle.manifest.flavour != "tensorrt":
        raise UsageError(f"{folder} is for {bundle.manifest.flavour}, which needs no engine")
    click.echo(importlib.import_module("starsd_jetson.trt_engine").ready_engine(bundle))
