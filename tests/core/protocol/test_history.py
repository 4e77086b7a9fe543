"""What an edge keeps of its context, against a list of rows: whatever it came in, any run can be had."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from starsd_edge.protocol.features import FeatureDtype, decode_rows
from starsd_edge.protocol.history import History

WIDTH = 3
STEPS = st.lists(st.tuples(st.booleans(), st.integers(0, 9)), max_size=20)


def rows(start: int, count: int) -> np.ndarray:
    return np.repeat(np.arange(start, start + count, dtype=np.float16)[:, None], WIDTH, axis=1)


@given(steps=STEPS, cuts=st.tuples(st.integers(0, 99), st.integers(0, 99)))
def test_any_run_of_rows_is_that_of_one_list(steps: list[tuple[bool, int]], cuts: tuple[int, int]) -> None:
    history, expected = History(WIDTH, FeatureDtype.FP16, 1 << 20), [0]
    history.start(0)
    for grows, count in steps:
        if grows:
            start = len(expected) - 1
            expected += range(start + 1, start + 1 + count)
            history.extend(np.arange(start + 1, start + 1 + count, dtype=np.int32), rows(start, count))
        else:
            del expected[max(1, len(expected) - count) :]
            history.cut(len(expected))
    assert len(expected) == history.committed_len
    start, stop = sorted(cut % len(expected) for cut in cuts)
    found = decode_rows(history.rows(start, stop))
    assert found[:, 0].tolist() == list(range(start, stop))
    assert history.tokens(0, len(expected)).tolist() == expected


def test_what_was_committed_last_is_sent_without_a_copy() -> None:
    history = History(WIDTH, FeatureDtype.FP16, 1 << 20)
    history.start(0)
    for start in (0, 4):
        history.extend(np.arange(start + 1, start + 5, dtype=np.int32), rows(start, 4))
    assert history.rows(4, 8).data is history.rows(4, 8).data


def test_a_full_history_takes_nothing_more() -> None:
    history = History(WIDTH, FeatureDtype.FP16, 4 * 2 * WIDTH)
    history.start(0)
    history.extend(np.arange(4, dtype=np.int32), rows(0, 4))
    with pytest.raises(OverflowError, match="full"):
        history.extend(np.arange(1, dtype=np.int32), rows(4, 1))
    assert history.committed_len == 5


def test_rows_are_kept_in_the_dtype_the_service_takes() -> None:
    history = History(WIDTH, FeatureDtype.FP16, 1 << 20)
    history.start(0)
    history.extend(np.arange(4, dtype=np.int32), rows(0, 4))
    history.recode(FeatureDtype.BF16)
    history.extend(np.arange(2, dtype=np.int32), rows(4, 2))
    assert decode_rows(history.rows(0, 6))[:, 0].tolist() == list(range(6))
