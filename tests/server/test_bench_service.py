"""`starsd bench service` as users start it, and end it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest

from starsd_edge.bundle import Bundle
from starsd_edge.errors import UsageError
from starsd_server.emulate.bench import BenchRow
from starsd_server.emulate.plot import draw
from starsd_server.emulate.trace import Conversation, Trace
from starsd_server.scheduling import Policy
from tests.cli.tiny_bundle import make_bundle

from .heads import HIDDEN, save_head_for, save_toy_head

ENDS_WITHIN_S = 180  # far above anything measured
# What others read of a row.
TOLD = [
    "scheduler",
    "engine",
    "targets",
    "system_tokens_per_s",
    "per_target_tokens_per_s",
    "acceptance_length",
    "engine_busy_fraction",
    "idle_ms_per_round",
    "batch_rows_mean",
    "queue_ms_p50",
    "queue_ms_p99",
    "draft_ms_p50",
    "draft_ms_p99",
    "fairness_jain",
]
BENCH = [sys.executable, "-m", "starsd_edge", "bench", "service"]


def keep_recording(bundle: Path, cache: Path) -> None:
    """Where the benchmark looks for one of the bundle's answers."""
    manifest = Bundle.open(bundle).manifest
    name = manifest.identity.source_sha256[:16]
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, manifest.shapes.vocab_size, 40).astype(np.int32)
    features = rng.standard_normal((39, HIDDEN)).astype(np.float16)
    Trace((Conversation(tokens, features, prompt_len=10),)).save(cache / "recordings" / f"{name}-128")


def test_terminated_with_all_its_processes_it_ends_and_leaves_nothing(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The signal was for a service that nobody ran: the benchmark went on with dead processes."""
    bundle = make_bundle(tmp_path)
    head = save_head_for(bundle, tmp_path / "head")
    cache, runtime = tmp_path / "cache", tmp_path_factory.mktemp("run")
    keep_recording(bundle, cache)
    command = [*BENCH, "--bundle", str(bundle), "--head", str(head)]
    options = ["--targets", "1", "--scheduler", "batched", "--seconds", "86400"]
    with subprocess.Popen(
        [*command, *options],
        env=os.environ | {"STARSD_CACHE": str(cache), "XDG_RUNTIME_DIR": str(runtime)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            last_s = time.monotonic() + ENDS_WITHIN_S
            while not list(runtime.iterdir()):  # until it has a service
                assert process.poll() is None, process.stderr and process.stderr.read()
                assert time.monotonic() < last_s
            os.killpg(process.pid, signal.SIGTERM)
            assert process.wait(ENDS_WITHIN_S) == 130
        finally:
            process.kill()
        assert process.stderr is not None
        assert "Traceback" not in process.stderr.read()
    assert list(runtime.iterdir()) == []


def test_a_row_of_every_scheduler_and_number_of_targets_is_told_and_drawn(tmp_path: Path) -> None:
    bundle, cache = make_bundle(tmp_path), tmp_path / "cache"
    head = save_head_for(bundle, tmp_path / "head")
    keep_recording(bundle, cache)
    told, drawn = tmp_path / "rows.json", tmp_path / "rows.png"
    command = [*BENCH, "--bundle", str(bundle), "--head", str(head), "--engine", "rtx-4090", "--virtual"]
    options = ["--targets", "1,2", "--seconds", "1", "--json", str(told), "--png", str(drawn)]
    done = subprocess.run(
        [*command, *options],
        env=os.environ | {"STARSD_CACHE": str(cache)},
        capture_output=True,
        text=True,
        timeout=ENDS_WITHIN_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    rows = json.loads(told.read_text())["rows"]
    measured = [(row["scheduler"], row["targets"]) for row in rows]
    assert [("batched", 1), ("serial", 1), ("batched", 2), ("serial", 2)] == measured
    assert [[]] * 4 == [[name for name in TOLD if name not in row] for row in rows]
    assert all(row["system_tokens_per_s"] > 0 for row in rows)
    assert drawn.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("engine", ["real", "rtx-4090"])
def test_a_head_of_another_target_is_named(tmp_path: Path, engine: str) -> None:
    """One of the same width drafted nonsense, and its figures were taken for the head's own."""
    bundle, head = make_bundle(tmp_path), save_toy_head(tmp_path / "head")
    done = subprocess.run(
        [*BENCH, "--bundle", str(bundle), "--head", str(head), "--engine", engine, "--targets", "1"],
        env=os.environ | {"STARSD_CACHE": str(tmp_path / "cache")},
        capture_output=True,
        text=True,
        timeout=ENDS_WITHIN_S,
        check=False,
    )
    assert done.returncode == UsageError.exit_code
    assert f"{head}: a head of toy, not of source (target_hash is 0 here and " in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("scheduler", [policy.value for policy in Policy])
def test_every_scheduler_is_in_the_picture(tmp_path: Path, scheduler: str) -> None:
    """Twice the tokens are another picture. `whole` was none."""
    numbers = len(fields(BenchRow)) - 3
    row = BenchRow(scheduler, "rtx-4090", 1, *[1.0] * numbers)
    pictures = set()
    for times in (1, 2):
        faster = replace(row, system_tokens_per_s=times * row.system_tokens_per_s)
        draw([faster], "toy", tmp_path / "rows.png")
        pictures.add((tmp_path / "rows.png").read_bytes())
    assert len(pictures) == 2
