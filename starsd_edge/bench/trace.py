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
from dataclasses import dataclass

import numpy as np

from starsd_edge.decoding.tree import DraftTree
from starsd_edge.types import TokenArray

__all__ = ["Difficulty", "Trace", "simulate"]

PROMPT_TOKENS = 16  # of a simulated trace
TREE_NODES = 60  # root included, what EAGLE drafts
MAX_DRAFT_DEPTH = 7
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
    """

    name: str
    tokens: TokenArray
    prompt_len: int
    trees: list[DraftTree]
    vocab_size: int

    @property
    def answer(self) -> TokenArray:
        """int32 [T - prompt_len]: what the target says."""
        return self.tokens[self.prompt_len :]

    def tree_after(self, committed_len: int) -> DraftTree:
        """The tree on top of `committed_len` > prompt_len tokens."""
        return self.trees[min(committed_len - self.prompt_len, len(self.trees)) - 1]


def simulate(difficulty: Difficulty, num_tokens: int, seed: int) -> Trace:
    """A trace of `num_tokens` tokens, prompt included; the same for the same seed."""
    rng = np.random.Generator(np.random.Philox(seed))
    tokens = rng.integers(0, VOCAB_SIZE, num_tokens).astype(np.int32)
    log_odds = np.empty(num_tokens)
    level = 0.0
    for i in range(num_tokens):
        level = WANDERING * level + math.sqrt(1 - WANDERING**2) * rng.normal()
        log_odds[i] = difficulty.mean + difficulty.spread * level
    # One uniform a position: drafts of it from different places tend to agree.
    luck = rng.random(num_tokens)
    trees = [_draft(tokens, log_odds, luck, base, rng) for base in range(PROMPT_TOKENS, num_tokens)]
    return Trace(f"{difficulty.name}-{seed}", tokens, PROMPT_TOKENS, trees, VOCAB_SIZE)


def _draft(
    tokens: TokenArray,
    log_odds: np.ndarray[tuple[int], np.dtype[np.float64]],
    luck: np.ndarray[tuple[int], np.dtype[np.float64]],
    base: int,
    rng: np.random.Generator,
) -> DraftTree:
    """Grow the tree at position `base`, always taking the candidate of the highest cumulative probability."""
    # (-probability, order, parent, depth, token, whether it is on the text's path)
    queue: list[tuple[float, int, int, int, int, bool]] = [(-1.0, 0, -1, 0, int(tokens[base]), True)]
    order = 0
    out_tokens: list[int] = []
    parents: list[int] = []
    while queue and len(out_tokens) < TREE_NODES:
        negative, _, parent, depth, token, on_path = heapq.heappop(queue)
        node = len(out_tokens)
        out_tokens.append(token)
        parents.append(parent)
        position = base + depth + 1
        if depth == MAX_DRAFT_DEPTH or position >= len(tokens):
            continue
        # Off the path the head is about as sure of itself as anywhere.
        at = position if on_path else int(rng.integers(len(tokens)))
        ranks = _rank_probabilities(float(log_odds[at]), depth)
        right = int(np.searchsorted(np.cumsum(ranks), luck[position])) if on_path else CHILDREN
        wrong = rng.permutation(VOCAB_SIZE)
        wrong = wrong[wrong != tokens[position]][:CHILDREN]
        for rank in range(CHILDREN):
            order += 1
            good = rank == right
            child = int(tokens[position]) if good else int(wrong[rank])
            heapq.heappush(queue, (negative * ranks[rank], order, node, depth + 1, child, good))
    return DraftTree(np.array(out_tokens, np.int32), np.array(parents, np.int32), base + 1)


def _rank_probabilities(log_odds: float, depth: int) -> list[float]:
    first = DEPTH_DISCOUNT**depth / (1 + math.exp(-log_odds))
    return [first, *((1 - first) * (1 - RANK_DECAY) * RANK_DECAY**rank for rank in range(CHILDREN - 1))]
