"""What a session measures of itself: one `RoundStats` a round, added up in `SessionStats`.

Cheap enough for every round: a few additions and histogram increments, no sorting, bounded memory.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from starsd_edge.latency import Histogram

__all__ = ["RoundKind", "RoundStats", "SessionStats"]

MAX_DEPTH = 32  # deeper accepted tokens are counted in the last entry


class RoundKind(Enum):
    PREFILL = "prefill"  # the prompt, up to the first token
    PLAIN = "plain"  # root only
    VERIFY = "verify"  # a tree of at least two nodes


@dataclass(frozen=True, slots=True)
class RoundStats:
    """One round, as the decode loop saw it.

    size          nodes of the verified tree, root included (prefill: rows run)
    num_accepted  draft tokens accepted
    num_tokens    tokens committed, bonus included; fewer than accepted + 1 when a stop token cut the round
    depth         of the deepest node verified
    waited_s      spent waiting for a tree
    forward_s     spent in the target's forward
    total_s       the whole round, commit and hand-over to the drafter included
    draft_age_s   from sending the update to the arrival of the tree that was verified; None without one
    guarded       ended at a decision below the margin guard
    settled       plain forwards that settled a decision which the guard had left open, and their seconds
    ahead         the tree was drafted ahead
    """

    kind: RoundKind
    size: int
    num_accepted: int
    num_tokens: int
    depth: int
    waited_s: float
    forward_s: float
    total_s: float
    draft_age_s: float | None = None
    guarded: bool = False
    settled: int = 0
    settled_s: float = 0.0
    ahead: bool = False


@dataclass(slots=True)
class SessionStats:
    """Sums over the rounds of a session.

    accepted_at_depth[d - 1], tried_at_depth[d - 1]   draft tokens accepted at depth d, and rounds whose walk
        reached depth d - 1 with a tree that goes to depth d at least: their quotient is alpha
    late       trees that arrived after tokens had been committed on top of their base and could be followed
    stale      trees that could not be followed any more, dropped
    refused    trees that were no continuation of anything (wrong root, tokens out of the vocabulary), dropped
    settled    plain forwards that settled a decision below the margin guard, and their seconds
    verify, sample, plain, wait, draft   seconds: a tree's forward, what a round with a tree took beside it
        (picking, walking, committing, the hand-over), a plain forward, waiting, the age of verified trees
    ahead      trees verified that had been drafted ahead
    sizes      nodes of verified trees, root included
    """

    prefills: int = 0
    prompt_rows: int = 0
    rounds: int = 0
    plain_rounds: int = 0
    tokens: int = 0
    accepted: int = 0
    drafted: int = 0
    late: int = 0
    stale: int = 0
    refused: int = 0
    guarded: int = 0
    settled: int = 0
    settled_s: float = 0.0
    ahead: int = 0
    decode_s: float = 0.0
    prefill_s: float = 0.0
    waited_s: float = 0.0
    accepted_at_depth: list[int] = field(default_factory=lambda: [0] * MAX_DEPTH)
    tried_at_depth: list[int] = field(default_factory=lambda: [0] * MAX_DEPTH)
    wait: Histogram = field(default_factory=Histogram)
    verify: Histogram = field(default_factory=Histogram)
    plain: Histogram = field(default_factory=Histogram)
    draft: Histogram = field(default_factory=Histogram)
    sample: Histogram = field(default_factory=Histogram)
    sizes: Histogram = field(default_factory=Histogram)

    def add(self, stats: RoundStats) -> None:
        self.tokens += stats.num_tokens
        if stats.kind is RoundKind.PREFILL:
            self.prefills += 1
            self.prompt_rows += stats.size
            self.prefill_s += stats.total_s
            return
        self.rounds += 1
        self.decode_s += stats.total_s
        self.waited_s += stats.waited_s
        self.guarded += stats.guarded
        self.settled += stats.settled
        self.settled_s += stats.settled_s
        if stats.waited_s > 0:
            self.wait.add(stats.waited_s)
        if stats.kind is RoundKind.PLAIN:
            self.plain_rounds += 1
            self.plain.add(stats.forward_s)
            return
        self.ahead += stats.ahead
        self.verify.add(stats.forward_s)
        self.sample.add(max(0.0, stats.total_s - stats.waited_s - stats.forward_s))
        self.sizes.add(stats.size)
        self.drafted += stats.size - 1
        self.accepted += stats.num_accepted
        for depth in range(min(stats.depth, stats.num_accepted + 1, MAX_DEPTH)):
            self.tried_at_depth[depth] += 1
            self.accepted_at_depth[depth] += depth < stats.num_accepted
        if stats.draft_age_s is not None:
            self.draft.add(stats.draft_age_s)

    @property
    def mean_acceptance_length(self) -> float:
        """tau: tokens a round, bonus included, over all rounds, plain ones too; 1 before the first."""
        return (self.tokens - self.prefills) / self.rounds if self.rounds else 1.0

    @property
    def tokens_per_s(self) -> float:
        """Decoding speed, prefill left out (its first token too); 0 before the first round."""
        return (self.tokens - self.prefills) / self.decode_s if self.decode_s > 0 else 0.0

    def alpha(self, depth: int) -> float:
        """Acceptance rate at `depth` >= 1; 0 when it was never tried."""
        tried = self.tried_at_depth[depth - 1]
        return self.accepted_at_depth[depth - 1] / tried if tried else 0.0

    def as_dict(self) -> dict[str, Any]:
        """Plain numbers for the JSON of benchmarks."""
        depths = sum(1 for tried in self.tried_at_depth if tried)
        return {
            "rounds": self.rounds,
            "plain_rounds": self.plain_rounds,
            "tokens": self.tokens,
            "prompt_rows": self.prompt_rows,
            "acceptance_length": self.mean_acceptance_length,
            "alpha": [self.alpha(depth) for depth in range(1, depths + 1)],
            "tokens_per_s": self.tokens_per_s,
            "drafted": self.drafted,
            "accepted": self.accepted,
            "late": self.late,
            "stale": self.stale,
            "refused": self.refused,
            "ahead": self.ahead,
            "guarded": self.guarded,
            "settled": self.settled,
            "settled_s": self.settled_s,
            "prefill_s": self.prefill_s,
            "decode_s": self.decode_s,
            "waited_s": self.waited_s,
            "verify_ms": _quantiles_ms(self.verify),
            "plain_ms": _quantiles_ms(self.plain),
            "draft_ms": _quantiles_ms(self.draft),
        }


def _quantiles_ms(histogram: Histogram) -> dict[str, float]:
    return {name: (histogram.quantile(q) or 0.0) * 1e3 for name, q in (("p50", 0.5), ("p95", 0.95))}
