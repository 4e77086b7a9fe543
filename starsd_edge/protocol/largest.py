"""The largest element of a small array: what most checks of a message come down to."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["largest"]


def largest(values: NDArray[np.integer[Any]]) -> int:
    """Of at least one value. Where it lies is found in half the time of a maximum, and by less code: a
    ufunc looks up types and buffers first, which counts where a message finds other code in the caches."""
    return values.item(values.argmax())
