"""The logits behind the newest tokens, for log-probabilities."""

from __future__ import annotations

import numpy as np

from starsd_edge.chat.answer import TokenLogprob
from starsd_edge.decoding.roles import Target, TargetOutput, TargetSpec
from starsd_edge.decoding.tree import DraftTree
from starsd_edge.types import Float32Array, Float64Array, TokenArray

__all__ = ["Recorder", "log_softmax"]


class Recorder:
    """A target that remembers the logits of what was last kept. Passes everything on, copies nothing."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._logits: Float32Array | None = None  # [n, V] of the last forward or prefill
        self._rows: list[int] = []  # of those, the ones that decided committed tokens

    def logprobs(self, tokens: list[int], num_top: int) -> tuple[TokenLogprob, ...]:
        """Of the tokens of the last round, under the target itself: no temperature, no penalties."""
        assert self._logits is not None, "tokens come from a forward"
        found = []
        for token, row in zip(tokens, self._rows, strict=False):
            law = log_softmax(self._logits[row])
            best = np.argsort(-law, kind="stable")[:num_top]
            top = tuple((int(other), float(law[other])) for other in best)
            found.append(TokenLogprob(token, float(law[token]), top))
        return tuple(found)

    @property
    def spec(self) -> TargetSpec:
        return self._target.spec

    @property
    def kv_len(self) -> int:
        return self._target.kv_len

    def prefill(self, tokens: TokenArray) -> TargetOutput:
        output = self._target.prefill(tokens)
        self._logits, self._rows = output.logits, [len(output.logits) - 1]
        return output

    def forward(self, tree: DraftTree) -> TargetOutput:
        output = self._target.forward(tree)
        self._logits = output.logits
        return output

    def keep(self, path: list[int]) -> None:
        self._rows = path
        self._target.keep(path)

    def truncate(self, kv_len: int) -> None:
        self._target.truncate(kv_len)

    def max_tree_size(self) -> int:
        return self._target.max_tree_size()


def log_softmax(logits: Float32Array) -> Float64Array:
    """float64 [V]."""
    scores = logits.astype(np.float64)
    scores -= scores.max()
    result: Float64Array = scores - np.log(np.exp(scores).sum())
    return result
