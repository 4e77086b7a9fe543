"""A head on disk, in our format: a folder of three files and a card.

    config.json           what the head is and which target it fits
    head.safetensors      the learned tensors under `EagleHead`'s names, and `draft_to_target` (int32) when
                          the draft vocabulary is a part of the target's; EAGLE-3: its LM head, too
    target.safetensors    the target's `embedding`, and for EAGLE-1 the rows of its LM head that it reads

The third is the target's property and large. Where it is missing, as in the head that ships with the package,
`load_head` makes it from the target once and keeps it in the cache folder.
"""

from __future__ import annotations

import hashlib
import importlib
import logging
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from starsd_edge.config import cache_dir
from starsd_edge.errors import BundleError
from starsd_edge.protocol.greeting import Identity, projection_hash
from starsd_server.heads.head import EagleHead, HeadConfig, HeadKind
from starsd_server.heads.target import open_target_rows
from starsd_server.heads.tensors import (
    INDEX_DTYPES,
    check_finite,
    check_regular,
    is_finite,
    read_tensors,
    write_tensors,
)

__all__ = [
    "EMBEDDED_HEAD",
    "HEAD_NAME",
    "MAX_TRAINED_LEN",
    "HeadManifest",
    "load_head",
    "read_manifest",
    "save_head",
]

log = logging.getLogger("starsd.heads")

FORMAT = "starsd-head-1"
CONFIG_NAME, HEAD_NAME, TARGET_NAME = "config.json", "head.safetensors", "target.safetensors"
MAX_NAME_LENGTH = 128  # what a WELCOME carries
MAX_TRAINED_LEN = 1 << 31  # tokens; more is no length
EMBEDDED_HEAD = Path(__file__).parent / "embedded"


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadManifest:
    """config.json. Raises ValueError for what no head is.

    name         for people, and for an edge that asks for a certain head
    head         everything that shapes the network
    identity     the target it fits; its `digest()` is the compatibility hash that edges compare
    trained_len  tokens of the contexts it was trained on: longer ones are not drafted; 0: not known
    """

    name: str
    head: HeadConfig
    identity: Identity
    trained_len: int = 0
    format: str = FORMAT

    def __post_init__(self) -> None:
        if self.format != FORMAT:
            raise ValueError(f"format '{self.format}', this version reads '{FORMAT}'")
        if not 1 <= len(self.name) <= MAX_NAME_LENGTH or not self.name.isprintable():
            raise ValueError(f"the name {self.name!r:.40} is not 1 to {MAX_NAME_LENGTH} printable characters")
        if not self.identity.feature_layers:
            raise ValueError("an identity without feature layers")
        if not 0 <= self.trained_len <= MAX_TRAINED_LEN:
            raise ValueError(f"trained on {self.trained_len} tokens")
        if (self.head.kind is HeadKind.EAGLE3) != (self.identity.projection is not msgspec.UNSET):
            raise ValueError(
                "an EAGLE-3 head that does not name its projection, which runs on the edge"
                if self.head.kind is HeadKind.EAGLE3
                else f"an {self.head.kind.label} head with a projection"
            )
        wanted = (self.head.vocab_size, self.head.hidden_size)
        if wanted != (self.identity.vocab_size, self.identity.feature_size):
            raise ValueError(
                f"a head of {wanted[0]} tokens and {wanted[1]} wide for an identity of "
                f"{self.identity.vocab_size} tokens and features {self.identity.feature_size} wide"
            )

    def max_len(self, longest: int) -> int:
        """Tokens of a context that it drafts for, where nobody's may have more than `longest`."""
        return min(longest, self.trained_len or longest)


def load_head(
    folder: Path, target: Path | None = None, dtype: torch.dtype | None = torch.float32
) -> EagleHead:
    """Read a head, ready for inference.

    Args:
        folder: a head in our format.
        target: the target's bundle, GGUF file or Hugging Face folder. Needed when the folder has no
            `target.safetensors` and the cache has none yet; the head that ships finds its own.
        dtype: of all weights; None leaves each as it is stored, and mapped from its file.

    Raises:
        BundleError: a file is missing or damaged, tensors are missing, extra, of another shape or kind or not
            finite, or the target is needed and not given.
    """
    manifest = read_manifest(folder)
    file = folder / HEAD_NAME
    tensors = read_tensors(file)
    head = _empty(manifest.head)
    tensors.setdefault("draft_to_target", torch.arange(manifest.head.draft_vocab_size, dtype=torch.int32))
    _check(file, tensors, head, without=_target_names(manifest.head))
    _check_vocabulary(file, tensors["draft_to_target"], manifest.head)
    tensors["draft_to_target"] = tensors["draft_to_target"].long()
    check_finite(file, ((name, tensor) for name, tensor in tensors.items() if name != "draft_to_target"))
    _check_projection(file, tensors, manifest)
    rows = _target_tensors(folder, manifest, tensors["draft_to_target"], target)
    values = {
        name: value.to(dtype) if dtype is not None and value.is_floating_point() else value
        for name, value in (tensors | rows).items()
    }
    head.load_state_dict(values, assign=True)
    return head.requires_grad_(False).eval()


def read_manifest(folder: Path) -> HeadManifest:
    """config.json of a head. Raises BundleError naming file and field."""
    file = folder / CONFIG_NAME
    check_regular(file)
    try:
        return msgspec.json.decode(file.read_bytes(), type=HeadManifest)
    except OSError as error:
        raise BundleError(
            f"{folder}: not a draft head, {CONFIG_NAME} cannot be read ({error.strerror})"
        ) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BundleError(f"{file}: not a draft head's configuration ({error})") from error


def save_head(
    head: EagleHead, manifest: HeadManifest, folder: Path, dtype: torch.dtype = torch.float16
) -> None:
    """Write all three files; learned and target's tensors in `dtype`. The folder is made when missing.

    What was written is loaded before it takes the place of what was there.

    Raises BundleError: the folder cannot be written, or a weight is beyond `dtype`.
    """
    state = {
        name: _narrowed(folder, name, tensor.detach(), dtype) for name, tensor in head.state_dict().items()
    }
    theirs = {name: state.pop(name) for name in _target_names(manifest.head)}
    if manifest.head.draft_vocab_size == manifest.head.vocab_size:
        del state["draft_to_target"]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".new-", dir=folder) as new:
            draft = Path(new)
            write_tensors(state, draft / HEAD_NAME)
            write_tensors(theirs, draft / TARGET_NAME)
            (draft / CONFIG_NAME).write_bytes(
                msgspec.json.format(msgspec.json.encode(manifest), indent=2) + b"\n"
            )
            load_head(draft, dtype=None)
            for name in (HEAD_NAME, TARGET_NAME, CONFIG_NAME):
                os.replace(draft / name, folder / name)
    except OSError as error:
        raise BundleError(f"{folder}: cannot be written ({error.strerror or error})") from error


def _narrowed(folder: Path, name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """In `dtype`, the table of ids in int32. Raises BundleError when a weight is none or does not fit."""
    if name == "draft_to_target":
        return tensor.to(torch.int32)
    check_finite(folder, [(name, tensor)])
    narrow = tensor.to(dtype)
    if not is_finite(narrow):
        raise BundleError(
            f"{folder}: {name} holds values beyond {str(dtype).removeprefix('torch.')}; write it in float32"
        )
    return narrow


def _target_names(config: HeadConfig) -> tuple[str, ...]:
    """Tensors that belong to the target: an EAGLE-3 head has its own LM head."""
    return ("embedding",) if config.kind is HeadKind.EAGLE3 else ("embedding", "lm_head")


def _empty(config: HeadConfig) -> EagleHead:
    """A head of this shape without memory for its weights."""
    with torch.device("meta"):
        return EagleHead(config)


def _check(file: Path, found: dict[str, Tensor], head: EagleHead, without: tuple[str, ...]) -> None:
    """Names and shapes must be those of `head`, less `without`, to the last one."""
    wanted = {name: tuple(t.shape) for name, t in head.state_dict().items() if name not in without}
    missing = sorted(set(wanted) - set(found))
    extra = sorted(set(found) - set(wanted))
    wrong = [
        f"{name} is {list(found[name].shape)}, not {list(shape)}"
        for name, shape in sorted(wanted.items())
        if name in found and tuple(found[name].shape) != shape
    ]
    complaints = [f"missing: {', '.join(missing)}"] if missing else []
    complaints += [f"unknown: {', '.join(extra)}"] if extra else []
    if complaints + wrong:
        raise BundleError(f"{file}: does not fit its {CONFIG_NAME}: {'; '.join(complaints + wrong)}")


def _check_vocabulary(file: Path, draft_to_target: Tensor, config: HeadConfig) -> None:
    if draft_to_target.dtype not in INDEX_DTYPES:
        raise BundleError(f"{file}: draft_to_target is {draft_to_target.dtype}, not int32")
    low, high = int(draft_to_target.min()), int(draft_to_target.max())
    if low < 0 or high >= config.vocab_size or len(set(draft_to_target.tolist())) != len(draft_to_target):
        raise BundleError(
            f"{file}: draft_to_target must hold different tokens of 0 to {config.vocab_size - 1}"
        )


def _check_projection(file: Path, tensors: dict[str, Tensor], manifest: HeadManifest) -> None:
    """It runs on the edges, which know it by this hash."""
    if manifest.head.kind is not HeadKind.EAGLE3:
        return
    if projection_hash(tensors["fc.weight"].float().numpy()) != manifest.identity.projection:
        raise BundleError(f"{file}: fc.weight is not the one that its {CONFIG_NAME} names; convert it again")


def _target_tensors(
    folder: Path, manifest: HeadManifest, draft_to_target: Tensor, target: Path | None
) -> dict[str, Tensor]:
    """The target's tensors: beside the head, from the cache, or made from the target and cached."""
    config = manifest.head
    shapes = {"embedding": (config.vocab_size, config.hidden_size)}
    if config.kind is HeadKind.EAGLE1:
        shapes["lm_head"] = (config.draft_vocab_size, config.hidden_size)
    cached = cache_dir() / "heads" / _cache_key(manifest, draft_to_target) / TARGET_NAME
    if (beside := folder / TARGET_NAME).exists():
        return _read_rows(beside, shapes)
    damage: BundleError | None = None
    if os.path.isfile(cached):
        try:
            return _read_rows(cached, shapes)
        except BundleError as error:
            damage = error
    if target is None and folder == EMBEDDED_HEAD:
        # The embedded model belongs to another product of the same installation, hence by name.
        target = Path(importlib.import_module("starsd_jetson.embedded").gguf_path())
    if target is None:
        raise BundleError(
            f"{folder}: no {TARGET_NAME}; name the target once (bundle, GGUF file or Hugging Face folder) "
            f"and it will be made from it" + (f" ({damage})" if damage else "")
        )
    if damage:
        log.warning("the rows of %s are read again (%s)", target, damage)
    source = open_target_rows(target)
    if source.hash != manifest.identity.target_hash:
        raise BundleError(
            f"{target}: not the target of the head {folder}: its weights are {source.hash[:12]}..., "
            f"the head was made for {manifest.identity.target}, {manifest.identity.target_hash[:12]}..."
        )
    rows = {"embedding": torch.from_numpy(source.embedding()).half()}
    if config.kind is HeadKind.EAGLE1:
        rows["lm_head"] = torch.from_numpy(source.lm_head(draft_to_target.numpy())).half()
    check_finite(target, rows.items())
    try:
        cached.parent.mkdir(parents=True, exist_ok=True)
        write_tensors(rows, cached)
    except OSError as error:
        log.warning("%s cannot be kept, the next start makes it again (%s)", cached, error)
    return rows


def _read_rows(file: Path, shapes: dict[str, tuple[int, int]]) -> dict[str, Tensor]:
    try:
        rows = read_tensors(file)
        if {name: tuple(rows[name].shape) for name in rows} != shapes:
            raise BundleError(f"{file}: holds other tensors than {shapes}")
        check_finite(file, rows.items())
    except BundleError as error:
        raise BundleError(f"{error}; delete it to have it made again") from error
    return rows


def _cache_key(manifest: HeadManifest, draft_to_target: Tensor) -> str:
    vocabulary = hashlib.sha256(draft_to_target.numpy().tobytes()).hexdigest()
    return f"{manifest.identity.digest()[:16]}-{vocabulary[:16]}"
