"""How much a bundle lost against its source, on the built-in text."""

from __future__ import annotations

import numpy as np

from starsd_edge.bundle import Quality
from starsd_edge.decoding.roles import Target
from starsd_edge.decoding.tree import DraftTree
from starsd_edge.types import Float32Array, TokenArray

__all__ = ["judge"]


def judge(target: Target, tokens: TokenArray, reference: Float32Array) -> Quality:
    """Compare with the source's logits of the last tokens, float32 [R, V]. Leaves an empty cache."""
    found = all_logits(target, tokens)[-len(reference) :]
    following = tokens[len(tokens) - len(reference) + 1 :]
    return Quality(
        tokens=len(following),
        perplexity=perplexity(found[:-1], following),
        source_perplexity=perplexity(reference[:-1], following),
        top1_agreement=float((found.argmax(axis=1) == reference.argmax(axis=1)).mean()),
    )


def all_logits(target: Target, tokens: TokenArray) -> Float32Array:
    """Logits [T, V] of every position, through forwards as large as the target allows."""
    target.truncate(0)
    rows = []
    while target.kv_len < len(tokens):
        start = target.kv_len
        part = tokens[start : start + target.max_tree_size()]
        rows.append(target.forward(DraftTree.chain(part.tolist(), start + 1)).logits)
        target.keep(list(range(len(part))))
    target.truncate(0)
    return np.concatenate(rows)


def perplexity(logits: Float32Array, following: TokenArray) -> float:
    """Of the tokens that follow, float32 [T, V] and int32 [T]."""
    peak = logits.max(axis=1)
    total = peak + np.log(np.exp(logits - peak[:, None]).sum(axis=1))
    chosen = logits[np.arange(len(following)), following]
    return float(np.exp(np.mean(total - chosen)))
