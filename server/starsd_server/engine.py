"""One step of a draft head over rows of every session that has any: prefill, extension, a level of a tree.

`Engine.step` takes what the scheduler chose and is the only place where the head runs. Sessions meet in the
matrix products and nowhere else: keys and values are read per session, and `rows` sees to it that a product
does not depend on what else is in the batch. So a session's drafts are the same bits alone and among many.

A session whose rows cannot be used (not finite, too many for its slot) is refused by its own outcome; the
others' step goes on.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from starsd_edge.types import BoolArray, Float32Array, TokenArray
from starsd_server.batch import Batch, Block
from starsd_server.heads.ahead import AheadGrowth
from starsd_server.heads.grow import TreeGrowth, add_level
from starsd_server.kv_cache import KvCache
from starsd_server.rows import RowHead
from starsd_server.step import (
    NO_TREE,
    Advanced,
    Extend,
    GoAhead,
    Grow,
    Outcome,
    OwnThread,
    Refused,
    SessionRows,
    TreeReady,
    WorkItem,
)
from starsd_server.transfers import Arrival, SameMemory, Transfers

__all__ = ["Engine", "Underway"]

NOT_A_NUMBER = "the draft head computed NaN from this session's rows"


@dataclass(frozen=True, slots=True)
class _Offered:
    """Rows of a step whose likeliest tokens are offered to a tree as children."""

    block: Block
    tree: TreeGrowth | AheadGrowth
    rows: int

    @property
    def wanted(self) -> bool:
        """Whether the session still grows that tree."""
        session = self.block.item.session
        return session.growth is self.tree or session.ahead is self.tree


@dataclass(frozen=True, slots=True)
class Underway:
    """A step that the head is computing, or has computed.

    outcomes  of the items that no tree grows from
    blocks    the items that take part
    offered   rows that are scored, in order
    scores    int64 [m, k] draft ids, float32 [m, k] log-probabilities; nothing where no row is scored
    """

    outcomes: list[Outcome]
    blocks: list[Block]
    offered: list[_Offered]
    scores: Arrival

    def writes_to(self, slot: int) -> bool:
        return any(block.item.session.slot == slot for block in self.blocks)


class Engine(OwnThread):
    """One head, its slots, and the step."""

    def __init__(self, head: RowHead, slots: int, max_len: int, transfers: Transfers | None = None) -> None:
        self._head = head
        self.kv = KvCache(head.config, slots, max_len, head.dtype, head.device)
        self._transfers = transfers or SameMemory()
        self._to_target: TokenArray = head.draft_to_target.cpu().numpy().astype(np.int32)
        self._causal: dict[int, Tensor] = {}  # masks of committed rows, by their number

    @property
    def head(self) -> RowHead:
        return self._head

    def reset(self, slot: int) -> SessionRows:
        """An empty session in `slot`; whoever had it before has lost its rows."""
        self.kv.truncate(slot, 0)
        return SessionRows(slot)

    def rewind(self, session: SessionRows, committed: int) -> None:
        """Keep the first `committed` rows of a session and no tree."""
        session.drop_tree()
        self.kv.truncate(session.slot, committed)
        if committed != session.committed:
            session.committed, session.tip = committed, None

    @torch.inference_mode()
    def step(self, items: list[WorkItem]) -> list[Outcome]:
        """Run all `items` in one forward of the head; one outcome each, in order.

        Sessions appear once at most. Grow items belong to sessions whose last outcome was Advanced.
        """
        return self.finish(self.begin(items))

    def narrow(self, session: SessionRows, floor: float) -> Outcome:
        """See StepEngine."""
        session.tree.narrow(floor)
        return self._outcome(session)

    def begin(self, items: list[WorkItem]) -> Underway:
        """The first half of `step`: all that the head's device has to do. Nothing here asks what it has
        computed, and from here on the rows count as the sessions'."""
        outcomes: list[Outcome] = [Advanced()] * len(items)
        blocks = self._admit(items, outcomes)
        wanting = self._wanting(blocks, outcomes)
        running = [block for block in blocks if block.end > block.start]
        batch = Batch(running, self.kv) if running else None
        chosen = _scored_rows(wanting, batch.num_rows if batch else 0)
        arrays = [*(batch.arrays if batch else []), *([] if chosen is None else [chosen])]
        there = iter(self._transfers.up(arrays))
        output = self._forward(batch, there) if batch else None
        for block in running:
            assert output is not None
            self._remember(block, output)
        offered = [self._offer(block) for block in wanting]
        if not offered:
            return Underway(outcomes, blocks, offered, self._transfers.down([]))
        rows = output
        if chosen is not None:
            tips = [block.item.session.tip for block in wanting if block.start == block.end]
            rows = torch.cat([t for t in [output, *tips] if t is not None]).index_select(0, next(there))
        assert rows is not None
        best, ids = self._head.candidates(rows, max([part.tree.width for part in offered]))
        return Underway(outcomes, blocks, offered, self._transfers.down([ids, best]))

    def finish(self, step: Underway) -> list[Outcome]:
        """The second half: the trees grow, except those of sessions that were rewound since. The host waits
        here for what was computed, once."""
        outcomes, offered = step.outcomes, step.offered
        arrays = step.scores.wait()
        if not offered:
            return outcomes
        ids, log_probs = arrays
        if not np.isfinite(log_probs).all() or not all(part.wanted for part in offered):
            offered, rows = self._usable(offered, log_probs, outcomes)
            ids, log_probs = ids[rows], log_probs[rows]
            if not offered:
                return outcomes
        tokens = self._to_target[ids]
        growths = [part.tree for part in offered if isinstance(part.tree, TreeGrowth)]
        if growths:  # or all go ahead
            add_level(growths, log_probs, tokens)
        end = 0
        for part in offered:
            session, start, end = part.block.item.session, end, end + part.rows
            if isinstance(part.tree, AheadGrowth):
                part.tree.add(log_probs[start:end], tokens[start:end])
                outcomes[part.block.index] = self._outcome_ahead(session, part.tree)
            else:
                outcomes[part.block.index] = self._outcome(session)
        return outcomes

    def _admit(self, items: list[WorkItem], outcomes: list[Outcome]) -> list[Block]:
        """The rows that may run, side by side; refusals go into `outcomes`."""
        blocks: list[Block] = []
        row = 0
        for index, item in enumerate(items):
            reason = self._objection(item)
            if reason is not None:
                self.rewind(item.session, item.session.committed)
                outcomes[index] = Refused(reason)
                continue
            if isinstance(item, Extend):
                self.rewind(item.session, item.start)
            blocks.append(Block(item, index, row, row + item.num_rows))
            row += item.num_rows
        return blocks

    def _objection(self, item: WorkItem) -> str | None:
        if not isinstance(item, Extend):
            return None
        n, config = len(item.tokens), self._head.config
        if item.features.ndim != 2 or len(item.features) != n:
            return f"{n} tokens came with {len(item.features)} feature rows"
        if item.features.shape[1] != config.hidden_size:
            return f"feature rows are {item.features.shape[1]} wide, not {config.hidden_size}"
        if not 0 <= item.start <= item.session.committed:
            return f"rows start at {item.start}; the session holds {item.session.committed}"
        if item.start + n > self.kv.max_len:
            return f"{item.start + n} rows exceed the session's limit of {self.kv.max_len}"
        if n == 0:
            return None
        if item.tokens.min() < 0 or item.tokens.max() >= config.vocab_size:
            return f"a token id is outside the vocabulary of {config.vocab_size}"
        if not np.isfinite(item.features).all():
            return "a feature is NaN or infinite"
        return None

    def _wanting(self, blocks: list[Block], outcomes: list[Outcome]) -> list[Block]:
        """Those that want their rows, or their last one, scored; what becomes of an Extend that cannot have
        that goes into `outcomes`."""
        wanting: list[Block] = []
        for block in blocks:
            item = block.item
            if not isinstance(item, Extend):
                wanting.append(block)
            elif item.limits is not None and block.start == block.end and item.session.tip is None:
                # A tree on a row whose output is gone: the root has to do until rows come.
                outcomes[block.index] = NO_TREE
            elif item.limits is not None:
                wanting.append(block)
        return wanting

    def _forward(self, batch: Batch, there: Iterator[Tensor]) -> Tensor:
        """The head over all rows: [n, H]. `there` gives the arrays of `batch` on the head's device."""
        tokens, positions = next(there), next(there)
        hidden, masks = batch.hidden(there, self._head.dtype), batch.masks(there)
        return self._head.step(
            tokens,
            hidden,
            positions,
            lambda queries, fresh: self._attend(batch.blocks, masks, queries, fresh),
        )

    def _attend(
        self, blocks: Sequence[Block], masks: list[Tensor | None], queries: Tensor, fresh: Tensor
    ) -> Tensor:
        """Every session's rows against its own slot: see `SlotAttend`."""
        heads, _, width = queries.shape
        kv_heads = fresh.shape[1]
        mixed: list[Tensor] = []  # [heads, rows, D] of each block
        for block, among_tree in zip(blocks, masks, strict=True):
            slot, rows = block.item.session.slot, block.num_rows
            self.kv.append(slot, fresh.narrow(2, block.start, rows))
            keys, values = self.kv.rows(slot)  # [kv, len, D]
            # The rows of a session times the heads that share keys are one matrix.
            own = queries.narrow(1, block.start, rows).reshape(kv_heads, -1, width)
            scores = torch.bmm(own, keys.transpose(1, 2))  # [kv, groups * rows, len]
            mask = self._among_committed(rows) if among_tree is None else among_tree
            if mask is not None:
                by_row = scores.view(heads, rows, -1)
                by_row.narrow(2, by_row.shape[2] - mask.shape[1], mask.shape[1]).add_(mask)
            weights = torch.softmax(scores, -1, dtype=torch.float32)
            if weights.dtype is not values.dtype:
                weights = weights.to(values.dtype)
            mixed.append(torch.bmm(weights, values).view(heads, rows, width))
        return mixed[0] if len(mixed) == 1 else torch.cat(mixed, 1)

    def _among_committed(self, rows: int) -> Tensor | None:
        """float32 [rows, rows]: -inf where a committed row does not see another; None for a single one."""
        if rows == 1:
            return None
        mask = self._causal.get(rows)
        if mask is None:
            whole = torch.full((rows, rows), -math.inf, device=self._head.device)
            mask = self._causal[rows] = whole.triu(1)
        return mask

    def _offer(self, block: Block) -> _Offered:
        """The tree that the block's scored rows belong to; an Extend begins it."""
        item, session = block.item, block.item.session
        if isinstance(item, GoAhead):
            return _Offered(block, item.growth, block.num_rows)
        if isinstance(item, Grow):
            return _Offered(block, session.tree, block.num_rows)
        assert item.limits is not None
        assert session.tip is not None
        session.growth = TreeGrowth(item.limits)
        session.outputs = [session.tip]
        if block.start == block.end:
            session.output, session.output_start = session.tip, 0
        return _Offered(block, session.growth, 1)

    def _usable(
        self, offered: list[_Offered], log_probs: Float32Array, outcomes: list[Outcome]
    ) -> tuple[list[_Offered], BoolArray]:
        """Whose scores may be used, and which rows these are, bool [m]. What led to scores that are not
        finite is undone; nothing is left to do for a tree that was dropped while the step was under way."""
        usable: BoolArray = np.logical_and.reduce(np.isfinite(log_probs), axis=1)
        kept: list[_Offered] = []
        end = 0
        for part in offered:
            start, end = end, end + part.rows
            if part.wanted and usable[start:end].all():
                kept.append(part)
                continue
            usable[start:end] = False
            if part.wanted:
                self._undo(part.block.item)
                if not isinstance(part.tree, AheadGrowth):  # of which only nothing more comes
                    outcomes[part.block.index] = Refused(NOT_A_NUMBER)
        return kept, usable

    def _remember(self, block: Block, output: Tensor) -> None:
        """Where the session finds its rows of this step; committed ones count from now on."""
        session = block.item.session
        session.output = output
        if not isinstance(block.item, Extend):
            session.output_start = block.start
            if session.goes_ahead:
                session.outputs.append(output[block.start : block.end])
            return
        session.output_start = block.end - 1
        session.committed = self.kv.length(session.slot)
        # A copy: a view would keep the whole step's output alive while the session idles.
        session.tip = output[block.end - 1 : block.end].clone()

    def _undo(self, item: WorkItem) -> None:
        """Rows that led to NaN are no rows: forget them."""
        self.rewind(item.session, item.start if isinstance(item, Extend) else item.session.committed)

    def _outcome(self, session: SessionRows) -> Outcome:
        """What the newest level of the session's tree makes of it."""
        beams = len(session.beams)
        if beams and self.kv.length(session.slot) + beams <= self.kv.max_len:
            return Advanced(beams)
        tree, ahead = session.tree.finish(), self._go_ahead(session)
        if not ahead:
            self.rewind(session, session.committed)  # drops the tree's rows
        return TreeReady(tree.tokens, tree.parents, np.exp(tree.scores), ahead)

    def _go_ahead(self, session: SessionRows) -> int:
        """Let a tree that is done go on if it may; rows of the step that it wants."""
        limits = session.tree.limits.ahead
        if limits is None:
            return 0
        growth = AheadGrowth(limits, *session.tree.offers)
        rows = len(growth.beams)
        if self.kv.length(session.slot) + rows > self.kv.max_len:
            return 0
        session.growth, session.ahead = None, growth
        return rows

    def _outcome_ahead(self, session: SessionRows, growth: AheadGrowth) -> Outcome:
        """What the newest rows make of a tree that goes on."""
        beams = len(growth.beams)
        if beams and self.kv.length(session.slot) + beams <= self.kv.max_len:
            return Advanced(beams)
        tree = growth.finish()
        self.rewind(session, session.committed)
        return TreeReady(tree.tokens, tree.parents, np.exp(tree.scores))


def _scored_rows(wanting: list[Block], num_rows: int) -> NDArray[np.int64] | None:
    """int64 [m]: every beam, and the last committed row of those that begin a tree; behind the `num_rows` of
    the step come outputs of older rows, one for each of those that begin a tree without a row of their own.
    None: all rows of the step."""
    parts: list[NDArray[np.int64]] = []
    tips = num_rows
    for block in wanting:
        if not isinstance(block.item, Extend):
            parts.append(np.arange(block.start, block.end))
        elif block.end > block.start:
            parts.append(np.arange(block.end - 1, block.end))
        else:
            parts.append(np.arange(tips, tips + 1))
            tips += 1
    rows = np.concatenate(parts) if parts else np.empty(0, np.int64)
    return None if tips == num_rows == len(rows) else rows
