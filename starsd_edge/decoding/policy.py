"""Decide: wait for a tree, verify how much of it, or take a plain step.

The model is written down in docs/policy.md.

Everything here is a comparison of rates, expected tokens per second. With T(n) the cost of a forward over n
rows, p_i the probability that node i is accepted (p_0 = 1, the root's own token is certain) and w the wait,

    rate(n, w) = (p_0 + ... + p_(n-1)) / (w + T(n)),         plain = 1 / T(1).

No clock and no drafter in here: the decode loop says what is at hand and what happened.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from starsd_edge.decoding.acceptance import AcceptanceModel, along_paths
from starsd_edge.decoding.ahead import AHEAD_NODES
from starsd_edge.decoding.asking import LARGEST_TREE
from starsd_edge.decoding.costs import CostCurve
from starsd_edge.decoding.draft import Draft
from starsd_edge.decoding.ngram import NGRAM, merge
from starsd_edge.decoding.record import SMOOTHING, DrafterRecord, RunningRate, worthwhile
from starsd_edge.decoding.roles import RoundHints
from starsd_edge.decoding.tree import DraftTree
from starsd_edge.metrics import RoundKind, RoundStats
from starsd_edge.types import Float64Array

__all__ = ["AdaptivePolicy", "FixedPolicy", "Outlook", "PlainPolicy", "Policy", "best_size"]


def best_size(node_probabilities: Float64Array, cost_curve: CostCurve, wait_s: float = 0.0) -> int:
    """The n >= 1 for which the first n nodes give the most tokens per second; the least among equals.

    node_probabilities   float [N], in tree order, [0] the root's 1.0
    wait_s               what is spent per round besides the forward
    """
    tokens = np.cumsum(node_probabilities)
    return int(np.argmax(tokens / (wait_s + cost_curve.table(len(tokens))))) + 1


@dataclass(frozen=True, slots=True)
class Outlook:
    """What the loop knows before a round.

    draft      the tree at hand
    lookup     what the context itself drafts, if the policy wants that
    elapsed_s  since the update left whose tree is awaited; None when none is under way
    behind     tokens committed since that update
    max_size   nodes the forward may have
    max_depth  draft tokens that can still be used: the tokens wanted, less the bonus
    origin     who drafts now
    """

    draft: Draft | None
    elapsed_s: float | None
    behind: int
    max_size: int
    max_depth: int
    origin: str = ""
    lookup: Draft | None = None


class Policy(Protocol):
    """What the decode loop asks. `learn` and `observe` are how it gets better at it."""

    @property
    def wants_lookup(self) -> bool:
        """Whether `Outlook.lookup` is of use to it."""
        ...

    def patience_s(self, outlook: Outlook) -> float:
        """How long to wait for an outstanding tree before this round; 0: not at all."""
        ...

    def choose(self, outlook: Outlook) -> DraftTree | None:
        """The tree to verify, of what is at hand; None: a plain step."""
        ...

    def hints(self) -> RoundHints:
        """What the drafter should know of this device's speed."""
        ...

    def wants_draft(self, rows_held: int) -> bool:
        """Whether to ask for a tree now, with `rows_held` rows not handed over yet."""
        ...

    def arrived(self, draft: Draft) -> None:
        """A tree arrived; tokens may have been committed on top of its root since."""
        ...

    def learn(self, draft: Draft, tokens: list[int]) -> None:
        """The target said `tokens` after the draft's root."""
        ...

    def observe(self, stats: RoundStats) -> None:
        """A round ended."""
        ...

    def calibration_error(self) -> list[float]:
        """By depth, of the drafter in use: how far accepted shares are from the probabilities expected; empty
        where none are."""
        ...


class PlainPolicy:
    """Never drafts."""

    wants_lookup = False

    def patience_s(self, outlook: Outlook) -> float:
        return 0.0

    def choose(self, outlook: Outlook) -> DraftTree | None:
        return None

    def hints(self) -> RoundHints:
        return RoundHints(max_nodes=1)

    def wants_draft(self, rows_held: int) -> bool:
        return False

    def arrived(self, draft: Draft) -> None:
        pass

    def learn(self, draft: Draft, tokens: list[int]) -> None:
        pass

    def observe(self, stats: RoundStats) -> None:
        pass

    def calibration_error(self) -> list[float]:
        return []


@dataclass(frozen=True, slots=True)
class FixedPolicy:
    """Always waits, up to `max_wait_s`, and verifies `num_nodes` nodes: what benchmarks compare with."""

    num_nodes: int
    max_wait_s: float = 1.0
    wants_lookup: bool = False

    def patience_s(self, outlook: Outlook) -> float:
        return self.max_wait_s if outlook.draft is None and outlook.elapsed_s is not None else 0.0

    def choose(self, outlook: Outlook) -> DraftTree | None:
        draft = outlook.draft or outlook.lookup
        return draft.tree.first(min(self.num_nodes, outlook.max_size)) if draft else None

    def hints(self) -> RoundHints:
        return RoundHints(max_nodes=self.num_nodes)

    def wants_draft(self, rows_held: int) -> bool:
        return True

    def arrived(self, draft: Draft) -> None:
        pass

    def learn(self, draft: Draft, tokens: list[int]) -> None:
        pass

    def observe(self, stats: RoundStats) -> None:
        pass

    def calibration_error(self) -> list[float]:
        return []


class AdaptivePolicy:
    """Maximises expected tokens per second, from the device's curve, the drafter's answers and the text.

    What is learnt is kept per drafter (`Draft.origin`): an n-gram tree says nothing of the service's.
    """

    def __init__(self, cost_curve: CostCurve, *, lookup: bool = True, ahead: bool = True) -> None:
        self.wants_lookup = lookup
        self._ahead = ahead
        self._table = cost_curve.table(LARGEST_TREE)
        self._scale = 1.0  # measured forward time over the curve's
        self._records: dict[str, DrafterRecord] = {}
        self._current = self._record("")
        self._lookups = AcceptanceModel()
        self._alone = RunningRate()  # what rounds would bring and take without any service
        self._promised = 0.0  # tokens expected of the tree that is being verified
        self.calibration = 1.0

    @property
    def drafting(self) -> bool:
        """Whether trees are asked for and verified at present."""
        return self._current.drafting

    @property
    def expected_gain(self) -> float:
        """Expected speed over plain decoding's."""
        return self._current.plan.rate * self._plain_s

    def calibration_error(self) -> list[float]:
        """See `Policy`."""
        return self._current.acceptance.calibration_error()

    def patience_s(self, outlook: Outlook) -> float:
        self._current = record = self._record(outlook.origin)
        if outlook.elapsed_s is None or outlook.max_size < 2:
            return 0.0
        at_hand = self._best(outlook)
        if at_hand.tree is not None:
            fresh = record.gain_of_fresh(at_hand.tokens, at_hand.seconds, outlook.elapsed_s, outlook.behind)
            if fresh <= 0.0:
                if outlook.draft is not None and outlook.draft.ahead:
                    self._note_ahead(record, outlook, at_hand, -fresh)
                return 0.0
        return record.patience_s(outlook.elapsed_s, outlook.behind, self._alone_s)

    def _note_ahead(
        self, record: DrafterRecord, outlook: Outlook, at_hand: _Choice, over_fresh: float
    ) -> None:
        """A tree drafted ahead is verified: what that is worth over the best there was to do without it."""
        alone = self._best(replace(outlook, draft=None))
        over_alone = at_hand.tokens - alone.tokens - record.rate * (at_hand.seconds - alone.seconds)
        record.ahead.used(min(over_fresh, over_alone))

    def choose(self, outlook: Outlook) -> DraftTree | None:
        """What adds more tokens than its time is worth: waits are over, so only the forward's cost counts."""
        self._promised = 0.0
        if outlook.max_size < 2:
            return None
        alone = self._best(replace(outlook, draft=None))
        self._alone.add(alone.tokens, alone.seconds)
        best = self._best(outlook) if outlook.draft is not None else alone
        self._promised = best.tokens
        return best.tree

    def _best(self, outlook: Outlook) -> _Choice:
        """The most worthwhile nodes of all drafts at hand."""
        rate = 1.0 / self._alone_s
        costs_s = self._costs_s[: outlook.max_size]
        parts: list[tuple[Draft, Float64Array]] = []
        draft, lookup = outlook.draft, outlook.lookup
        if draft is not None and self._record(draft.origin).drafting:
            record = self._record(draft.origin)
            rate = max(rate, record.rate)
            parts.append((draft, record.model(draft).conditionals(draft)))
        if lookup is not None:
            parts.append((lookup, self._lookups.conditionals(lookup)))
        if not parts:
            return _Choice(None, 1.0, float(costs_s[0]))
        return _best_of(parts, outlook.max_depth, costs_s, rate)

    def hints(self) -> RoundHints:
        record = self._current
        return RoundHints(
            max_nodes=record.request,
            num_accepted=record.last_accepted,
            verify_nodes=record.typical.size,
            verify_s=record.typical.verify_s,
            plain_s=self._plain_s,
            wait_s=record.last_age_s,
            ahead_nodes=AHEAD_NODES if self._ahead and record.ahead.wanted else 0,
        )

    def wants_draft(self, rows_held: int) -> bool:
        return self._current.drafting or rows_held >= self._current.look_tokens

    def arrived(self, draft: Draft) -> None:
        self._record(draft.origin).arrived(draft, self._costs_s, self._alone_s)

    def learn(self, draft: Draft, tokens: list[int]) -> None:
        model = self._lookups if draft.origin == NGRAM else self._record(draft.origin).model(draft)
        model.learn(draft, tokens)

    def observe(self, stats: RoundStats) -> None:
        if stats.kind is RoundKind.PREFILL:
            return
        self._scale += SMOOTHING * (stats.forward_s / self._table[stats.size - 1] - self._scale)
        # A round that a stop token cut short says nothing of the tree.
        if self._promised > 0 and stats.num_tokens == stats.num_accepted + 1:
            self.calibration += SMOOTHING * (stats.num_tokens / self._promised - self.calibration)
        self._current.observe(stats, self._alone_s)

    @property
    def _plain_s(self) -> float:
        return float(self._table[0]) * self._scale

    @property
    def _alone_s(self) -> float:
        """Seconds a token without a service: T(1), or less where lookups bring something."""
        return min(self._plain_s, 1.0 / self._alone.rate) if self._alone.rounds else self._plain_s

    @property
    def _costs_s(self) -> Float64Array:
        return self._table * self._scale

    def _record(self, origin: str) -> DrafterRecord:
        record = self._records.get(origin)
        if record is None:
            record = self._records[origin] = DrafterRecord(float(self._table[0]))
        return record


@dataclass(frozen=True, slots=True)
class _Choice:
    """A tree (None: a plain step), the tokens it is expected to bring, the seconds its forward takes."""

    tree: DraftTree | None
    tokens: float
    seconds: float


def _best_of(
    parts: list[tuple[Draft, Float64Array]], max_depth: int, costs_s: Float64Array, rate: float
) -> _Choice:
    """The most worthwhile nodes of one draft, or of two merged; nodes below `max_depth` are of no use."""
    (draft, conditionals), *others = parts
    tree = draft.tree
    for other, of_other in others:
        merged = merge(tree, other.tree)
        tree, conditionals = merged.tree, merged.combine(conditionals, of_other)
    p = along_paths(conditionals, tree.parents.tolist())
    p[tree.depths > max_depth] = 0.0
    nodes = worthwhile(p, costs_s, rate)
    chosen = tree.subset(nodes) if len(nodes) > 1 else None
    return _Choice(chosen, float(p[nodes].sum()), float(costs_s[len(nodes) - 1]))
