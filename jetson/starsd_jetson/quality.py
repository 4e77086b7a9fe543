"""How much a bundle lost against its source, on the built-in text."""

from __future__ import annotations

import numpy as np

from starsd_edge.bundle import Quality
from starsd_edge.decoding.roles import Target
from starsd_edge.decoding.tree import DraftTree
from starsd_edge.types import Float32Array, TokenArray

__all__ = ["judge"]


JUDGED_ROWS = 32  # a pass: what it computes on stays small beside the weights of a large model


def judge(target: Target, tokens: TokenArray, reference: Float32Array) -> Quality:
    """Compare with the source's logits of `tokens`, float32 [T, V]. Leaves an empty cache."""
    surprise = source_surprise = agreed = 0.0
    target.truncate(0)
    while target.kv_len < len(tokens):
        start = target.kv_len
        part = tokens[start : start + min(JUDGED_ROWS, target.max_tree_size())]
        found = target.forward(DraftTree.chain(part.tolist(), start + 1)).logits
        target.keep(list(range(len(part))))
        expected = reference[start : start + len(part)]
        following = tokens[start + 1 : start + 1 + len(part)]
        agreed += float((found.argmax(axis=1) == expected.argmax(axis=1)).sum())
        surprise += surprise_at(found, following)
        source_surprise += surprise_at(expected, following)
    target.truncate(0)
    count = max(len(reference) - 1, 1)
    return Quality(
        tokens=count,
        perplexity=float(np.exp(surprise / count)),
        source_perplexity=float(np.exp(source_surprise / count)),
        top1_agreement=agreed / len(reference),
    )


def surprise_at(logits: Float32Array, following: TokenArray) -> float:
    """Minus the log-likelihood, in all, of the tokens that follow; logits float32 [T, V], the last row's
    unused where its token is not known."""
    rows = logits[: len(following)]
    peak = rows.max(axis=1)
    total = peak + np.log(np.exp(rows - peak[:, None]).sum(axis=1))
    return float((total - rows[np.arange(len(following)), following]).sum())
