"""Slots of keys and values: what is behind a session's last row, and beside its slot, is out of reach."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from starsd_server.heads.head import HeadKind
from starsd_server.kv_cache import KvCache

from .heads import small_config

CONFIG = small_config(HeadKind.EAGLE1)
MAX_LEN = 8


def cache(slots: int = 2) -> KvCache:
    return KvCache(CONFIG, slots, MAX_LEN, torch.float32, torch.device("cpu"))


def rows(count: int, value: float) -> Tensor:
    """[2, kv_heads, count, D], keys and values."""
    return torch.full((2, CONFIG.num_kv_heads, count, CONFIG.head_dim), value)


@pytest.mark.parametrize("held", [0, 1, 5, MAX_LEN])
def test_a_slot_shows_its_own_rows_and_nothing_that_was_there_before(held: int) -> None:
    kv = cache()
    kv.append(0, rows(MAX_LEN, 1.0))
    kv.truncate(0, 0)
    kv.append(0, rows(held, 2.0))
    for shown in kv.rows(0):
        assert (CONFIG.num_kv_heads, held, CONFIG.head_dim) == shown.shape
        assert (shown == 2.0).all()


@pytest.mark.parametrize("slot", [0, 1])
def test_rows_past_a_slots_end_are_refused_and_hurt_no_neighbour(slot: int) -> None:
    kv = cache()
    for each in range(2):
        kv.append(each, rows(MAX_LEN - 1, float(each)))
    with pytest.raises(ValueError, match=f"slot {slot} holds 7 of 8 rows: no room for 2"):
        kv.append(slot, rows(2, 9.0))
    for each in range(2):
        assert kv.length(each) == MAX_LEN - 1
        assert all((shown == float(each)).all() for shown in kv.rows(each))


@pytest.mark.parametrize("length", [-1, 4])
def test_a_slot_cannot_be_made_longer_than_what_was_written(length: int) -> None:
    kv = cache()
    kv.append(0, rows(3, 1.0))
    with pytest.raises(ValueError, match=f"slot 0 holds 3 rows, not {length}"):
        kv.truncate(0, length)
    assert kv.length(0) == 3
