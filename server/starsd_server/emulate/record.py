"""Recordings for the benchmark, made once and kept in the cache folder."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import torch

from starsd_edge.bundle import Bundle, file_sha256
from starsd_edge.cli.drafts import identity_of
from starsd_edge.cli.runtime import ModelChoice, open_bundle, prompt_writer
from starsd_edge.config import cache_dir
from starsd_edge.decoding.costs import DeviceProfile
from starsd_edge.errors import UsageError
from starsd_edge.protocol.features import FeatureDtype
from starsd_edge.text.template import Message, Role
from starsd_server.emulate.trace import Trace, record_trees
from starsd_server.engine import Engine
from starsd_server.heads.checkpoint import HEAD_NAME, load_head, read_manifest
from starsd_server.heads.grow import VerifyCosts
from starsd_server.rows import Precision, RowHead, int8_available
from starsd_server.sessions import TreeShape

__all__ = ["open_trace", "recorded_trees"]

MAX_LEN = 2048
GROWTH = 4  # counts up when trees come to grow in other steps: older recordings are made again


def open_trace(
    choice: ModelChoice, head_folder: Path, answer_tokens: int, report: Callable[[str], None]
) -> tuple[Trace, Path]:
    """The answers of the head's target to the demo's prompts, and the folder they are kept in.

    Raises UsageError for a head of another target.
    """
    bundle = open_bundle(choice, report)
    check_fits(head_folder, bundle)
    name = bundle.manifest.identity.source_sha256[:16]
    folder = cache_dir() / "recordings" / f"{name}-{answer_tokens}"
    if (folder / "trace.npz").is_file():
        return Trace.load(folder), folder
    report(f"recording the target's answers, {answer_tokens} tokens each, once")
    target: Any = importlib.import_module("starsd_jetson.onnx_target").OnnxTarget.load(bundle, choice.threads)
    trace = Trace.record(target, _prompts(bundle), answer_tokens)
    trace.save(folder)
    return trace, folder


def check_fits(head_folder: Path, bundle: Bundle) -> None:
    """Raises UsageError where the service would refuse a device with this bundle."""
    identity = read_manifest(head_folder).identity
    target = identity_of(bundle.manifest)
    if (difference := identity.difference(target)) is not None:
        raise UsageError(
            f"{head_folder}: a head of {identity.target}, not of {target.target} ({difference}): "
            "give the bundle of its target (--bundle)"
        )


def _prompts(bundle: Bundle) -> list[np.ndarray[tuple[int], np.dtype[np.int32]]]:
    file = resources.files("starsd_edge.cli") / "demo_prompts.json"
    writer = prompt_writer(bundle)
    texts: list[str] = json.loads(file.read_text(encoding="utf-8"))
    return [np.array(writer.write([Message(Role.USER, text)]).tokens, np.int32) for text in texts]


def recorded_trees(
    trace: Trace,
    folder: Path,
    head_folder: Path,
    target: Path | None,
    profile: DeviceProfile,
    max_nodes: int,
    wait_s: float,
    report: Callable[[str], None],
    dtype: FeatureDtype = FeatureDtype.FP16,
) -> Path:
    """The file with the head's trees for a device of this profile at every position of the trace, grown from
    features that were sent as `dtype`."""
    manifest = read_manifest(head_folder)
    weights = head_folder / HEAD_NAME
    # One that was trained anew has its old name.
    name = f"{manifest.name}-{file_sha256(weights)[:12]}" if weights.is_file() else manifest.name
    features = "" if dtype is FeatureDtype.FP16 else f"-{dtype.wire_name}"
    file = folder / f"trees-{name}-{profile.name}-{max_nodes}{features}-{GROWTH}.npz"
    if file.is_file():
        return file
    report(f"recording the head's trees for {profile.name}, once")
    torch.set_num_threads(1)  # as in the service; more of them wait for each other on a busy machine
    precision = Precision.INT8 if int8_available() else Precision.FLOAT32
    head = RowHead(load_head(head_folder, target, dtype=None), precision)
    engine = Engine(head, len(trace.conversations), MAX_LEN)
    costs = VerifyCosts(profile.curve.table(max_nodes).tolist(), wait_s)
    trees = record_trees(engine, trace.rounded(dtype), TreeShape().limits(max_nodes, costs))
    trees.save(file)
    return file
