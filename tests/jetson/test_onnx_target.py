"""The target's contract: what it refuses, what it keeps, and that its cache stays where it is."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from starsd_edge.bundle import Bundle
from starsd_edge.decoding.tree import DraftTree
from starsd_edge.errors import BundleError, MissingDependencyError, UsageError
from starsd_jetson import onnx_session
from starsd_jetson.calibrate import SIZES, measure_costs, measure_invariance
from starsd_jetson.onnx_target import OnnxTarget


@pytest.fixture
def target(tiny: Callable[[str], Any], tmp_path: Path) -> OnnxTarget:
    made: OnnxTarget = tiny("llama grouped").export(tmp_path / "bundle", quant="int8")
    return made


def tokens(count: int) -> np.ndarray:
    return (np.arange(count) % 140 + 3).astype(np.int32)


def test_a_tree_on_another_prefix_is_refused(target: OnnxTarget) -> None:
    target.prefill(tokens(4))
    with pytest.raises(UsageError, match="continues 4 tokens, the cache holds 4"):
        target.forward(DraftTree.root_only(3, 4))


@pytest.mark.parametrize("path", [[], [1], [0, 3]])
def test_only_nodes_of_the_last_forward_are_kept(path: list[int], target: OnnxTarget) -> None:
    target.forward(DraftTree.chain([3, 4, 5], 1))
    with pytest.raises(UsageError, match="not one of the last forward's 3 nodes"):
        target.keep(path)


def test_a_forward_without_keep_leaves_nothing(target: OnnxTarget) -> None:
    target.prefill(tokens(5))
    first = target.forward(DraftTree.chain([3, 4, 5], 6)).logits
    again = target.forward(DraftTree.chain([3, 4, 5], 6)).logits
    assert target.kv_len == 5
    np.testing.assert_array_equal(first, again)


def test_outputs_stay_what_they_were_after_the_next_forward(target: OnnxTarget) -> None:
    first = target.forward(DraftTree.root_only(3, 1))
    logits, features = first.logits.copy(), first.features.copy()
    target.forward(DraftTree.root_only(9, 1))
    np.testing.assert_array_equal(first.logits, logits)
    np.testing.assert_array_equal(first.features, features)


def test_trees_end_at_the_block_they_begin_in_and_the_context_ends_them_all(target: OnnxTarget) -> None:
    sizes = {}
    for length in (0, 100, 127, 128, 448, 500, 511):
        target.truncate(0)
        if length:
            target.prefill(tokens(length))
        sizes[length] = target.max_tree_size()
    assert sizes == {0: 64, 100: 28, 127: 1, 128: 64, 448: 64, 500: 12, 511: 1}
    target.forward(DraftTree.root_only(3, 512))
    target.keep([0])
    assert target.max_tree_size() == 0
    with pytest.raises(UsageError, match="do not fit"):
        target.prefill(tokens(1))


def test_no_row_of_the_past_is_copied_or_moved(target: OnnxTarget) -> None:
    """New rows land in the very buffers that are bound: the address stays, old rows keep their bytes."""
    target.prefill(tokens(20))
    address = {name: buffer.ctypes.data for name, buffer in target.cache.buffers.items()}
    before = {name: buffer[:, :20].copy() for name, buffer in target.cache.buffers.items()}
    for step in range(10):
        target.forward(DraftTree.chain([5, 6, 7], 21 + step))
        target.keep([0])
    for name, buffer in target.cache.buffers.items():
        assert buffer.ctypes.data == address[name]
        np.testing.assert_array_equal(buffer[:, :20], before[name])
        assert buffer[:, 20:30].any()


def load_and_run(path: Path) -> list[float]:
    target = OnnxTarget.load(Bundle.open(path), 1)
    return [float(value) for value in target.prefill(tokens(7)).logits[0]]


def test_it_loads_in_a_spawned_process(target: OnnxTarget) -> None:
    here = load_and_run(target.bundle.path)
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        assert pool.submit(eval_there, str(target.bundle.path)).result() == here


def eval_there(path: str) -> list[float]:
    return load_and_run(Path(path))


def test_a_bundle_for_another_runtime_is_refused(target: OnnxTarget) -> None:
    other = replace(target.bundle.manifest, flavour="tensorrt")
    with pytest.raises(BundleError, match="made for tensorrt"):
        OnnxTarget.load(Bundle(target.bundle.path, other))


def test_a_graph_that_does_not_load_is_one_line(target: OnnxTarget) -> None:
    graph = target.bundle.graph_path
    graph.write_bytes(b"\x00" * len(graph.read_bytes()))
    with pytest.raises(BundleError, match="cannot load it") as raised:
        OnnxTarget.load(Bundle.open(target.bundle.path))
    assert len(str(raised.value).splitlines()) == 1


def test_two_packages_of_onnx_runtime_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onnx_session, "is_installed", lambda name: True)
    with pytest.raises(MissingDependencyError, match="overwrite each other"):
        onnx_session.import_onnxruntime()


def test_costs_are_measured_over_all_sizes_and_leave_no_trace(target: OnnxTarget) -> None:
    curve = measure_costs(target, budget_s=0.0)
    assert curve.sizes == SIZES
    assert 0 < curve.plain_s <= curve(64)
    assert target.kv_len == 0


def test_measured_invariance_agrees_with_construction(target: OnnxTarget) -> None:
    assert measure_invariance(target) == target.spec.invariance


def test_costs_of_a_context_shorter_than_what_is_measured_on(target: OnnxTarget) -> None:
    short = OnnxTarget(target.bundle, target.session, 64)
    curve = measure_costs(short, budget_s=0.0)
    assert curve.sizes[-1] == 32
    assert short.kv_len == 0
