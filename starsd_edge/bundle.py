"""A bundle: the folder an edge needs for one model, and the manifest that describes it.

    manifest.json    everything below, with the sha256 of every other file
    model.onnx       the graph; model.data its weights
    tokenizer.json   for the `tokenizers` package

Opening a bundle reads the manifest, which carries its own hash, and checks that the files are there with
their sizes; `verify` hashes them.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from starsd_edge.errors import BundleError
from starsd_edge.types import Float32Array

__all__ = [
    "MANIFEST_NAME",
    "NO_SCALES",
    "Bundle",
    "FileEntry",
    "Identity",
    "Manifest",
    "Quality",
    "SamplingDefaults",
    "SelfTest",
    "Shapes",
    "TensorEntry",
    "damaged",
    "file_sha256",
]

MANIFEST_NAME = "manifest.json"
FORMAT = 1  # raised when a reader of the older format would misread the newer
NO_SCALES = -1
NO_DIGEST = '"digest": ""'  # cannot occur elsewhere: quotes inside JSON strings are escaped
READ_BLOCK_BYTES = 1 << 22


class ManifestError(Exception):
    """A value of the manifest has the wrong type, or contradicts another; names where."""


@dataclass(frozen=True, slots=True)
class FileEntry:
    """One file of the bundle."""

    sha256: str
    num_bytes: int


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A weight inside the data file that others may want: the draft head needs embedding and LM head.

    layout         "rows": one row a token, or "columns": one column a token
    scales_offset  where the float32 factor of every column lies, NO_SCALES when there is none
    """

    file: str
    offset: int
    dtype: str
    shape: tuple[int, ...]
    layout: str = "rows"
    scales_offset: int = NO_SCALES


@dataclass(frozen=True, slots=True)
class Identity:
    """What the model is, whatever it was quantised to: heads and links compare this."""

    name: str
    source_sha256: str
    tokenizer_sha256: str


@dataclass(frozen=True, slots=True)
class Shapes:
    """Dimensions; feature_size is what leaves the target in one feature row."""

    architecture: str
    num_layers: int
    hidden_size: int
    ffn_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    feature_size: int
    norm_eps: float
    rope_theta: float


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """What the model's authors suggest; greedy when they say nothing."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0


@dataclass(frozen=True, slots=True)
class SelfTest:
    """A prompt and the tokens that greedy decoding gives after it: run before a bundle goes live."""

    prompt: tuple[int, ...]
    expected: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Quality:
    """Against the unquantised source on the built-in text; zero tokens when it was not measured."""

    tokens: int = 0
    perplexity: float = 0.0
    source_perplexity: float = 0.0
    top1_agreement: float = 0.0


@dataclass(frozen=True, slots=True)
class Manifest:
    """Everything a bundle says about itself.

    feature_layers layers whose inputs make the features; empty: the output of the final norm (EAGLE-1)
    projection     sha256 of the matrix that makes them, an EAGLE-3 head's; "" without feature layers
    exporter       revision of the graph builder that made it

    Raises ManifestError for feature layers without a projection, and for a projection without any.
    """

    identity: Identity
    shapes: Shapes
    flavour: str
    quantisation: str
    max_len: int
    feature_layers: tuple[int, ...]
    bos_token: int
    add_bos: bool
    stop_tokens: tuple[int, ...]
    chat_template: str
    sampling: SamplingDefaults
    self_test: SelfTest
    quality: Quality
    tensors: dict[str, TensorEntry]
    exporter: int
    files: dict[str, FileEntry] = field(default_factory=dict)
    projection: str = ""
    format: int = FORMAT

    def __post_init__(self) -> None:
        if bool(self.feature_layers) != bool(self.projection):
            raise ManifestError("feature layers go with the name of their projection")

    def for_heads(self) -> dict[str, Any]:
        """What a draft head and this target must agree on, by the names that a head's identity has it under.

        Where no layers are tapped the features are the final norm's output. A target without projection
        has no entry for it.
        """
        named = {"projection": self.projection} if self.projection else {}
        return named | {
            "target_hash": self.identity.source_sha256,
            "vocab_size": self.shapes.vocab_size,
            "tokenizer_hash": self.identity.tokenizer_sha256,
            "hidden_size": self.shapes.hidden_size,
            "feature_size": self.shapes.feature_size,
            "feature_layers": self.feature_layers or (-1,),
            "feature_norm": not self.feature_layers,
        }

    def to_json(self) -> str:
        """The file's text. Its last entry is the sha256 of the text with that entry empty."""
        text = json.dumps(dataclasses.asdict(self) | {"digest": ""}, indent=1, ensure_ascii=False) + "\n"
        return text.replace(NO_DIGEST, f'"digest": "{text_sha256(text)}"')


@dataclass(frozen=True, slots=True)
class Bundle:
    """An opened bundle."""

    path: Path
    manifest: Manifest

    @classmethod
    def open(cls, path: Path | str) -> Bundle:
        """Raises BundleError when it is no bundle, of a newer format, or a file is missing or cut."""
        path = Path(path)
        file = path / MANIFEST_NAME
        if not file.exists():
            raise BundleError(f"{path}: not a bundle (no {MANIFEST_NAME}); make one with 'starsd export'")
        try:
            text = file.read_text("utf-8")
            raw = json.loads(text)
        except (ValueError, UnicodeDecodeError) as error:
            raise BundleError(f"{file}: damaged ({error}); export the bundle again") from error
        if not isinstance(raw, dict) or raw.get("format") != FORMAT:
            found = raw.get("format") if isinstance(raw, dict) else None
            raise BundleError(
                f"{file}: bundle format {found}, this version reads {FORMAT}; export the bundle again"
            )
        try:
            manifest = read_value(Manifest, raw, "manifest")
        except ManifestError as error:
            raise BundleError(f"{file}: {error}; export the bundle again") from error
        bundle = cls(path, manifest)
        bundle.check_sizes()
        digest = raw.get("digest")
        if text_sha256(text.replace(f'"digest": "{digest}"', NO_DIGEST)) != digest:
            raise BundleError(f"{file}: damaged, or of an older version; export or copy the bundle again")
        return bundle

    @property
    def graph_path(self) -> Path:
        return self.path / "model.onnx"

    @property
    def tokenizer_path(self) -> Path:
        return self.path / "tokenizer.json"

    def check_sizes(self) -> None:
        for name, entry in self.manifest.files.items():
            if Path(name).name != name:
                raise BundleError(f"{self.path}: file name {name!r} leaves the bundle; do not use it")
            file = self.path / name
            if not file.is_file():
                raise BundleError(f"{self.path}: {name} is missing; export or copy the bundle again")
            if file.stat().st_size != entry.num_bytes:
                size = file.stat().st_size
                raise BundleError(
                    f"{self.path}: {name} has {size} of {entry.num_bytes} bytes; "
                    "export or copy the bundle again"
                )

    def verify(self) -> None:
        """Hash every file. Raises BundleError naming the first that differs, and for files that no one
        listed.
        """
        for name, entry in self.manifest.files.items():
            if file_sha256(self.path / name) != entry.sha256:
                raise damaged(self.path, name)
        extra = {item.name for item in self.path.iterdir()} - set(self.manifest.files) - {MANIFEST_NAME}
        if extra:
            raise BundleError(f"{self.path}: {', '.join(sorted(extra))} is not part of the bundle; remove it")

    def embedding(self) -> Float32Array:
        """The token embedding, float32 [V, H]."""
        return self.tensor_rows("embedding", None)

    def lm_head(self, tokens: np.ndarray[Any, np.dtype[Any]] | None = None) -> Float32Array:
        """Rows of the LM head, float32 [len(tokens), H]; all of them for None."""
        return self.tensor_rows("lm_head", tokens)

    def tensor_rows(self, name: str, rows: np.ndarray[Any, np.dtype[Any]] | None) -> Float32Array:
        entry = self.manifest.tensors.get(name)
        if entry is None:
            raise BundleError(f"{self.path}: the manifest names no tensor '{name}'; export the bundle again")
        index: Any = slice(None) if rows is None else rows
        data = self.map_tensor(entry)
        if entry.layout == "rows":
            return np.asarray(data[index], np.float32)
        columns = data[:, index].astype(np.float32)
        if entry.scales_offset != NO_SCALES:
            scales = TensorEntry(entry.file, entry.scales_offset, "float32", (entry.shape[1],))
            columns *= self.map_tensor(scales)[index]
        return np.ascontiguousarray(columns.T)

    def map_tensor(self, entry: TensorEntry) -> np.ndarray[Any, np.dtype[Any]]:
        try:
            return np.memmap(self.path / entry.file, np.dtype(entry.dtype), "r", entry.offset, entry.shape)
        except (ValueError, TypeError, OSError) as error:
            raise BundleError(f"{self.path}: cannot map a tensor of {entry.file} ({error})") from error


def text_sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def damaged(path: Path, name: str) -> BundleError:
    """The file `name` of the bundle in `path` has another hash than the manifest says."""
    return BundleError(f"{path}: {name} is damaged (sha256 differs); export or copy the bundle again")


def file_sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(READ_BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()


def read_value(kind: Any, raw: Any, where: str) -> Any:
    """`raw` JSON as `kind`: a dataclass, a tuple, a dict of strings, or a plain value."""
    origin = typing.get_origin(kind)
    if dataclasses.is_dataclass(kind):
        return read_dataclass(kind, raw, where)
    if origin is tuple:
        if not isinstance(raw, list):
            raise ManifestError(f"{where} is not a list")
        item = typing.get_args(kind)[0]
        return tuple(read_value(item, value, f"{where}[{index}]") for index, value in enumerate(raw))
    if origin is dict:
        if not isinstance(raw, dict):
            raise ManifestError(f"{where} is not an object")
        item = typing.get_args(kind)[1]
        return {key: read_value(item, value, f"{where}.{key}") for key, value in raw.items()}
    if kind is float and type(raw) is int:
        return float(raw)
    if type(raw) is not kind:
        raise ManifestError(f"{where} is {type(raw).__name__}, not {kind.__name__}")
    return raw


def read_dataclass(kind: Any, raw: Any, where: str) -> Any:
    if not isinstance(raw, dict):
        raise ManifestError(f"{where} is not an object")
    hints = typing.get_type_hints(kind)
    values = {}
    for item in dataclasses.fields(kind):
        if item.name in raw:
            values[item.name] = read_value(hints[item.name], raw[item.name], f"{where}.{item.name}")
        elif item.default is dataclasses.MISSING and item.default_factory is dataclasses.MISSING:
            raise ManifestError(f"{where}.{item.name} is missing")
    return kind(**values)
