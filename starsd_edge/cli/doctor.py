"""`starsd doctor`: what this machine has for each role, and what to do about what it lacks."""

from __future__ import annotations

import enum
import importlib
import importlib.metadata
import importlib.util
import json
import platform
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import click

from starsd_edge.cli.model_options import provider_option, quant_option
from starsd_edge.errors import StarSDError, UsageError
from starsd_edge.extras import install_hint

__all__ = ["Finding", "Grade", "command", "examine"]

OLDEST_PYTHON = (3, 10)


class Grade(enum.Enum):
    """How good a finding is. A role that nobody wants here may well be missing."""

    OK = "ok"
    WARNING = "warning"
    MISSING = "missing"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line: the role it is about, what was found, and the fix ("" when nothing needs one)."""

    role: str
    grade: Grade
    found: str
    fix: str = ""


@dataclass(frozen=True, slots=True)
class Extra:
    """Packages that a role needs, all of them, and what brings them."""

    role: str
    packages: tuple[str, ...]
    extra: str


EXTRAS = (
    Extra("export", ("onnx", "gguf", "safetensors", "tokenizers", "jinja2"), "export"),
    Extra("chat", ("tokenizers", "jinja2", "prompt_toolkit"), "chat"),
    Extra("endpoint", ("starlette", "uvicorn", "prometheus-client", "tokenizers", "jinja2"), "endpoint"),
    Extra("draft service", ("torch", "safetensors"), "server"),
    Extra("deployer", ("paramiko",), "deploy"),
)
# These install the same module: with both, which one loads is chance.
EXCLUDING = ("onnxruntime", "onnxruntime-gpu")
MEASURED_CONTEXT = 512  # tokens: more than any measurement needs


@click.command()
@click.option("--measure", is_flag=True, help="Load a model, and measure its speed and exactness here.")
@click.option(
    "--bundle",
    metavar="DIR",
    help="Which one; otherwise that of the settings file, and the embedded one without.",
)
@quant_option
@provider_option
@click.option("--json", "as_json", is_flag=True, help="For scripts.")
def command(
    *, measure: bool, bundle: str | None, quant: str | None, provider: str | None, as_json: bool
) -> None:
    """Tell what this machine can be: target, draft service, deployer. Changes nothing.

    Exits with 1 where the model that --measure asks for does not run here.
    """
    if not measure and (bundle or quant or provider):
        raise UsageError("--bundle, --quant and --provider are for what --measure loads: give that, too")
    figures = list(measured(bundle, provider, quant)) if measure else []
    tell([*examine(), *figures], as_json=as_json)
    if any(finding.grade is Grade.MISSING for finding in figures):
        sys.exit(1)


def tell(findings: Sequence[Finding], *, as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps([{**asdict(f), "grade": f.grade.value} for f in findings]))
        return
    for finding in findings:
        click.echo(f"{finding.grade.value:<8} {finding.role:<14} {finding.found}")
        if finding.fix:
            click.echo(f"{'':<23} -> {finding.fix}")


def examine(version_of: Callable[[str], str] | None = None) -> Iterator[Finding]:
    """Everything that can be told without loading a model. `version_of` gives a package's installed version,
    "" for none."""
    installed = version_of or installed_version
    yield python()
    yield encryption()
    yield from keys()
    yield from board()
    yield from runtimes(installed)
    for extra in EXTRAS:
        yield packages(extra, installed)


def installed_version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def python() -> Finding:
    found = f"Python {platform.python_version()} on {platform.machine()}"
    if sys.version_info < OLDEST_PYTHON:
        return Finding("python", Grade.MISSING, found, "Python 3.10 or newer is needed")
    return Finding("python", Grade.OK, found)


def encryption() -> Finding:
    import zmq

    if not zmq.has("curve"):
        fix = "install pyzmq from a wheel, or libzmq with libsodium: nothing leaves this machine without"
        return Finding("link", Grade.MISSING, "this ZeroMQ has no CURVE", fix)
    return Finding("link", Grade.OK, f"ZeroMQ {zmq.zmq_version()} with CURVE")


def keys() -> Iterator[Finding]:
    from starsd_edge.link.keys import KeyPair, key_dir
    from starsd_edge.link.pins import pinned_services

    path = key_dir() / "device.key"
    try:
        pair = KeyPair.load(path)
        services = pinned_services(key_dir())
    except StarSDError as error:
        grade = Grade.WARNING if path.exists() else Grade.MISSING
        yield Finding("keys", grade, str(error), "only for links to other machines: starsd keys generate")
        return
    yield Finding("keys", Grade.OK, f"{pair.key.name}, fingerprint {pair.key.fingerprint}")
    if not services:
        yield Finding("keys", Grade.WARNING, "no draft service is pinned", "starsd keys pin NAME KEY")
    for pin in services:
        yield Finding("keys", Grade.OK, f"draft service {pin.name} is pinned")


def board() -> Iterator[Finding]:
    try:
        find_board = importlib.import_module("starsd_jetson.board.telemetry").find_board
    except ImportError:
        return
    found = find_board()
    if not found.is_jetson:
        return
    named = f"{found.model or found.module}, L4T {found.l4t or 'unknown'} (JetPack {found.jetpack_line})"
    if found.lacks_jetpack:
        yield Finding(
            "board", Grade.WARNING, f"{named}: no CUDA, no TensorRT", "sudo apt install nvidia-jetpack"
        )
        return
    parts = [named, f"TensorRT {found.tensorrt}" if found.tensorrt else "", found.power_mode]
    yield Finding("board", Grade.OK, ", ".join(filter(None, parts)))


def runtimes(version_of: Callable[[str], str]) -> Iterator[Finding]:
    """ONNX Runtime and TensorRT, and whether what is installed goes together."""
    present = [f"{name} {version_of(name)}" for name in EXCLUDING if version_of(name)]
    if len(present) == len(EXCLUDING):
        fix = "pip uninstall onnxruntime onnxruntime-gpu, then install the one that is meant"
        yield Finding("target", Grade.WARNING, " and ".join(present) + " exclude each other", fix)
    elif present:
        yield Finding("target", Grade.OK, present[0] + providers())
    else:
        fix = install_hint("onnx")
        yield Finding("target", Grade.MISSING, "no ONNX Runtime", fix)
    if importlib.util.find_spec("tensorrt") is not None:
        yield Finding("target", Grade.OK, "TensorRT's Python bindings are visible")
    elif Path("/usr/src/tensorrt").exists():
        fix = "make the venv with --system-site-packages: apt puts the bindings into the system's Python"
        yield Finding("target", Grade.WARNING, "TensorRT is installed, and this Python does not see it", fix)


def providers() -> str:
    """What ONNX Runtime says it can run on; "" when it does not load."""
    try:
        names = importlib.import_module("onnxruntime").get_available_providers()
    except (ImportError, AttributeError, OSError):
        return ", which does not load"
    return ": " + ", ".join(name.removesuffix("ExecutionProvider") for name in names)


def packages(extra: Extra, version_of: Callable[[str], str]) -> Finding:
    missing = [name for name in extra.packages if not version_of(name)]
    if missing:
        fix = install_hint(extra.extra)
        return Finding(extra.role, Grade.MISSING, f"without {', '.join(missing)}", fix)
    first = extra.packages[0]
    return Finding(extra.role, Grade.OK, f"{first} {version_of(first)}" + accelerator(extra.role))


def accelerator(role: str) -> str:
    """For the draft service: the GPU that torch sees."""
    if role != "draft service":
        return ""
    try:
        cuda = importlib.import_module("torch").cuda
    except (ImportError, OSError):
        return ", which does not load"
    return f" on {cuda.get_device_name(0)}" if cuda.is_available() else " on the CPU"


def measured(bundle: str | None, provider: str | None = None, quant: str | None = None) -> Iterator[Finding]:
    """Speed of a model here, in the runtime that serves it, and whether trees decide as plain steps do; with
    `quant` alone, of the embedded one."""
    try:
        yield from measure_bundle(bundle, provider, quant)
    except (ImportError, StarSDError) as error:
        yield Finding("measured", Grade.MISSING, f"{bundle or 'the model'} does not run here: {error}")


def measure_bundle(bundle: str | None, provider: str | None, quant: str | None) -> Iterator[Finding]:
    from starsd_edge.cli.runtime import EMBEDDED, ModelChoice, open_bundle, read_ahead, target_class
    from starsd_edge.config import read_config
    from starsd_edge.decoding.decoder import GUARD_PER_NOISE

    def say(line: str) -> None:
        click.echo(line, err=True)

    calibrate = importlib.import_module("starsd_jetson.calibrate")
    chosen = bundle or (EMBEDDED if quant else read_config().chat.bundle or EMBEDDED)
    opened = open_bundle(ModelChoice(chosen, quant), say)
    runtime = target_class(opened.manifest, provider)
    read_ahead(opened, runtime.files_read(opened), say)
    target = runtime.load(opened, None, MEASURED_CONTEXT)
    curve, invariance = calibrate.measure_costs(target), calibrate.measure_invariance(target)
    costs = ", ".join(f"{size} rows {curve(size) / curve(1):.1f}x" for size in curve.sizes[1:])
    name = f"{opened.manifest.identity.name}, {opened.manifest.quantisation} on {opened.manifest.flavour}"
    name += f" (ONNX Runtime, {provider})" if provider else ""
    yield Finding(
        "measured", Grade.OK, f"{name}: {1 / curve(1):.1f} tokens/s plain, {curve(1) * 1e3:.1f} ms; {costs}"
    )
    if invariance.bitwise:
        yield Finding("measured", Grade.OK, "row-invariant to the bit: trees decide as plain steps do")
    elif invariance.exact_tree:
        margin = GUARD_PER_NOISE * invariance.noise
        rate = calibrate.closer_than(target, margin)
        found = (
            f"rows differ by up to {invariance.noise:.2g}: decisions closer than {margin:.2g}, {rate:.0%} "
            "here, are settled by a plain step each"
        )
        yield Finding("measured", Grade.OK, found)
    else:
        found = f"rows differ by {invariance.noise:.2g}: exact only when decoding plainly"
        yield Finding(
            "measured",
            Grade.WARNING,
            found,
            "another quantisation (starsd export --quant int8 or int4-exact)",
        )
