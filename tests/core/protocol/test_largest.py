"""The largest value, whatever the integers are and wherever it lies."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from starsd_edge.protocol.largest import largest

KINDS = st.sampled_from([np.int16, np.uint16, np.int32, np.uint32, np.uint8])


@given(KINDS.flatmap(lambda kind: arrays.arrays(kind, st.integers(1, 300))))
def test_it_is_the_maximum(values: np.ndarray) -> None:
    assert largest(values) == max(values.tolist())


def test_of_nothing_there_is_none() -> None:
    with pytest.raises(ValueError, match="empty"):
        largest(np.empty(0, np.int32))
