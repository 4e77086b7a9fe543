"""Traces: a text, and the tree that a head drafts at each of its positions.

A trace is all that decoding in virtual time needs: what the target says is the text, what the drafter says
is the tree of the position it was asked at. `simulate` makes one from a model of drafting; recorded ones have
the same form.

The simulated head is calibrated: at each position it holds a distribution over candidates, and the text's
token is drawn from it. How sure it is wanders along the text (an AR(1) process), and it gets less sure the
deeper it drafts, because it feeds on its own guesses. Trees are EAGLE-2's: best first by cumulative
probability.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from starsd_edge.decoding.tree import DraftTree
from starsd_edge.types import Float64Array, TokenArray

__all__ = ["Difficulty", "Trace", "simulate"]

PROMPT_TOKENS = 16  # of a simulated trace
TREE_NODES = 60  # root included, what EAGLE drafts
MAX_DRAFT_DEPTH = 7
AHEAD_NODES = 250  # what is drafted beyond, while a tree is verified
AHEAD_DEPTH = 12
CHILDREN = 8
VOCAB_SIZE = 64  # enough for siblings to differ; small, because logits are made of it
WANDERING = 0.8  # correlation of the head's confidence between neighbouring positions
DEPTH_DISCOUNT = 0.92  # of the confidence, a level
RANK_DECAY = 0.45  # of the probability not given to the first choice, a rank


@dataclass(frozen=True, slots=True)
class Difficulty:
    """mean, spread   of the log-odds of the head's first choice"""

    name: str
    mean: float
    spread: float


EASY = Difficulty("easy", 1.6, 1.3)
HARD = Difficulty("hard", -0.4, 1.2)


@dataclass(frozen=True, slots=True)
class Trace:
    """A text and its trees.

    tokens      int32 [T] prompt and answer
    prompt_len  tokens of the prompt, at least 1
    trees       trees[i] continues tokens[: prompt_len + 1 + i]; nodes by falling probability
    vocab_size  tokens are below
    ahead       ahead[i] is what trees[i] became once drafting for it had gone on; none: it did not
    """

    name: str
    tokens: TokenArray
    prompt_len: int
    trees: list[DraftTree]
    vocab_size: int
    ahead: Sequence[DraftTree] = ()

    @property
    def answer(self) -> TokenArray:
        """int32 [T - prompt_len]: what the target says."""
        return self.tokens[self.prompt_len :]

    def tree_after(self, committed_len: int) -> DraftTree:
        """The tree on top of `committed_len` > prompt_len tokens."""
        return self.trees[min(committed_len - self.prompt_len, len(self.trees)) - 1]

    def ahead_after(self, committed_len: int) -> DraftTree | None:
        """What that tree became once drafting had gone on."""
        return self.ahead[min(committed_len - self.prompt_len, len(self.ahead)) - 1] if self.ahead else None


def simulate(difficulty: Difficulty, num_tokens: int, seed: int, *, ahead: bool = False) -> Trace:
    """A trace of `num_tokens` tokens, prompt included; the same for the same seed. `ahead`: with what is
    drafted beyond each tree, which takes seconds."""
    rng = np.random.Generator(np.random.Philox(seed))
    tokens = rng.integers(0, VOCAB_SIZE, num_tokens).astype(np.int32)
    log_odds = np.empty(num_tokens)
    level = 0.0
    for i in range(num_tokens):
        level = WANDERING * level + math.sqrt(1 - WANDERING**2) * rng.normal()
        log_odds[i] = difficulty.mean + difficulty.spread * level
    # One uniform a position: drafts of it from different places tend to agree.
    luck = rng.random(num_tokens)
    growths = [_Growth(tokens, log_odds, luck, base) for base in range(PROMPT_TOKENS, num_tokens)]
    trees = [growth.grow(TREE_NODES, MAX_DRAFT_DEPTH, rng) for growth in growths]
    # What is drafted beyond draws from a stream of its own: the trees are the same with and without.
    beyond = np.random.Generator(np.random.Philox(key=[seed, 1]))
    more = [growth.grow(AHEAD_NODES, AHEAD_DEPTH, beyond) for growth in growths] if ahead else []
    return Trace(f"{difficulty.name}-{seed}", tokens, PROMPT_TOKENS, trees, VOCAB_SIZE, more)


class _Growth:
    """The tree at position `base`, always taking the candidate of the highest cumulative probability."""

    def __init__(self, tokens: TokenArray, log_odds: Float64Array, luck: Float64Array, base: int) -> None:
        self._text, self._log_odds, self._luck, self._base = tokens, log_odds, luck, base
        # (-probability, order, parent, depth, token, whether it is on the text's path)
        self._queue: list[tuple[float, int, int, int, int, bool]] = [
            (-1.0, 0, -1, 0, int(tokens[base]), True)
        ]
        self._too_deep: list[tuple[float, int, int, bool]] = []  # nodes that were offered no children
        self._order = 0
        self._tokens: list[int] = []
        self._parents: list[int] = []

    def grow(self, num_nodes: int, max_depth: int, rng: np.random.Generator) -> DraftTree:
        """Go on until there are so many nodes."""
        left_out, self._too_deep = self._too_deep, []
        for negative, node, depth, on_path in left_out:
            self._offer(negative, node, depth, on_path, max_depth, rng)
        while self._queue and len(self._tokens) < num_nodes:
            negative, _, parent, depth, token, on_path = heapq.heappop(self._queue)
            self._tokens.append(token)
            self._parents.append(parent)
            self._offer(negative, len(self._tokens) - 1, depth, on_path, max_depth, rng)
        return DraftTree(np.array(self._tokens, np.int32), np.array(self._parents, np.int32), self._base + 1)

    def _offer(
        self, negative: float, node: int, depth: int, on_path: bool, max_depth: int, rng: np.random.Generator
    ) -> None:
        """The children of a node become candidates."""
        position = self._base + depth + 1
        if position >= len(self._text):
            return
        if depth == max_depth:
            self._too_deep.append((negative, node, depth, on_path))
            return
        # Off the path the head is about as sure of itself as anywhere.
        at = position if on_path else int(rng.integers(len(self._text)))
        ranks = _rank_probabilities(float(self._log_odds[at]), depth)
        right = int(np.searchsorted(np.cumsum(ranks), self._luck[position])) if on_path else CHILDREN
        wrong = rng.permutation(VOCAB_SIZE)
        wrong = wrong[wrong != self._text[position]][:CHILDREN]
        for rank in range(CHILDREN):
            self._order += 1
            good = rank == right
            child = int(self._text[position]) if good else int(wrong[rank])
            heapq.heappush(self._queue, (negative * ranks[rank], self._order, node, depth + 1, child, good))


def _rank_probabilities(log_odds: float, depth: int) -> list[float]:
    first = DEPTH_DISCOUNT**depth / (1 + math.exp(-log_odds))
    return [first, *((1 - first) * (1 - RANK_DECAY) * RANK_DECAY**rank for rank in range(CHILDREN - 1))]
