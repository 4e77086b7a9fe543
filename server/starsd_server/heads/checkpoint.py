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
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from starsd_edge.config import cache_dir
from starsd_edge.errors import BundleError
from starsd_edge.protocol.greeting import Identity
from starsd_server.heads.head import EagleHead, HeadConfig, HeadKind
from starsd_server.heads.target import open_target_rows

__all__ = ["EMBEDDED_HEAD", "HeadManifest", "load_head", "read_manifest", "save_head"]

FORMAT = "starsd-head-1"
CONFIG_NAME, HEAD_NAME, TARGET_NAME = "config.json", "head.safetensors", "target.safetensors"
EMBEDDED_HEAD = Path(__file__).parent / "embedded"


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadManifest:
    """config.json.

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
        if self.trained_len < 0:
            raise ValueError(f"trained on {self.trained_len} tokens")

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
        BundleError: a file is missing or damaged, tensors are missing, extra or of another shape, or the
            target is needed and not given.
    """
    manifest = read_manifest(folder)
    tensors = _read(folder / HEAD_NAME)
    head = _empty(manifest.head)
    tensors.setdefault("draft_to_target", torch.arange(manifest.head.draft_vocab_size, dtype=torch.int32))
    _check(folder / HEAD_NAME, tensors, head, without=_target_names(manifest.head))
    tensors["draft_to_target"] = tensors["draft_to_target"].long()
    _check_vocabulary(folder / HEAD_NAME, tensors["draft_to_target"], manifest.head)
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
    try:
        return msgspec.json.decode(file.read_bytes(), type=HeadManifest)
    except OSError as error:
        raise BundleError(
            f"{folder}: not a draft head, {CONFIG_NAME} cannot be read ({error.strerror})"
        ) from error
    except msgspec.DecodeError as error:
        raise BundleError(f"{file}: not a draft head's configuration ({error})") from error


def save_head(
    head: EagleHead, manifest: HeadManifest, folder: Path, dtype: torch.dtype = torch.float16
) -> None:
    """Write all three files; learned and target's tensors in `dtype`. The folder is made when missing."""
    folder.mkdir(parents=True, exist_ok=True)
    state = {name: tensor.detach() for name, tensor in head.state_dict().items()}
    theirs = {name: state.pop(name) for name in _target_names(manifest.head)}
    vocabulary = state.pop("draft_to_target").to(torch.int32)
    own = {name: tensor.to(dtype) for name, tensor in state.items()}
    if manifest.head.draft_vocab_size < manifest.head.vocab_size:
        own["draft_to_target"] = vocabulary
    _write(own, folder / HEAD_NAME)
    _write({name: tensor.to(dtype) for name, tensor in theirs.items()}, folder / TARGET_NAME)
    (folder / CONFIG_NAME).write_bytes(msgspec.json.format(msgspec.json.encode(manifest), indent=2) + b"\n")


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
    low, high = int(draft_to_target.min()), int(draft_to_target.max())
    if low < 0 or high >= config.vocab_size or len(set(draft_to_target.tolist())) != len(draft_to_target):
        raise BundleError(
            f"{file}: draft_to_target must hold different tokens of 0 to {config.vocab_size - 1}"
        )


def _target_tensors(
    folder: Path, manifest: HeadManifest, draft_to_target: Tensor, target: Path | None
) -> dict[str, Tensor]:
    """The target's tensors: beside the head, from the cache, or made from the target and cached."""
    config = manifest.head
    shapes = {"embedding": (config.vocab_size, config.hidden_size)}
    if config.kind is HeadKind.EAGLE1:
        shapes["lm_head"] = (config.draft_vocab_size, config.hidden_size)
    cached = cache_dir() / "heads" / _cache_key(manifest, draft_to_target) / TARGET_NAME
    for file in (folder / TARGET_NAME, cached):
        if file.is_file():
            rows = _read(file)
            if {name: tuple(rows[name].shape) for name in rows} != shapes:
                raise BundleError(
                    f"{file}: holds other tensors than {shapes}; delete it to have it made again"
                )
            return rows
    if target is None and folder == EMBEDDED_HEAD:
        # The embedded model belongs to another product of the same installation, hence by name.
        target = Path(importlib.import_module("starsd_jetson.embedded").gguf_path())
    if target is None:
        raise BundleError(
            f"{folder}: no {TARGET_NAME}; name the target once (bundle, GGUF file or Hugging Face folder) "
            "and it will be made from it"
        )
    source = open_target_rows(target)
    if source.hash != manifest.identity.target_hash:
        raise BundleError(
            f"{target}: not the target of the head {folder}: its weights are {source.hash[:12]}..., "
            f"the head was made for {manifest.identity.target}, {manifest.identity.target_hash[:12]}..."
        )
    rows = {"embedding": torch.from_numpy(source.embedding()).half()}
    if config.kind is HeadKind.EAGLE1:
        rows["lm_head"] = torch.from_numpy(source.lm_head(draft_to_target.numpy())).half()
    cached.parent.mkdir(parents=True, exist_ok=True)
    _write(rows, cached)
    return rows


def _cache_key(manifest: HeadManifest, draft_to_target: Tensor) -> str:
    vocabulary = hashlib.sha256(draft_to_target.numpy().tobytes()).hexdigest()
    return f"{manifest.identity.digest()[:16]}-{vocabulary[:16]}"


def _read(file: Path) -> dict[str, Tensor]:
    try:
        return load_file(file)
    except (OSError, SafetensorError) as error:
        raise BundleError(f"{file}: cannot be read as safetensors ({error})") from error


def _write(tensors: dict[str, Tensor], file: Path) -> None:
    """A reader sees the old file or the new one, never a part."""
    partial = file.with_name(f"{file.name}.{os.getpid()}.partial")
    metadata: dict[str, Any] = {"format": "pt"}
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, partial, metadata)
    os.replace(partial, file)
