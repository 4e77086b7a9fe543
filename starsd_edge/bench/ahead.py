"""What drafting ahead could bring: how often the outcome of a round is one that could have been drafted for.

While a tree is verified, an idle draft service could draft for likely outcomes: a path of the tree, and the
bonus token that leaves it. That token is none of the tree's nodes, or it would have been accepted; so the
likeliest outcomes are the nodes that came next and were cut off, below nodes that were kept. A hit whose tree
is on the device by then spares the round its wait.

The cheapest way to draft for many outcomes at once is to go on with the same tree: what hangs below a node
that was cut off is a draft for the outcome that ends there, likeliest first, though of features that are all
guessed. `Rest` counts what it brings.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np

from starsd_edge.bench.trace import Trace
from starsd_edge.decoding.costs import CostCurve

__all__ = ["OUTCOMES", "Ahead", "Rest", "Timing", "hit_rates"]

OUTCOMES = (1, 2, 4, 8, 16)  # drafted for at once, each a tree of its own


@dataclass(frozen=True, slots=True)
class Rest:
    """Of recorded trees, beyond the nodes that are verified: the share of rounds that end there, and the
    tokens of the next round then, from what is left there and from a fresh tree of as many nodes."""

    hit: float
    tokens: float
    fresh_tokens: float


@dataclass(frozen=True, slots=True)
class Ahead:
    """Of trees of `nodes` nodes: tokens a round, the drafter's steps a tree, the share of rounds that end in
    one of the first 1, 2, 4 ... outcomes, and what the rest of the tree is good for."""

    nodes: int
    tokens: float
    steps: float
    hits: tuple[float, ...]
    rest: Rest

    def as_dict(self) -> dict[str, object]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Timing:
    """A device on a line to a service that has nothing else to do."""

    curve: CostCurve
    rtt_s: float
    step_s: float

    def tokens_per_s(self, of: Ahead, hit: float = 0.0) -> float:
        """At best: a hit takes no wait, and its tree is as good as one from the target's own features."""
        return of.tokens / self._round_s(of, hit)

    def tokens_per_s_with_rest(self, of: Ahead) -> float:
        """When hits go on with what is left of the tree, all of which is on the device in time."""
        hit, lost = of.rest.hit, of.rest.fresh_tokens - of.rest.tokens
        return (of.tokens - hit * lost) / self._round_s(of, hit)

    def _round_s(self, of: Ahead, hit: float) -> float:
        return self.curve(of.nodes) + (1.0 - hit) * (self.rtt_s + self.step_s * of.steps)


def hit_rates(traces: Sequence[Trace], nodes: int) -> Ahead:
    """Play the traces with trees of the first `nodes` nodes; look for each outcome among those cut off."""
    rounds = tokens = steps = 0
    hits = np.zeros(len(OUTCOMES))
    rests: list[tuple[int, int]] = []  # tokens of what is left, and of a fresh tree
    for trace in traces:
        committed_len = trace.prompt_len + 1
        while committed_len < len(trace.tokens) - 1:
            whole = trace.tree_after(committed_len)
            text = trace.tokens[committed_len:].tolist()
            tree = whole.first(nodes)
            path = tree.walk(text)
            brought = min(len(path), len(text))
            bonus = whole.child(path[-1], text[brought - 1]) if brought == len(path) else None
            rounds, tokens, steps = rounds + 1, tokens + brought, steps + max(1, int(tree.depths.max()))
            committed_len += brought
            if bonus is None:
                continue
            outcomes = np.flatnonzero(whole.parents[nodes:] < nodes) + nodes
            place = int(np.searchsorted(outcomes, bonus))
            hits += np.array([place < count for count in OUTCOMES])
            left = whole.descend(text[:brought])
            assert left is not None
            fresh = trace.tree_after(committed_len)
            after = text[brought:]
            rests.append((len(left.first(nodes).walk(after)), len(fresh.first(nodes).walk(after))))
    left_tokens, fresh_tokens = np.mean(rests or [(1, 1)], axis=0).tolist()
    rest = Rest(len(rests) / rounds, left_tokens, fresh_tokens)
    return Ahead(nodes, tokens / rounds, steps / rounds, tuple((hits / rounds).tolist()), rest)
