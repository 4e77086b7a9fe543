"""A target so small that thousands of texts take a minute: a token depends on position and the one before.

A tree that is verified one position off, or on another root, gives another text at once.
"""

from __future__ import annotations

import numpy as np

from starsd_edge.decoding.roles import Invariance, TargetOutput, TargetSpec
from starsd_edge.decoding.sampling import SamplingParams, pick
from starsd_edge.decoding.tree import DraftTree
from starsd_edge.types import TokenArray
from tests.e2e.simulator.world import World

__all__ = ["MAX_LEN", "VOCAB_SIZE", "TableTarget", "plain_text"]

VOCAB_SIZE, MAX_LEN, FEATURE_SIZE = 24, 160, 4
LOGITS = np.random.default_rng(5).standard_normal((MAX_LEN + 1, VOCAB_SIZE, VOCAB_SIZE)).astype(np.float32)


class TableTarget:
    """A row's feature says which token and position it is of, so that a draft KV can be checked by row."""

    def __init__(self, world: World, plain_s: float) -> None:
        self.spec = TargetSpec(VOCAB_SIZE, FEATURE_SIZE, MAX_LEN, Invariance(bitwise=True))
        self.kv_len = 0
        self._world = world
        self._plain_s = plain_s
        self._last: DraftTree | None = None

    def prefill(self, tokens: TokenArray) -> TargetOutput:
        positions = np.arange(self.kv_len, self.kv_len + len(tokens))
        self.kv_len += len(tokens)
        self._pass(self._plain_s)
        logits = LOGITS[positions[-1:], tokens[-1:]]
        return TargetOutput(logits, features(tokens, positions))

    def forward(self, tree: DraftTree) -> TargetOutput:
        assert tree.base_len - 1 == self.kv_len
        self._last = tree
        self._pass(self._plain_s * (1 + 0.02 * (len(tree) - 1)))
        return TargetOutput(LOGITS[tree.positions, tree.tokens], features(tree.tokens, tree.positions))

    def keep(self, path: list[int]) -> None:
        assert self._last is not None
        assert path == self._last.path(path[-1])
        self.kv_len += len(path)
        self._last = None

    def truncate(self, kv_len: int) -> None:
        assert kv_len <= self.kv_len
        self.kv_len = kv_len

    def max_tree_size(self) -> int:
        return min(32, MAX_LEN - self.kv_len)

    def _pass(self, seconds: float) -> None:
        self._world.run_until(self._world.now_s + seconds)


def features(tokens: TokenArray, positions: np.ndarray) -> np.ndarray:
    rows = np.zeros((len(tokens), FEATURE_SIZE), np.float32)
    rows[:, 0], rows[:, 1] = tokens, positions
    return rows


def plain_text(context: list[int], params: SamplingParams, count: int) -> list[int]:
    """The next `count` tokens, decoded in the most direct way."""
    tokens = list(context)
    for _ in range(count):
        logits = LOGITS[len(tokens) - 1, tokens[-1]]
        tokens.append(pick(logits, params, len(tokens), np.array(tokens, np.int32)).token)
    return tokens[len(context) :]
