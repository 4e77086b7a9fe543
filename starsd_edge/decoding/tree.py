"""The draft tree: tokens and parents, and everything that follows from them.

Node 0 is the root, the newest committed token. Parents come before their children, and a tree from the draft
service lists its nodes by falling cumulative probability, so the first n nodes of a tree are a tree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from starsd_edge.types import BoolArray, IndexArray, TokenArray

__all__ = ["NO_PARENT", "DraftTree"]

NO_PARENT = -1


@dataclass(frozen=True)
class DraftTree:
    """Candidate continuations of a committed prefix.

    tokens   int32 [N], tokens[0] is the root
    parents  int32 [N], parents[0] == -1, and 0 <= parents[i] < i for every other node
    base_len committed tokens the tree continues, root included

    Siblings carry different tokens. Raises ValueError for anything else.
    """

    tokens: TokenArray
    parents: TokenArray
    base_len: int

    def __post_init__(self) -> None:
        tokens, parents = self.tokens, self.parents
        if tokens.ndim != 1 or tokens.shape != parents.shape or len(tokens) == 0:
            raise ValueError(
                f"tokens {tokens.shape} and parents {parents.shape} must be one equal [N], N >= 1"
            )
        if tokens.dtype != np.int32 or parents.dtype != np.int32:
            raise ValueError(f"tokens and parents must be int32, not {tokens.dtype} and {parents.dtype}")
        if self.base_len < 1:
            raise ValueError(f"base_len counts the root and so is at least 1, not {self.base_len}")
        # Unsigned, what is below zero lies beyond every node.
        later = parents[1:].view(np.uint32) > np.arange(len(parents) - 1, dtype=np.uint32)
        if parents[0] != NO_PARENT or np.logical_or.reduce(later):
            raise ValueError("parents must be -1 for the root and an earlier node for every other node")
        check_siblings(np.array((tokens, parents)))

    @classmethod
    def below(
        cls, root: int, tokens: NDArray[np.integer[Any]], parents: NDArray[np.integer[Any]], base_len: int
    ) -> DraftTree:
        """`root`, and below it what a draft message has: [N - 1] of each, tokens that fit int32, and parents
        counted with the root as node 0, known to lie before their nodes. Raises ValueError for siblings that
        are equal."""
        whole = np.empty((2, len(tokens) + 1), np.int32)
        whole[0, 0], whole[1, 0] = root, NO_PARENT
        whole[0, 1:], whole[1, 1:] = tokens, parents
        check_siblings(whole)
        return _trusted(whole[0], whole[1], base_len)

    @classmethod
    def root_only(cls, token: int, base_len: int) -> DraftTree:
        """The tree of a plain step."""
        return cls(np.array([token], np.int32), np.array([NO_PARENT], np.int32), base_len)

    @classmethod
    def chain(cls, tokens: Sequence[int], base_len: int) -> DraftTree:
        """A single path; tokens[0] is the root."""
        return cls(np.array(tokens, np.int32), np.arange(-1, len(tokens) - 1, dtype=np.int32), base_len)

    def __len__(self) -> int:
        return len(self.tokens)

    @cached_property
    def depths(self) -> TokenArray:
        """int32 [N]; 0 for the root."""
        depths = [0] * len(self)
        for node, parent in enumerate(self.parents[1:].tolist(), 1):
            depths[node] = depths[parent] + 1
        return np.array(depths, np.int32)

    @cached_property
    def positions(self) -> TokenArray:
        """int32 [N] absolute positions in the target."""
        return np.asarray(self.base_len - 1 + self.depths, np.int32)

    @cached_property
    def mask(self) -> BoolArray:
        """bool [N, N]; row i sees itself and its ancestors."""
        mask = np.eye(len(self), dtype=np.bool_)
        for node in range(1, len(self)):
            mask[node] |= mask[self.parents[node]]
        return mask

    def child(self, node: int, token: int) -> int | None:
        """The child of `node` that carries `token`, if there is one."""
        hits = np.flatnonzero((self.parents == node) & (self.tokens == token))
        return int(hits[0]) if len(hits) else None

    def path(self, node: int) -> list[int]:
        """Node indices from the root to `node`, both included."""
        path = [node]
        while path[-1] != 0:
            path.append(int(self.parents[path[-1]]))
        return path[::-1]

    def first(self, size: int) -> DraftTree:
        """The tree of the first `size` nodes (all of them if there are fewer)."""
        if size >= len(self):
            return self
        return _trusted(self.tokens[:size], self.parents[:size], self.base_len)

    def descend(self, committed: Sequence[int]) -> DraftTree | None:
        """What is left of the tree after `committed` tokens were committed on top of `base_len`.

        Follows the tokens from the root; the subtree below the last one, re-rooted, is still a valid
        draft. None when the committed tokens leave the tree.
        """
        nodes = self.nodes_below(committed)
        return self.subset(nodes, len(committed)) if len(nodes) else None

    def walk(self, tokens: Sequence[int]) -> list[int]:
        """The path that `tokens` lead along from the root, as far as they stay in the tree."""
        path = [0]
        for token in tokens:
            found = self.child(path[-1], token)
            if found is None:
                break
            path.append(found)
        return path

    def nodes_below(self, committed: Sequence[int]) -> IndexArray:
        """int64 [m] rising: the node that `committed` leads to from the root, and all below it; empty when
        the tokens leave the tree."""
        path = self.walk(committed)
        if len(path) <= len(committed):
            return np.empty(0, np.int64)
        node = path[-1]
        below = [False] * len(self)
        below[node] = True
        for later, parent in enumerate(self.parents[node + 1 :].tolist(), node + 1):
            below[later] = below[parent]
        return np.flatnonzero(below)

    def subset(self, nodes: IndexArray, levels: int = 0) -> DraftTree:
        """The tree of `nodes`, in their order, whose root is the first and lies `levels` below this root.

        nodes  int64 [m], every other node's parent before it: not checked
        """
        index = np.full(len(self), NO_PARENT, np.int32)
        index[nodes] = np.arange(len(nodes), dtype=np.int32)
        parents = index[self.parents[nodes]]
        parents[0] = NO_PARENT
        return _trusted(self.tokens[nodes], parents, self.base_len + levels)


def check_siblings(nodes: TokenArray) -> None:
    """Raises ValueError when two children of a node carry the same token. `nodes` int32 [2, N]: tokens, and
    below them parents."""
    edges = nodes.T.copy().view(np.int64)  # [N, 1]: token and parent side by side, read as one number
    if len(set(edges.ravel().tolist())) < len(edges):  # at these sizes faster than sorting
        raise ValueError("two siblings carry the same token")


def _trusted(tokens: TokenArray, parents: TokenArray, base_len: int) -> DraftTree:
    """A tree made of a valid one, several times a round: it needs no second look."""
    tree = object.__new__(DraftTree)
    tree.__dict__.update(tokens=tokens, parents=parents, base_len=base_len)
    return tree
