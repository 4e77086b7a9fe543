"""What the head is given in a step: the rows of all items side by side, as far as the host knows them.

Everything that has to reach the head's device is an array of `Batch.arrays`, known before the forward begins,
so that it can travel at once and nothing within the forward waits for the host.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from starsd_edge.types import Float32Array
from starsd_server.kv_cache import KvCache
from starsd_server.step import Extend, GoAhead, Grow, SessionRows, WorkItem

__all__ = ["Batch", "Block"]

BLOCKED = np.float32(-np.inf)


@dataclass(frozen=True, slots=True)
class Block:
    """The rows of one item within a step."""

    item: WorkItem
    index: int  # place of the item in the caller's list
    start: int
    end: int

    @property
    def num_rows(self) -> int:
        return self.end - self.start


class _Source(NamedTuple):
    """Hidden vectors of neighbouring rows: of an earlier output, int64 [n], or float32 [n, H] themselves."""

    output: Tensor | None
    array: NDArray[Any]


class Batch:
    """The rows of `blocks`, each of which has some."""

    def __init__(self, blocks: Sequence[Block], kv: KvCache) -> None:
        self.blocks = blocks
        self._sources = _sources(blocks)
        self._masks = [_mask(block, kv) for block in blocks]
        self.arrays: list[NDArray[Any]] = [
            np.array([token for block in blocks for token in _tokens(block.item)], np.int32),
            np.array([position for block in blocks for position in _positions(block.item)], np.int32),
            *[source.array for source in self._sources],
            *[mask for mask in self._masks if mask is not None],
        ]

    @property
    def num_rows(self) -> int:
        return self.blocks[-1].end

    def hidden(self, there: Iterator[Tensor], dtype: torch.dtype) -> Tensor:
        """[n, H]: features of committed rows, outputs of the parents for tree rows.

        `there` gives the arrays on the head's device, from the third one on."""
        parts = [
            array.to(dtype) if output is None else output.index_select(0, array)
            for (output, _), array in zip(self._sources, there, strict=False)
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def masks(self, there: Iterator[Tensor]) -> list[Tensor | None]:
        """Of each block: what a row must not see among the last rows of its slot, float32 [rows, m]; None for
        committed rows, which see no later one of themselves. `there` is where `hidden` has left it."""
        return [None if mask is None else next(there) for mask in self._masks]


def _tokens(item: WorkItem) -> Sequence[int]:
    if isinstance(item, Grow):
        return item.session.tree.beam_tokens
    tokens: list[int] = (item.growth.beams if isinstance(item, GoAhead) else item).tokens.tolist()
    return tokens


def _positions(item: WorkItem) -> Sequence[int]:
    """Head positions: row i of the context is at i, a tree row of depth d at `committed - 1 + d`."""
    if isinstance(item, Extend):
        return range(item.start, item.start + len(item.tokens))
    before = item.session.committed - 1
    if isinstance(item, GoAhead):
        return [before + depth for depth in item.growth.beams.depths.tolist()]
    return [before + item.session.tree.depth] * len(item.session.beams)


def _sources(blocks: Sequence[Block]) -> list[_Source]:
    """Neighbours whose parents lie in one tensor are gathered at once."""
    sources: list[_Source] = []
    run: list[SessionRows] = []  # whose parents these are
    for block in blocks:
        item, session = block.item, block.item.session
        if isinstance(item, Extend | GoAhead) or (run and run[0].output is not session.output):
            sources.extend(_parents(run))
            run = []
        if isinstance(item, Extend):
            sources.append(_Source(None, item.features.astype(np.float32)))
        elif isinstance(item, GoAhead):
            session.outputs = [torch.cat(session.outputs)]
            sources.append(_Source(session.outputs[0], item.growth.beams.parents))
        else:
            run.append(session)
    return sources + _parents(run)


def _parents(run: list[SessionRows]) -> list[_Source]:
    """Outputs of the parents of the beams of sessions that were in the same step before."""
    if not run:
        return []
    rows = [session.output_start + parent for session in run for parent in session.tree.beam_parents]
    return [_Source(run[0].output, np.array(rows))]


def _mask(block: Block, kv: KvCache) -> Float32Array | None:
    if isinstance(block.item, Extend):
        return None
    if isinstance(block.item, GoAhead):
        return block.item.growth.blocked()
    session = block.item.session
    return _blocked(session, kv.length(session.slot) - session.committed, block.num_rows)


def _blocked(session: SessionRows, before: int, rows: int) -> Float32Array:
    """float32 [rows, before + rows] of new tree rows behind older ones: 0 at ancestors and itself."""
    blocked = np.full((rows, before + rows), BLOCKED)
    if before:
        assert session.blocked is not None
        blocked[:, :before] = session.blocked[session.tree.beam_parents]
    blocked.reshape(-1)[before :: before + rows + 1] = 0.0  # itself
    session.blocked = blocked
    return blocked
