"""What a real head drafts ahead, recorded at every position of a target's answers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from msgspec.structs import replace

from starsd_edge.bench.recorder import CHAT, TREE_NODES, dense, load, save
from starsd_edge.bench.trace import Trace as Played
from starsd_edge.cli.runtime import ModelChoice
from starsd_edge.decoding.ahead import AHEAD_NODES
from starsd_edge.decoding.tree import NO_PARENT, DraftTree
from starsd_server.emulate.record import MAX_LEN, open_trace
from starsd_server.emulate.trace import Trace
from starsd_server.engine import Engine
from starsd_server.heads.checkpoint import load_head, read_manifest
from starsd_server.heads.grow import GrowthLimits
from starsd_server.rows import Precision, RowHead, int8_available
from starsd_server.sessions import AHEAD_ROWS, TreeShape
from starsd_server.step import Advanced, Extend, GoAhead, Grow, SessionRows, TreeReady, WorkItem

__all__ = ["record_ahead", "recorded_ahead"]

GROWTH = 1  # counts up when trees come to grow in other steps: older recordings are made again
ANSWER_TOKENS = 128
ASKED_NODES = 10  # of the tree that is answered, which goes on: about what int4 devices ask for


def recorded_ahead(head_folder: Path, target: Path | None, report: Callable[[str], None]) -> list[Played]:
    """Answers of the embedded model to the demo's prompts, with its head's trees of 60 nodes and what became
    of smaller ones that went on. Made once and kept in the cache folder."""
    trace, folder = open_trace(ModelChoice(), head_folder, ANSWER_TOKENS, report)
    file = folder / f"ahead-{read_manifest(head_folder).name}-{AHEAD_ROWS}-{GROWTH}.npz"
    if not file.is_file():
        report("recording what the head drafts ahead, once; this takes minutes")
        torch.set_num_threads(1)
        precision = Precision.INT8 if int8_available() else Precision.FLOAT32
        head = RowHead(load_head(head_folder, target, dtype=None), precision)
        save(record_ahead(Engine(head, len(trace.conversations), MAX_LEN), trace), file)
    return load(file)


def record_ahead(engine: Engine, trace: Trace) -> list[Played]:
    """Conversations advance side by side, as sessions of one batch; the engine needs a slot for each."""
    shape = TreeShape()
    whole = shape.limits(TREE_NODES, None)
    going_on = replace(
        shape.limits(ASKED_NODES, None), ahead=replace(shape.ahead(AHEAD_ROWS), max_nodes=AHEAD_NODES)
    )
    sessions = [engine.reset(slot) for slot in range(len(trace.conversations))]
    trees: list[list[DraftTree]] = [[] for _ in sessions]
    ahead: list[list[DraftTree]] = [[] for _ in sessions]
    ends = [conversation.prompt_len for conversation in trace.conversations]
    while True:
        slots = [slot for slot, c in enumerate(trace.conversations) if ends[slot] < len(c.tokens)]
        if not slots:
            break
        items = [_rows(sessions[slot], trace, ends[slot], whole) for slot in slots]
        for slot, tree in _finished(engine, items).items():
            trees[slot].append(_whole(tree, trace, slot, ends[slot]))
        items = [_rows(sessions[slot], trace, ends[slot], going_on) for slot in slots]
        answered = _finished(engine, items)
        further = [GoAhead(sessions[slot]) for slot in slots if answered[slot].ahead]
        answered |= _finished(engine, further)
        for slot in slots:
            ahead[slot].append(_whole(answered[slot], trace, slot, ends[slot]))
            ends[slot] += 1
    return [
        dense(CHAT, c.tokens, c.prompt_len, trees[slot], ahead[slot])
        for slot, c in enumerate(trace.conversations)
    ]


def _rows(session: SessionRows, trace: Trace, end: int, limits: GrowthLimits) -> Extend:
    conversation, start = trace.conversations[session.slot], session.committed
    tokens = conversation.tokens[start + 1 : end + 1]
    return Extend(session, tokens, conversation.features[start:end], start, limits)


def _finished(engine: Engine, items: list[Extend] | list[GoAhead]) -> dict[int, TreeReady]:
    """Steps until all trees are done, by slot."""
    waiting: list[WorkItem] = list(items)
    done: dict[int, TreeReady] = {}
    while waiting:
        following: list[WorkItem] = []
        for item, outcome in zip(waiting, engine.step(waiting), strict=True):
            if isinstance(outcome, Advanced):
                following.append(item if isinstance(item, GoAhead) else Grow(item.session))
            else:
                assert isinstance(outcome, TreeReady)
                done[item.session.slot] = outcome
        waiting = following
    return done


def _whole(tree: TreeReady, trace: Trace, slot: int, end: int) -> DraftTree:
    """With its root."""
    root = trace.conversations[slot].tokens[end : end + 1]
    parents = np.concatenate([np.array([NO_PARENT], np.int32), tree.parents])
    return DraftTree(np.concatenate([root, tree.tokens]), parents, end + 1)
