"""SOURCE -> bundle: build the graph, stream the weights, try the result, and only then put it in place."""

from __future__ import annotations

import contextlib
import glob
import hashlib
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from starsd_edge.bundle import (
    MANIFEST_NAME,
    NO_SCALES,
    Bundle,
    FileEntry,
    Identity,
    Manifest,
    Quality,
    SelfTest,
    Shapes,
    TensorEntry,
)
from starsd_edge.errors import BundleError, ResourceError, UsageError
from starsd_edge.text.builtin_templates import BUILTIN_TEMPLATES
from starsd_edge.text.template import ChatTemplate
from starsd_edge.text.tokenizer import Tokenizer
from starsd_edge.types import Float32Array
from starsd_edge.whole_file import DISK_FULL
from starsd_jetson.graph.builder import CONTRIB, GraphBuilder, StoredTensor, WeightFile
from starsd_jetson.graph.llama import build_llama
from starsd_jetson.graph.ops import OnnxRuntimeOps, Ops
from starsd_jetson.graph.reference import ReferenceRun
from starsd_jetson.graph.shape import ModelShape
from starsd_jetson.graph.sources import WeightSource, open_source
from starsd_jetson.graph.standard_ops import StandardOps
from starsd_jetson.graph.taps import read_taps
from starsd_jetson.tokenizer import TextSettings, read_text_settings
from starsd_jetson.trial import reference_run, try_out

__all__ = ["EXPORTER", "SUPPORTED", "ExportSettings", "export"]

# A CPU computes float16 in float32: no gain. TensorRT's int8 would need activation ranges set at export.
SUPPORTED = {
    "onnxruntime": ("fp32", "int8", "int4", "int4-exact"),
    "tensorrt": ("fp32", "fp16", "int4"),
}  # by flavour
DATA_NAME = "model.data"
NO_TEMPLATE = "none"
EXPORTER = 7  # raised when the same source gives another graph, other weights or another identity
OPSET = 21  # ONNX Runtime >= 1.20
STANDARD_OPSET = 17  # the newest that TensorRT 8.5 documents
INT4_OPSET = 21  # blocked DequantizeLinear of INT4 came with it; TensorRT >= 10
ASIDE = "old"  # ends the name of a bundle that is about to be replaced
BYTES_PER_WEIGHT = {
    "fp32": 4.0,
    "fp16": 2.0,
    "int8": 1.0,
    "int4": 0.66,
    "int4-exact": 0.66,
}  # int4: the smallest block, 32, with scale and zero

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class ExportSettings:
    """flavour and quant as in SUPPORTED.

    eagle3        a converted EAGLE-3 head: the features are what it reads, for it alone
    context       tokens, fewer than the model was made for; None: as many
    chat_template a name of BUILTIN_TEMPLATES, a file, or NO_TEMPLATE; None takes the source's
    """

    quant: str = "int8"
    flavour: str = "onnxruntime"
    eagle3: Path | None = None
    context: int | None = None
    replace: bool = False
    chat_template: str | None = None


def export(
    source_path: Path, out: Path, settings: ExportSettings, progress: Progress | None = None
) -> Bundle:
    """Write a bundle to `out`. Nothing appears there before it is complete and its self-test was run.

    Raises BundleError for a source that cannot be used, ResourceError for a full disk, UsageError when
    `out` is in the way.
    """
    check_target(out, settings)
    place = out.resolve()  # of a link, what it leads to is replaced
    source = open_source(source_path, settings.context)
    source.check_whole()
    text = choose_template(read_text_settings(source), settings.chat_template, source.path)
    check_text(text, source.path)
    check_space(out, source.shape, settings)
    with staging_folder(place) as folder:
        reference = None if settings.quant == "fp32" else reference_run(source.shape, text.tokenizer_json)
        draft = write_bundle(
            folder, source, text, settings, reference, progress or (lambda done, total: None)
        )
        trial = try_out(Bundle(folder, draft.manifest), reference, draft.logits)
        write_manifest(folder, replace(draft.manifest, self_test=trial.self_test, quality=trial.quality))
        put_in_place(folder, place)
    return Bundle.open(out)


def check_text(text: TextSettings, path: Path) -> None:
    """Raises BundleError for what the first chat would end with."""
    ChatTemplate(text.chat_template)
    try:
        Tokenizer(text.tokenizer_json)
    except BundleError as error:
        raise BundleError(f"{path}: {error}") from error


def choose_template(text: TextSettings, choice: str | None, path: Path) -> TextSettings:
    if choice is None and text.chat_template:
        return text
    if choice is None:
        names = ", ".join(sorted(BUILTIN_TEMPLATES))
        raise UsageError(
            f"{path} has no chat template; give --chat-template {names}, a file, "
            f"or '{NO_TEMPLATE}' for a base model"
        )
    if choice == NO_TEMPLATE:
        return replace(text, chat_template="")
    if choice in BUILTIN_TEMPLATES:
        return replace(text, chat_template=BUILTIN_TEMPLATES[choice])
    try:
        return replace(text, chat_template=Path(choice).read_text("utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--chat-template {choice}: neither a known name nor a readable file") from error


@dataclass(frozen=True, slots=True)
class Untried:
    """A written bundle, and what the source said about the sample text: logits float32 [T, V], if it was
    asked.
    """

    manifest: Manifest
    logits: Float32Array | None


def write_bundle(
    folder: Path,
    source: WeightSource,
    text: TextSettings,
    settings: ExportSettings,
    reference: ReferenceRun | None,
    progress: Progress,
) -> Untried:
    taps = read_taps(settings.eagle3, source) if settings.eagle3 else None
    with (folder / DATA_NAME).open("wb") as file:
        weights = WeightFile(file, DATA_NAME)
        ops = flavoured_ops(weights, source.shape, settings)
        logits = build_llama(ops, source, taps, reference, progress)
        file.flush()
        flush(file.fileno())
    files = {
        DATA_NAME: FileEntry(weights.digest.hexdigest(), weights.size),
        "model.onnx": write_file(folder / "model.onnx", ops.graph.model(source.name)),
        "tokenizer.json": write_file(folder / "tokenizer.json", text.tokenizer_json.encode()),
    }
    manifest = Manifest(
        identity=Identity(source.name, source.sha256(), source.tokenizer_sha256()),
        shapes=describe(source.shape, len(taps.projection) if taps else source.shape.hidden_size),
        flavour=settings.flavour,
        quantisation=settings.quant,
        max_len=source.shape.max_len,
        feature_layers=taps.layers if taps else (),
        projection=taps.sha256 if taps else "",
        bos_token=text.bos_token,
        add_bos=text.add_bos,
        stop_tokens=text.stop_tokens,
        chat_template=text.chat_template,
        sampling=text.sampling,
        self_test=SelfTest((), ()),
        quality=Quality(),
        tensors=shared_tensors(weights.tensors, source.shape),
        exporter=EXPORTER,
        files=files,
    )
    write_manifest(folder, manifest)
    return Untried(manifest, logits)


def flavoured_ops(weights: WeightFile, shape: ModelShape, settings: ExportSettings) -> Ops:
    if settings.flavour == "onnxruntime":
        return OnnxRuntimeOps(GraphBuilder(weights, OPSET, [CONTRIB]), shape, settings.quant)
    opset = INT4_OPSET if settings.quant == "int4" else STANDARD_OPSET
    return StandardOps(GraphBuilder(weights, opset), shape, settings.quant)


def describe(shape: ModelShape, feature_size: int) -> Shapes:
    return Shapes(
        architecture=shape.architecture,
        num_layers=shape.num_layers,
        hidden_size=shape.hidden_size,
        ffn_size=shape.ffn_size,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        vocab_size=shape.vocab_size,
        feature_size=feature_size,
        norm_eps=shape.norm_eps,
        rope_theta=shape.rope_theta,
    )


def shared_tensors(stored: Mapping[str, StoredTensor], shape: ModelShape) -> dict[str, TensorEntry]:
    """Where a draft head finds the target's embedding and LM head."""
    table = stored["embedding"]
    embedding = TensorEntry(DATA_NAME, table.offset, table.dtype, table.shape)
    if shape.tied_embedding:
        return {"embedding": embedding, "lm_head": embedding}
    head, scale = stored["head"], stored.get("head.scale")
    columns = TensorEntry(
        DATA_NAME, head.offset, head.dtype, head.shape, "columns", scale.offset if scale else NO_SCALES
    )
    return {"embedding": embedding, "lm_head": columns}


# Files -----------------------------------------------------------------------------------------------------


def check_target(out: Path, settings: ExportSettings) -> None:
    if settings.flavour not in SUPPORTED:
        raise UsageError(f"no bundle for {settings.flavour}; choose one of {', '.join(SUPPORTED)}")
    if settings.quant not in SUPPORTED[settings.flavour]:
        choices = ", ".join(SUPPORTED[settings.flavour])
        raise UsageError(f"no {settings.quant} for {settings.flavour}; choose one of {choices}")
    remove_abandoned(out.resolve())
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return
    if not (out / MANIFEST_NAME).exists():
        raise UsageError(f"{out} exists and is not a bundle; choose another --out")
    if not settings.replace:
        raise UsageError(f"{out} already holds a bundle; give --replace to write over it")


def check_space(out: Path, shape: ModelShape, settings: ExportSettings) -> None:
    """Refuse early; a disk that fills up on the way is noticed all the same."""
    folder = out.absolute().parent
    while not folder.exists():
        folder = folder.parent
    needed = estimate_bytes(shape, settings)
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise ResourceError(f"{folder}: the bundle needs about {needed >> 20} MiB, {free >> 20} MiB are free")


def estimate_bytes(shape: ModelShape, settings: ExportSettings) -> int:
    """Of the weights: layers, embedding, LM head, and the angles of every position."""
    wide = 4 if settings.quant == "fp32" else 2
    standard = settings.flavour == "tensorrt"
    head = wide if standard or settings.quant == "fp32" else 1
    angle = wide if standard else 4
    heads = shape.num_heads + 2 * shape.num_kv_heads
    attention = shape.hidden_size * shape.head_dim * (heads + shape.num_heads)
    layer = attention + 3 * shape.hidden_size * shape.ffn_size
    layers = shape.num_layers * layer * BYTES_PER_WEIGHT[settings.quant]
    tables = shape.vocab_size * shape.hidden_size * (wide + head)
    return int(layers + tables + shape.max_len * shape.head_dim * angle)


@contextlib.contextmanager
def staging_folder(out: Path) -> Iterator[Path]:
    """A hidden folder beside `out`, removed whatever happens."""
    parent = out.parent
    folder = parent / f"{staging_prefix(out)}{os.getpid()}"
    try:
        parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir()
        yield folder
    except OSError as error:
        if error.errno in DISK_FULL:
            raise ResourceError(
                f"{parent}: the disk is full ({error.strerror}); nothing was left behind"
            ) from error
        raise ResourceError(f"{parent}: cannot write the bundle ({error.strerror or error})") from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def staging_prefix(out: Path) -> str:
    return f".{out.name}.partial-"


def remove_abandoned(out: Path) -> None:
    """What killed exports to `out` left; a bundle that one of them had moved aside is put back first."""
    parent, prefix = out.parent, staging_prefix(out)
    for folder in sorted(parent.glob(f"{glob.escape(prefix)}*")):
        pid, _, aside = folder.name[len(prefix) :].partition("-")
        if not pid.isdigit() or Path(f"/proc/{pid}").exists():
            continue
        if aside and not out.exists():
            folder.rename(out)
        elif folder.is_symlink():
            folder.unlink()
        else:
            shutil.rmtree(folder, ignore_errors=True)


def put_in_place(folder: Path, out: Path) -> None:
    """Rename; an old bundle stays usable until the instant before, and is back if that instant fails."""
    old = out.with_name(f"{staging_prefix(out)}{os.getpid()}-{ASIDE}")
    if out.exists():
        out.rename(old)
    try:
        folder.rename(out)
    except BaseException:
        if old.exists() and not out.exists():
            old.rename(out)
        raise
    shutil.rmtree(old, ignore_errors=True)


def write_file(path: Path, data: bytes) -> FileEntry:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        flush(file.fileno())
    return FileEntry(hashlib.sha256(data).hexdigest(), len(data))


def write_manifest(folder: Path, manifest: Manifest) -> None:
    write_file(folder / MANIFEST_NAME, manifest.to_json().encode())


def flush(descriptor: int) -> None:
    """To the disk itself: a rename must not outlive the data it names."""
    os.fsync(descriptor)
