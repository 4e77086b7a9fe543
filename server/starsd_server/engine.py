"""One step of a draft head over rows of every session that has any: prefill, extension, a level of a tree.

`Engine.step` takes what the scheduler chose and is the only place where the head runs. Sessions meet in the
matrix products and nowhere else: keys and values are read per session, and `rows` sees to it that a product
does not depend on what else is in the batch. So a session's drafts are the same bits alone and among many.

A session whose rows cannot be used (not finite, too many for its slot) is refused by its own outcome; the
others' step goes on.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from starsd_edge.types import BoolArray, Float32Array, TokenArray
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

__all__ = ["Engine"]


BLOCKED = np.float32(-np.inf)


@dataclass(frozen=True, slots=True)
class _Block:
    """The rows of one item within a step."""

    item: WorkItem
    index: int  # place of the item in the caller's list
    start: int
    end: int


class Engine(OwnThread):
    """One head, its slots, and the step."""

    def __init__(self, head: RowHead, slots: int, max_len: int) -> None:
        self._head = head
        self.kv = KvCache(head.config, slots, max_len, head.dtype, head.device)
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
        outcomes: list[Outcome] = [Advanced()] * len(items)
        blocks = self._admit(items, outcomes)
        running = [block for block in blocks if block.end > block.start]
        output = self._forward(running) if running else None
        for block in running:
            assert output is not None
            self._remember(block, output)
        self._collect(blocks, output, outcomes)
        return outcomes

    def narrow(self, session: SessionRows, floor: float) -> Outcome:
        """See StepEngine."""
        session.tree.narrow(floor)
        return self._outcome(session)

    def _admit(self, items: list[WorkItem], outcomes: list[Outcome]) -> list[_Block]:
        """The rows that may run, side by side; refusals go into `outcomes`."""
        blocks: list[_Block] = []
        row = 0
        for index, item in enumerate(items):
            reason = self._objection(item)
            if reason is not None:
                self.rewind(item.session, item.session.committed)
                outcomes[index] = Refused(reason)
                continue
            if isinstance(item, Extend):
                self.rewind(item.session, item.start)
            blocks.append(_Block(item, index, row, row + item.num_rows))
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

    def _forward(self, blocks: list[_Block]) -> Tensor:
        """The head over all rows: [n, H]."""
        device = self._head.device
        tokens = torch.from_numpy(np.concatenate([self._tokens(b.item) for b in blocks])).to(device)
        positions = torch.from_numpy(np.concatenate([self._positions(b.item) for b in blocks])).to(device)
        hidden = self._hidden(blocks)
        return self._head.step(
            tokens, hidden, positions, lambda queries, fresh: self._attend(blocks, queries, fresh)
        )

    def _tokens(self, item: WorkItem) -> TokenArray:
        if isinstance(item, Extend):
            return item.tokens
        return item.growth.beams.tokens if isinstance(item, GoAhead) else item.session.beams.tokens

    def _positions(self, item: WorkItem) -> TokenArray:
        """Head positions: row i of the context is at i, a tree row of depth d at `committed - 1 + d`."""
        if isinstance(item, Extend):
            return np.arange(item.start, item.start + len(item.tokens), dtype=np.int32)
        if isinstance(item, GoAhead):
            return np.asarray(item.session.committed - 1 + item.growth.beams.depths, np.int32)
        beams = item.session.beams
        return np.full(len(beams), item.session.committed - 1 + beams.depth, np.int32)

    def _hidden(self, blocks: list[_Block]) -> Tensor:
        """[n, H]: features of committed rows, outputs of the parents for tree rows."""
        parts: list[Tensor] = []
        run: list[_Block] = []  # neighbours whose parents lie in one tensor: gathered at once
        for block in blocks:
            if isinstance(block.item, Extend):
                parts.extend(_parents(run))
                run = []
                features = torch.from_numpy(block.item.features.astype(np.float32))
                parts.append(features.to(self._head.device, self._head.dtype))
                continue
            if isinstance(block.item, GoAhead):
                parts.append(_parents_of_any_level(block.item))
                continue
            if run and run[0].item.session.output is not block.item.session.output:
                parts.extend(_parents(run))
                run = []
            run.append(block)
        parts.extend(_parents(run))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _attend(self, blocks: list[_Block], queries: Tensor, fresh: Tensor) -> Tensor:
        """Every session's rows against its own slot: see `SlotAttend`."""
        heads, _, width = queries.shape
        kv_heads = fresh.shape[1]
        mixed: list[Tensor] = []  # [heads, rows, D] of each block
        for block in blocks:
            slot, rows = block.item.session.slot, block.end - block.start
            self.kv.append(slot, fresh.narrow(2, block.start, rows))
            keys, values = self.kv.rows(slot)  # [kv, len, D]
            # The rows of a session times the heads that share keys are one matrix.
            own = queries.narrow(1, block.start, rows).reshape(kv_heads, -1, width)
            scores = torch.bmm(own, keys.transpose(1, 2))  # [kv, groups * rows, len]
            mask = self._mask(block.item, rows)
            if mask is not None:
                by_row = scores.view(heads, rows, -1)
                by_row.narrow(2, by_row.shape[2] - mask.shape[1], mask.shape[1]).add_(mask)
            weights = torch.softmax(scores, -1, dtype=torch.float32)
            if weights.dtype is not values.dtype:
                weights = weights.to(values.dtype)
            mixed.append(torch.bmm(weights, values).view(heads, rows, width))
        return mixed[0] if len(mixed) == 1 else torch.cat(mixed, 1)

    def _mask(self, item: WorkItem, rows: int) -> Tensor | None:
        """What a row must not see among the last rows of its slot: float [rows, m], or None."""
        if isinstance(item, Grow):
            return self._masking(self._blocked(item.session, rows))
        if isinstance(item, GoAhead):
            return self._masking(item.growth.blocked())
        if rows == 1:
            return None
        mask = self._causal.get(rows)
        if mask is None:
            mask = self._causal[rows] = self._masking(np.triu(np.full((rows, rows), BLOCKED), 1))
        return mask

    def _masking(self, blocked: Float32Array) -> Tensor:
        return torch.from_numpy(blocked).to(self._head.device, self._head.dtype)

    def _blocked(self, session: SessionRows, rows: int) -> Float32Array:
        """float32 [rows, t + rows] of new tree rows behind t older ones: 0 at ancestors and itself."""
        before = self.kv.length(session.slot) - rows - session.committed
        blocked = np.full((rows, before + rows), BLOCKED)
        if before:
            assert session.blocked is not None
            blocked[:, :before] = session.blocked[session.beams.parents]
        blocked.reshape(-1)[before :: before + rows + 1] = 0.0  # itself
        session.blocked = blocked
        return blocked

    def _collect(self, blocks: list[_Block], output: Tensor | None, outcomes: list[Outcome]) -> None:
        """Score the rows that offer children and grow the trees."""
        if blocks and isinstance(blocks[0].item, GoAhead):
            self._collect_ahead(blocks, output, outcomes)
            return
        wanting = [b for b in blocks if not isinstance(b.item, Extend) or b.item.limits is not None]
        for block in [b for b in wanting if isinstance(b.item, Extend) and b.item.session.tip is None]:
            # A tree is wanted on a row whose output is gone: the root has to do until rows come.
            outcomes[block.index] = NO_TREE
            wanting.remove(block)
        if not wanting:
            return
        chosen = self._scored_rows(wanting, output)
        trees = [block.item.session.tree for block in wanting]
        best, ids = self._head.candidates(chosen, max([tree.width for tree in trees]))
        log_probs, tokens = best.cpu().numpy(), self._to_target[ids.cpu().numpy()]
        if not np.isfinite(log_probs).all():
            usable = self._refuse_poisoned(wanting, log_probs, outcomes)
            log_probs, tokens = log_probs[usable], tokens[usable]
            wanting = [block for block in wanting if block.item.session.growth is not None]
            if not wanting:
                return
            trees = [block.item.session.tree for block in wanting]
        add_level(trees, log_probs, tokens)
        for block in wanting:
            outcomes[block.index] = self._outcome(block.item.session)

    def _collect_ahead(self, blocks: list[_Block], output: Tensor | None, outcomes: list[Outcome]) -> None:
        """Score all rows and let the trees go on. Of one that meets a NaN nothing more comes."""
        assert output is not None
        growths = [(block, block.item.growth) for block in blocks if isinstance(block.item, GoAhead)]
        best, ids = self._head.candidates(output, max([growth.limits.width for _, growth in growths]))
        log_probs, tokens = best.cpu().numpy(), self._to_target[ids.cpu().numpy()]
        for block, growth in growths:
            rows, session = slice(block.start, block.end), block.item.session
            if np.isfinite(log_probs[rows]).all():
                growth.add(log_probs[rows], tokens[rows])
                outcomes[block.index] = self._outcome_ahead(session, growth)
            else:
                self.rewind(session, session.committed)

    def _refuse_poisoned(
        self, wanting: list[_Block], log_probs: Float32Array, outcomes: list[Outcome]
    ) -> BoolArray:
        """Undo what led to scores [m, k] that are not finite; which of the rows may be used, bool [m]."""
        finite: BoolArray = np.logical_and.reduce(np.isfinite(log_probs), axis=1)
        end = 0
        for block in wanting:
            start, end = end, end + len(block.item.session.beams)
            if not finite[start:end].all():
                finite[start:end] = False
                self._undo(block.item)
                outcomes[block.index] = Refused("the draft head computed NaN from this session's rows")
        return finite

    def _scored_rows(self, wanting: list[_Block], output: Tensor | None) -> Tensor:
        """[m, H]: every beam, and the last committed row of those that begin a tree; begins those trees."""
        parts: list[Tensor] = []
        rows: list[NDArray[np.int64]] = []  # of `output`, gathered at once
        for block in wanting:
            if not isinstance(block.item, Extend):
                rows.append(np.arange(block.start, block.end))
                continue
            session = block.item.session
            assert block.item.limits is not None
            assert session.tip is not None
            session.growth = TreeGrowth(block.item.limits)
            session.outputs = [session.tip]
            if block.end > block.start:
                rows.append(np.arange(block.end - 1, block.end))
                continue
            session.output, session.output_start = session.tip, 0
            parts.extend(_gather(output, rows))
            rows = []
            parts.append(session.tip)
        parts.extend(_gather(output, rows))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _remember(self, block: _Block, output: Tensor) -> None:
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


def _gather(output: Tensor | None, rows: list[NDArray[np.int64]]) -> list[Tensor]:
    if not rows:
        return []
    assert output is not None
    return [output.index_select(0, torch.from_numpy(np.concatenate(rows)).to(output.device))]


def _parents_of_any_level(item: GoAhead) -> Tensor:
    session = item.session
    session.outputs = [torch.cat(session.outputs)]
    parents = torch.from_numpy(item.growth.beams.parents)
    return session.outputs[0].index_select(0, parents.to(session.outputs[0].device))


def _parents(run: list[_Block]) -> list[Tensor]:
    """Outputs of the parents of the beams in `run`, whose sessions were in the same step before."""
    if not run:
        return []
    sessions = [block.item.session for block in run]
    return _gather(sessions[0].output, [s.beams.parents + s.output_start for s in sessions])
