"""What drafting ahead could bring: how often the outcome of a round is one that could have been drafted for.

While a tree is verified, an idle draft service could draft for likely outcomes: a path of the tree, and the
bonus token that leaves it. That token is none of the tree's nodes, or it would have been accepted; so the
likeliest outcomes are the nodes that came next and were cut off, below nodes that were kept. A hit spares the
round its wait.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np

from starsd_edge.bench.trace import Trace
from starsd_edge.decoding.costs import CostCurve

__all__ = ["OUTCOMES", "Ahead", "gain", "hit_rates"]

OUTCOMES = (1, 2, 4, 8, 16)  # drafted for at once, each a tree of its own


@dataclass(frozen=True, slots=True)
class Ahead:
    """Of trees of `nodes` nodes: tokens a round, and the share of rounds that end in one of the first 1, 2, 4
    ... outcomes."""

    nodes: int
    tokens: float
    hits: tuple[float, ...]

    def as_dict(self) -> dict[str, object]:
        return asdict(self)


def hit_rates(traces: Sequence[Trace], nodes: int) -> Ahead:
    """Play the traces with trees of the first `nodes` nodes; look for each outcome among those cut off."""
    rounds, tokens = 0, 0
    hits = np.zeros(len(OUTCOMES))
    for trace in traces:
        committed_len = trace.prompt_len + 1
        while committed_len < len(trace.tokens) - 1:
            whole = trace.tree_after(committed_len)
            text = trace.tokens[committed_len:].tolist()
            path = whole.first(nodes).walk(text)
            brought = min(len(path), len(text))
            bonus = whole.child(path[-1], text[brought - 1]) if brought == len(path) else None
            if bonus is not None:
                outcomes = np.flatnonzero(whole.parents[nodes:] < nodes) + nodes
                place = int(np.searchsorted(outcomes, bonus))
                hits += np.array([place < count for count in OUTCOMES])
            rounds += 1
            tokens += brought
            committed_len += brought
    return Ahead(nodes, tokens / rounds, tuple((hits / rounds).tolist()))


def gain(curve: CostCurve, nodes: int, wait_s: float, hit: float) -> float:
    """Rounds per second over those without drafting ahead, at best: a hit takes no wait, its tree is as good
    as one that was drafted from the target's own features, and nothing is delayed."""
    verify_s = curve(nodes)
    return (wait_s + verify_s) / (verify_s + (1.0 - hit) * wait_s)
