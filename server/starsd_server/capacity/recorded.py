"""What drafting asks and brings, read off a recording whose conversations are played through."""

from __future__ import annotations

import itertools
import statistics
from dataclasses import dataclass

import numpy as np

from starsd_edge.decoding.tree import NO_PARENT, DraftTree
from starsd_edge.errors import BundleError
from starsd_edge.types import TokenArray
from starsd_server.capacity.model import DraftWork
from starsd_server.emulate.trace import Conversation, RecordedTree, RecordedTrees, Trace, row_key

__all__ = ["Played", "play", "work_of"]

HEADER_BYTES = 100  # of an UPDATE: header, hints, checksums
FEATURE_BYTES = 2  # fp16


@dataclass(frozen=True, slots=True)
class Played:
    """One round of a recording.

    tokens    it brought, bonus included
    nodes     of its tree, root included
    beams     rows of the head steps after the extending one
    new_rows  that its update carried: what the round before brought, or the prompt
    """

    tokens: int
    nodes: int
    beams: tuple[int, ...]
    new_rows: int


def play(trace: Trace, trees: RecordedTrees) -> list[list[Played]]:
    """Every conversation, round by round. Raises BundleError for trees of another trace."""
    played = [_play(conversation, trees) for conversation in trace.conversations]
    if not all(played):
        raise BundleError("the recorded trees do not belong to the recorded answers")
    return played


def work_of(trace: Trace, trees: RecordedTrees) -> DraftWork:
    """The average round of a device that replays the trace. Raises BundleError for trees of another trace."""
    conversations = play(trace, trees)
    rounds = [round_ for conversation in conversations for round_ in conversation]
    contexts = [
        context
        for conversation in conversations
        for context in itertools.accumulate(round_.new_rows for round_ in conversation)
    ]
    width = trace.conversations[0].features.shape[1]
    row_bytes = FEATURE_BYTES * width + trace.conversations[0].tokens.itemsize
    new_rows = statistics.fmean(round_.new_rows for round_ in rounds)
    return DraftWork(
        tokens=statistics.fmean(round_.tokens for round_ in rounds),
        nodes=statistics.fmean(round_.nodes for round_ in rounds),
        steps=statistics.fmean(1 + len(round_.beams) for round_ in rounds),
        rows=statistics.fmean(round_.new_rows + sum(round_.beams) for round_ in rounds),
        kv_rows=statistics.fmean(contexts),
        bytes_up=HEADER_BYTES + new_rows * row_bytes,
    )


def _play(conversation: Conversation, trees: RecordedTrees) -> list[Played]:
    rounds: list[Played] = []
    before, end = 0, conversation.prompt_len
    while end < len(conversation.tokens) - 1:
        found = trees.find(end, row_key(conversation.tokens[1 : end + 1]))
        if found is None:
            return []
        accepted = _accepted(found, conversation.tokens[end:])
        rounds.append(Played(accepted + 1, len(found.tree.tokens) + 1, found.beams, end - before))
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
