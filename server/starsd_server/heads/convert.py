"""Published EAGLE checkpoints become our heads: `starsd draft convert SOURCE TARGET --out HEAD`.

Read as SafeAILab publishes them: `config.json` and `pytorch_model.bin` (opened with weights_only) or
safetensors. Every tensor must have its place and every place its tensor; the reference itself loads with
strict=False, which has hidden unloaded weights more than once.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from starsd_edge.errors import BundleError
from starsd_edge.protocol.greeting import Identity, projection_hash
from starsd_server.heads.checkpoint import MAX_TRAINED_LEN, HeadManifest, save_head
from starsd_server.heads.head import EagleHead, HeadConfig, HeadKind
from starsd_server.heads.target import open_source, open_target_rows
from starsd_server.heads.tensors import INDEX_DTYPES, check_finite, check_regular

__all__ = ["convert"]

# Ours -> theirs. A tuple is stacked along the output rows.
LAYER = {
    "qkv_proj.weight": ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"),
    "o_proj.weight": ("self_attn.o_proj.weight",),
    "mlp_norm.weight": ("post_attention_layernorm.weight",),
    "gate_up_proj.weight": ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
    "down_proj.weight": ("mlp.down_proj.weight",),
}
EAGLE1 = {name: tuple(f"layers.0.{part}" for part in parts) for name, parts in LAYER.items()} | {
    "fc.weight": ("fc.weight",)
}
EAGLE3 = {name: tuple(f"midlayer.{part}" for part in parts) for name, parts in LAYER.items()} | {
    "fc.weight": ("fc.weight",),
    "embed_norm.weight": ("midlayer.input_layernorm.weight",),
    "hidden_norm.weight": ("midlayer.hidden_norm.weight",),
    "out_norm.weight": ("norm.weight",),
    "lm_head": ("lm_head.weight",),
}
BIASES = ("self_attn.q_proj.bias", "self_attn.k_proj.bias", "self_attn.v_proj.bias")  # of Qwen2's heads
# Computed tables that some exporters keep; nothing is lost with them.
TABLES = ("t2d", "layers.0.self_attn.rotary_emb.inv_freq", "midlayer.self_attn.rotary_emb.inv_freq")
DEFAULT_RMS_EPS = 1e-6
DEFAULT_ROPE_THETA = 10000.0  # the reference's, when its config names none


def convert(source: Path, target: Path, out: Path, dtype: torch.dtype = torch.float16) -> HeadManifest:
    """Write `out` in our format from a published head and its target.

    Args:
        source: folder with `config.json` and the weights.
        target: Hugging Face folder, GGUF file or bundle of the target.

    Raises:
        BundleError: something is missing, extra, of another shape or kind, or not finite; names it.
    """
    file = source / "config.json"
    raw = _read_config(file)
    found = _read_weights(source)
    kind = HeadKind.EAGLE3 if any(name.startswith("midlayer.") for name in found) else HeadKind.EAGLE1
    rows = open_target_rows(target)
    config = _config(raw, kind, found, source)
    embedding = found.pop("embed_tokens.weight", None)
    if embedding is None:
        embedding = torch.from_numpy(rows.embedding())
    draft_to_target = _draft_vocabulary(found, config, source)
    tensors = _rename(found, EAGLE1 if kind is HeadKind.EAGLE1 else EAGLE3, config, source)
    tensors |= {"embedding": embedding, "draft_to_target": draft_to_target}
    if kind is HeadKind.EAGLE1:
        tensors["lm_head"] = torch.from_numpy(rows.lm_head(draft_to_target.numpy()))
    with torch.device("meta"):
        head = EagleHead(config)
    _check_shapes(tensors, head, source)
    head.load_state_dict(tensors, assign=True)
    eagle3 = kind is HeadKind.EAGLE3
    layers = _feature_layers(target) if eagle3 else (-1,)
    identity = Identity(
        target=rows.name,
        target_hash=rows.hash,
        vocab_size=config.vocab_size,
        tokenizer_hash=rows.tokenizer_hash,
        hidden_size=config.feature_size // len(layers),
        # EAGLE-3's projection runs on the edge, so what crosses the wire is H wide for both kinds.
        feature_size=config.hidden_size,
        feature_layers=layers,
        feature_norm=not eagle3,
        # of the values as they are stored, which are those that an export computes with
        projection=projection_hash(tensors["fc.weight"].to(dtype).float().numpy())
        if eagle3
        else msgspec.UNSET,
    )
    try:
        manifest = HeadManifest(
            name=source.resolve().name,
            head=config,
            identity=identity,
            trained_len=_trained_len(raw, file),
        )
    except ValueError as error:
        raise BundleError(f"{source}: {error}") from error
    save_head(head, manifest, out, dtype)
    return manifest


def _read_config(file: Path) -> dict[str, Any]:
    check_regular(file)
    try:
        raw = json.loads(file.read_text("utf-8"))
    except OSError as error:
        raise BundleError(
            f"{file}: cannot be read ({error.strerror}); give a folder with an EAGLE head"
        ) from error
    except (ValueError, RecursionError) as error:
        raise BundleError(f"{file}: not JSON ({error})") from error
    if not isinstance(raw, dict):
        raise BundleError(f"{file}: not a JSON object")
    return raw


def _read_weights(source: Path) -> dict[str, Tensor]:
    safe = sorted(source.glob("*.safetensors"))
    files = safe or sorted(source.glob("pytorch_model*.bin"))
    if not files:
        raise BundleError(f"{source}: neither *.safetensors nor pytorch_model*.bin in it")
    found: dict[str, Tensor] = {}
    for file in files:
        check_regular(file)
        try:
            found |= load_file(file) if safe else torch.load(file, map_location="cpu", weights_only=True)
        except Exception as error:  # both libraries have a class of their own for every kind of damage
            raise BundleError(f"{file}: cannot be read safely ({error})") from error
    if not all(isinstance(name, str) and _is_plain(value) for name, value in found.items()):
        raise BundleError(f"{source}: its weights are not a plain table of tensors")
    weights = {name: tensor for name, tensor in found.items() if name not in TABLES}
    check_finite(source, ((name, tensor) for name, tensor in weights.items() if name != "d2t"))
    return weights


def _is_plain(value: object) -> bool:
    """A dense tensor in memory."""
    return isinstance(value, Tensor) and value.layout is torch.strided and value.device.type == "cpu"


def _config(raw: dict[str, Any], kind: HeadKind, found: dict[str, Tensor], source: Path) -> HeadConfig:
    file = source / "config.json"
    if raw.get("hidden_act", "silu") != "silu":
        raise BundleError(f"{file}: activation '{raw['hidden_act']}' is not supported (supported: silu)")
    if raw.get("num_hidden_layers", 1) != 1:
        raise BundleError(
            f"{file}: a head of {raw['num_hidden_layers']} layers is not supported (supported: 1)"
        )
    # The reference defaults `bias` to true when its config is silent; what the file holds decides.
    bias = "fc.bias" in found and kind is HeadKind.EAGLE1
    if raw.get("bias", bias) and not bias and kind is HeadKind.EAGLE1:
        raise BundleError(f"{source}: missing: fc.bias, which its config.json announces")
    qkv_bias = bool(raw.get("qkv_bias")) or any(name.endswith(BIASES) for name in found)
    try:
        theta, scale = _rope(raw)
        hidden, heads = _whole(raw, "hidden_size"), _whole(raw, "num_attention_heads")
        vocab = _whole(raw, "vocab_size")
        draft_vocab = _whole(raw, "draft_vocab_size", vocab) if kind is HeadKind.EAGLE3 else vocab
        width = _whole(raw, "target_hidden_size", hidden)
        return HeadConfig(
            kind=kind,
            hidden_size=hidden,
            intermediate_size=_whole(raw, "intermediate_size"),
            num_heads=heads,
            num_kv_heads=_whole(raw, "num_key_value_heads", heads),
            head_dim=_whole(raw, "head_dim", hidden // heads),
            vocab_size=vocab,
            draft_vocab_size=draft_vocab,
            feature_size=3 * width if kind is HeadKind.EAGLE3 else hidden,
            rms_eps=_real(raw, "rms_norm_eps", DEFAULT_RMS_EPS),
            rope_theta=theta,
            rope_scale=scale,
            fc_bias=bias,
            qkv_bias=qkv_bias,
        )
    except KeyError as error:
        raise BundleError(f"{file}: no {error}") from error
    except (ValueError, ZeroDivisionError) as error:
        raise BundleError(f"{file}: {error}") from error


def _whole(raw: dict[str, Any], key: str, default: int | None = None) -> int:
    """Raises KeyError where there is none and no default, ValueError for what is not a whole number."""
    value = raw[key] if default is None or raw.get(key) is not None else default
    if type(value) is not int:  # nor bool, which is one to isinstance
        raise ValueError(f"{key} is {value!r:.60}, not a whole number")
    return value


def _real(raw: dict[str, Any], key: str, default: float | None = None) -> float:
    """Likewise, for a number."""
    value = raw[key] if default is None or raw.get(key) is not None else default
    try:
        if type(value) in (int, float):
            return float(value)
    except OverflowError:
        pass
    raise ValueError(f"{key} is {value!r:.60}, not a number")


def _rope(raw: dict[str, Any]) -> tuple[float, float]:
    """(theta, position divisor). With `rope_scaling` the reference ignores `rope_theta`; so do we."""
    scaling = raw.get("rope_scaling")
    if not scaling:
        return _real(raw, "rope_theta", DEFAULT_ROPE_THETA), 1.0
    if not isinstance(scaling, dict) or scaling.get("type", scaling.get("rope_type")) != "linear":
        raise ValueError(f"rope_scaling {scaling!r:.60} is not supported (supported: linear)")
    return DEFAULT_ROPE_THETA, _real(scaling, "factor")


def _trained_len(raw: dict[str, Any], file: Path) -> int:
    """Tokens of its training's contexts; 0 where the configuration does not say."""
    length = raw.get("max_position_embeddings", 0)
    if type(length) is not int or not 0 <= length <= MAX_TRAINED_LEN:
        raise BundleError(f"{file}: max_position_embeddings is {length!r:.60}")
    return length


def _draft_vocabulary(found: dict[str, Tensor], config: HeadConfig, source: Path) -> Tensor:
    """Target ids of the draft ids. `d2t` holds differences; the reference drops it at equal sizes."""
    own = torch.arange(config.draft_vocab_size)
    difference = found.pop("d2t", None)
    if config.draft_vocab_size == config.vocab_size:
        return own
    if difference is None:
        raise BundleError(
            f"{source}: missing: d2t, for a draft vocabulary of {config.draft_vocab_size} tokens out of "
            f"{config.vocab_size}"
        )
    if difference.shape != own.shape or difference.dtype not in INDEX_DTYPES:
        raise BundleError(
            f"{source}: d2t is {difference.dtype} {list(difference.shape)}, not int64 [{len(own)}]"
        )
    ids = own + difference.long()
    if int(ids.min()) < 0 or int(ids.max()) >= config.vocab_size or len(set(ids.tolist())) != len(ids):
        raise BundleError(f"{source}: d2t leads to tokens outside the vocabulary or twice to the same one")
    return ids


def _rename(
    found: dict[str, Tensor], names: dict[str, tuple[str, ...]], config: HeadConfig, source: Path
) -> dict[str, Tensor]:
    if config.fc_bias:
        names = names | {"fc.bias": ("fc.bias",)}
    if config.qkv_bias:
        layer = "layers.0" if config.kind is HeadKind.EAGLE1 else "midlayer"
        names = names | {"qkv_proj.bias": tuple(f"{layer}.{part}" for part in BIASES)}
    theirs = {part for parts in names.values() for part in parts}
    missing, extra = sorted(theirs - set(found)), sorted(set(found) - theirs)
    if missing or extra:
        complaints = [
            f"{word}: {', '.join(what)}" for word, what in (("missing", missing), ("unknown", extra)) if what
        ]
        raise BundleError(f"{source}: not an {config.kind.label} head: {'; '.join(complaints)}")
    return {name: _stack([(part, found[part]) for part in parts], source) for name, parts in names.items()}


def _stack(parts: list[tuple[str, Tensor]], source: Path) -> Tensor:
    """Along the outputs, which must be equally wide."""
    if len(parts) == 1:
        return parts[0][1]
    if any(part.ndim == 0 for _, part in parts) or len({part.shape[1:] for _, part in parts}) > 1:
        shapes = ", ".join(f"{name} {list(part.shape)}" for name, part in parts)
        raise BundleError(f"{source}: not equally wide: {shapes}")
    return torch.cat([part for _, part in parts])


def _check_shapes(tensors: dict[str, Tensor], head: EagleHead, source: Path) -> None:
    wrong = [
        f"{name} is {list(tensors[name].shape)}, not {list(wanted.shape)}"
        for name, wanted in head.state_dict().items()
        if tensors[name].shape != wanted.shape
    ]
    if wrong:
        raise BundleError(f"{source}: does not fit its config.json or its target: {'; '.join(wrong)}")


def _feature_layers(target: Path) -> tuple[int, ...]:
    """EAGLE-3 taps the inputs of layers 2, n // 2 and n - 3 of the target."""
    from starsd_edge.bundle import MANIFEST_NAME, Bundle

    if (target / MANIFEST_NAME).is_file():
        n = Bundle.open(target).manifest.shapes.num_layers
    else:
        n = int(open_source(target).shape.num_layers)
    layers = (2, n // 2, n - 3)
    if len(set(layers)) < 3 or min(np.diff(layers)) < 1:
        raise BundleError(
            f"{target}: {n} layers are too few for EAGLE-3, which taps three different ones (7 or more)"
        )
    return layers
