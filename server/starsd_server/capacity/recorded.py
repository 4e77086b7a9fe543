"""What drafting asks and brings, read off a recording whose conversations are played through."""

from __future__ import annotations

import numpy as np

from starsd_edge.decoding.tree import NO_PARENT, DraftTree
from starsd_edge.errors import BundleError
from starsd_edge.types import TokenArray
from starsd_server.capacity.model import DraftWork
from starsd_server.emulate.trace import Conversation, RecordedTree, RecordedTrees, Trace, row_key

__all__ = ["work_of"]

HEADER_BYTES = 100  # of an UPDATE: header, hints, checksums
FEATURE_BYTES = 2  # fp16


def work_of(trace: Trace, trees: RecordedTrees) -> DraftWork:
    """The average round of a device that replays the trace. Raises BundleError for trees of another trace."""
    rounds = [round_ for conversation in trace.conversations for round_ in _play(conversation, trees)]
    if not rounds:
        raise BundleError("the recorded trees do not belong to the recorded answers")
    tokens, nodes, steps, rows, kv_rows, new_rows = np.array(rounds, np.float64).mean(axis=0).tolist()
    width = trace.conversations[0].features.shape[1]
    row_bytes = FEATURE_BYTES * width + trace.conversations[0].tokens.itemsize
    return DraftWork(tokens, nodes, steps, rows, kv_rows, HEADER_BYTES + new_rows * row_bytes)


def _play(conversation: Conversation, trees: RecordedTrees) -> list[list[float]]:
    rounds: list[list[float]] = []
    before, end = 0, conversation.prompt_len
    while end < len(conversation.tokens) - 1:
        found = trees.find(end, row_key(conversation.tokens[1 : end + 1]))
        if found is None:
            return []
        accepted = _accepted(found, conversation.tokens[end:])
        rows = end - before + sum(found.beams)
        rounds.append(
            [accepted + 1, len(found.tree.tokens) + 1, 1 + len(found.beams), rows, end, end - before]
        )
        before, end = end, end + accepted + 1
    return rounds


def _accepted(found: RecordedTree, text: TokenArray) -> int:
    """Draft tokens that the text follows; text[0] is the root."""
    tree = DraftTree(
        np.concatenate([text[:1], found.tree.tokens]),
        np.concatenate([np.array([NO_PARENT], np.int32), found.tree.parents]),
        1,
    )
    return len(tree.walk(text[1:].tolist())) - 1
