"""`starsd bench head` with a small head: published files in, converted, loaded, trees out."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from starsd_server.emulate.large_head import MAX_LEN, TREE, VICUNA_7B, measure
from starsd_server.heads.head import HeadKind

SMALL = VICUNA_7B | {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 512,
}
SESSIONS = 2


@pytest.fixture(autouse=True)
def threads_of_other_tests() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("kind", list(HeadKind))
def test_a_random_head_is_converted_loaded_and_drafts_whole_trees(kind: HeadKind, tmp_path: Path) -> None:
    found = measure(tmp_path, SMALL, kind, SESSIONS, 1, lambda _text: None)
    assert TREE.max_nodes == found.tree_nodes
    row_bytes = 2 * SMALL["hidden_size"] * 4  # keys and values in float32
    assert SESSIONS * MAX_LEN * row_bytes == found.kv_mib * 2**20
    assert found.weights_mib < 1
