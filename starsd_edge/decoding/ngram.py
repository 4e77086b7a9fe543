"""Prompt lookup: the context itself proposes what followed the last time the same few tokens appeared.

No model, no link: it drafts where text repeats (summaries, edits of code, quoted names) and when the draft
service is away. After "Prompt Lookup Decoding" (Saxena 2023), with several continuations merged into a tree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from starsd_edge.decoding.draft import Draft
from starsd_edge.decoding.tree import DraftTree
from starsd_edge.types import Float64Array, IndexArray, TokenArray

__all__ = ["NGRAM", "Continuation", "Merged", "draft_from_context", "lookup", "merge", "tree_of"]

NGRAM = "ngram"  # the origin of these drafts

LONGEST_MATCH = 4  # tokens; a longer match hardly predicts better, and is found by its last four anyway
SHORTEST_MATCH = 2  # one token alone matches everywhere and predicts nothing
NUM_CONTINUATIONS = 3  # the most recent ones
CONTINUATION_TOKENS = 8
# How sure a node is, given its parent, by the length of the match: low, because in most texts what repeats
# is chance. `acceptance.AcceptanceModel` soon knows better.
CONFIDENCE = {2: 0.15, 3: 0.3, 4: 0.45}


@dataclass(frozen=True, slots=True)
class Continuation:
    """What followed an earlier appearance of the last `match` tokens."""

    match: int
    tokens: list[int]


def draft_from_context(tokens: TokenArray) -> Draft | None:
    """A draft on top of the committed tokens, int32 [committed_len]; None when nothing in them repeats."""
    continuations = lookup(tokens)
    if not continuations:
        return None
    tree = tree_of([each.tokens for each in continuations], int(tokens[-1]), len(tokens))
    confidences = np.ones(len(tree))
    # The best continuation comes first, and keeps the nodes that it shares.
    for continuation in continuations[::-1]:
        path = tree.walk(continuation.tokens)
        confidences[path[1:]] = CONFIDENCE[continuation.match]
    return Draft(tree, 0, 0.0, NGRAM, confidences=confidences)


def lookup(
    tokens: TokenArray,
    longest: int = LONGEST_MATCH,
    shortest: int = SHORTEST_MATCH,
    num_continuations: int = NUM_CONTINUATIONS,
    num_tokens: int = CONTINUATION_TOKENS,
) -> list[Continuation]:
    """What followed earlier appearances of the last tokens: the longest match first, then the most recent.

    tokens   int32 [committed_len]
    """
    found: list[Continuation] = []
    starts: set[int] = set()
    for length in range(min(longest, len(tokens) - 1), shortest - 1, -1):
        for start in _appearances(tokens, length)[::-1]:
            follow = int(start) + length
            if follow not in starts:
                starts.add(follow)
                found.append(Continuation(length, tokens[follow : follow + num_tokens].tolist()))
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


@dataclass(frozen=True, slots=True)
class Merged:
    """Two trees in one.

    places  int64 [nodes of the second]: where each of its nodes is
    """

    tree: DraftTree
    places: IndexArray

    def combine(self, first: Float64Array, second: Float64Array) -> Float64Array:
        """Conditional probabilities of the merged nodes: of those that both drafted, the greater."""
        combined = np.zeros(len(self.tree))
        combined[: len(first)] = first
        np.maximum.at(combined, self.places, second)
        return combined


def merge(first: DraftTree, second: DraftTree) -> Merged:
    """Both trees in one: the nodes of `first` in their places, then those of `second` that it lacks.

    Both continue the same prefix. Raises ValueError otherwise.
    """
    if first.base_len != second.base_len or first.tokens[0] != second.tokens[0]:
        raise ValueError(f"trees on {first.base_len} and {second.base_len} committed tokens cannot be merged")
    tokens, parents = first.tokens.tolist(), first.parents.tolist()
    nodes = {(parent, token): node for node, (parent, token) in enumerate(zip(parents, tokens, strict=True))}
    places = [0] * len(second)
    for node in range(1, len(second)):
        edge = (places[second.parents[node]], int(second.tokens[node]))
        if edge not in nodes:
            nodes[edge] = len(tokens)
            tokens.append(edge[1])
            parents.append(edge[0])
        places[node] = nodes[edge]
    tree = DraftTree(np.array(tokens, np.int32), np.array(parents, np.int32), first.base_len)
    return Merged(tree, np.array(places, np.int64))
