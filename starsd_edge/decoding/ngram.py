"""Prompt lookup: the context itself proposes what followed the last time the same few tokens appeared.

No model, no link: it drafts where text repeats (summaries, edits of code, quoted names) and when the draft
service is away. After "Prompt Lookup Decoding" (Saxena 2023), with several continuations merged into a tree.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from starsd_edge.decoding.prefix import Prefix
from starsd_edge.decoding.roles import DrafterState, Update
from starsd_edge.decoding.tree import DraftTree
from starsd_edge.types import TokenArray

__all__ = ["NgramDrafter", "lookup", "merge"]

LONGEST_MATCH = 4  # tokens; a longer match hardly predicts better, and is found by its last four anyway
SHORTEST_MATCH = 2  # one token alone matches everywhere and predicts nothing
NUM_CONTINUATIONS = 3  # the most recent ones
CONTINUATION_TOKENS = 8


def lookup(
    tokens: TokenArray,
    longest: int = LONGEST_MATCH,
    shortest: int = SHORTEST_MATCH,
    num_continuations: int = NUM_CONTINUATIONS,
    num_tokens: int = CONTINUATION_TOKENS,
) -> list[list[int]]:
    """What followed earlier appearances of the last tokens: the longest match first, then the most recent.

    tokens   int32 [committed_len]
    """
    found: list[list[int]] = []
    starts: set[int] = set()
    for length in range(min(longest, len(tokens) - 1), shortest - 1, -1):
        for start in _appearances(tokens, length)[::-1]:
            follow = int(start) + length
            if follow not in starts:
                starts.add(follow)
                found.append(tokens[follow : follow + num_tokens].tolist())
            if len(found) == num_continuations:
                return found
    return found


def _appearances(tokens: TokenArray, length: int) -> TokenArray:
    """Where the last `length` tokens appear earlier, rising; the appearance at the end is left out."""
    end = len(tokens) - length
    matches = np.ones(end, np.bool_)
    for offset in range(length):
        matches &= tokens[offset : offset + end] == tokens[end + offset]
    return np.flatnonzero(matches).astype(np.int32)


def tree_of(continuations: Sequence[Sequence[int]], root: int, base_len: int) -> DraftTree:
    """A tree of all continuations, shared beginnings once; nodes in the order of the continuations' depth."""
    tokens, parents = [root], [-1]
    nodes: dict[tuple[int, int], int] = {}
    ends = [0] * len(continuations)
    for depth in range(max(map(len, continuations), default=0)):
        for index, continuation in enumerate(continuations):
            if depth < len(continuation):
                edge = (ends[index], continuation[depth])
                if edge not in nodes:
                    nodes[edge] = len(tokens)
                    tokens.append(edge[1])
                    parents.append(edge[0])
                ends[index] = nodes[edge]
    return DraftTree(np.array(tokens, np.int32), np.array(parents, np.int32), base_len)


def merge(first: DraftTree, second: DraftTree) -> DraftTree:
    """Both trees in one: the nodes of `first` in their places, then those of `second` that it lacks.

    Both continue the same prefix. Raises ValueError otherwise.
    """
    if first.base_len != second.base_len or first.tokens[0] != second.tokens[0]:
        raise ValueError(f"trees on {first.base_len} and {second.base_len} committed tokens cannot be merged")
    tokens, parents = first.tokens.tolist(), first.parents.tolist()
    nodes = {(parent, token): node for node, (parent, token) in enumerate(zip(parents, tokens, strict=True))}
    place = [0] * len(second)
    for node in range(1, len(second)):
        edge = (place[second.parents[node]], int(second.tokens[node]))
        if edge not in nodes:
            nodes[edge] = len(tokens)
            tokens.append(edge[1])
            parents.append(edge[0])
        place[node] = nodes[edge]
    return DraftTree(np.array(tokens, np.int32), np.array(parents, np.int32), first.base_len)


class NgramDrafter:
    """A drafter that answers at once from the context it was told."""

    def __init__(self) -> None:
        self._prefix = Prefix()
        self._tree: DraftTree | None = None

    def start(self, first_token: int) -> None:
        self._prefix = Prefix()
        self._prefix.append([first_token])
        self._tree = None

    def update(self, update: Update) -> None:
        self._prefix.append(update.tokens)
        tokens = self._prefix.tokens
        continuations = lookup(tokens)
        tree = tree_of(continuations, int(tokens[-1]), len(tokens))
        self._tree = tree if len(tree) > 1 else None

    def poll(self, timeout_s: float) -> DraftTree | None:
        """Never waits: there is a tree now or there is none."""
        tree, self._tree = self._tree, None
        return tree

    def rollback(self, committed_len: int) -> None:
        self._prefix.truncate(committed_len)
        self._tree = None

    def state(self) -> DrafterState:
        return DrafterState(ready=True, expected_wait_s=0.0, origin="ngram")

    def close(self) -> None:
        self._tree = None
