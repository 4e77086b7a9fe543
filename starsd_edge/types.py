"""Array aliases, and the legend that every shape comment uses.

    N  nodes of a draft tree, root included        V  vocabulary size
    A  accepted draft tokens of a round            H  hidden size
    L  prompt length in tokens                     F  feature width: H of the draft head

Lengths. `committed_len` counts every committed token, the root included. The root is the newest committed
token and has not been run through the target, so the target's KV cache holds `committed_len - 1` rows when a
round starts, the root's absolute position is `committed_len - 1`, and a node of depth d sits at position
`committed_len - 1 + d`. `base_len` in a message or tree is the `committed_len` it refers to.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

__all__ = ["BoolArray", "FeatureArray", "Float32Array", "Float64Array", "IndexArray", "TokenArray"]

TokenArray: TypeAlias = NDArray[np.int32]
IndexArray: TypeAlias = NDArray[np.int64]  # of nodes in a tree, of classes
Float32Array: TypeAlias = NDArray[np.float32]
Float64Array: TypeAlias = NDArray[np.float64]
BoolArray: TypeAlias = NDArray[np.bool_]
# Features travel as float16, bfloat16 (viewed as uint16) or quantised; in memory they are float16 or float32.
FeatureArray: TypeAlias = NDArray[np.floating[Any]]
