"""The drafter's side of the decode loop: rows handed over, trees taken in, what is known of trees to come.

Trees arrive when they like. Each is checked against the committed text, followed as far as the text went
since, and kept as the draft at hand if anything is left of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from enum import Enum

import numpy as np

from starsd_edge.decoding.draft import Draft
from starsd_edge.decoding.ngram import draft_from_context
from starsd_edge.decoding.policy import Outlook, Policy
from starsd_edge.decoding.prefix import Prefix
from starsd_edge.decoding.roles import Drafter, Update
from starsd_edge.decoding.tree import DraftTree
from starsd_edge.metrics import SessionStats

__all__ = ["Proposals"]

# An answer that takes this many times what was expected is given up: the drafter or the network lost it.
LOST_AFTER = 4.0
# Expected waits below this are not told apart: timers are not finer.
LEAST_WAIT_S = 1e-3


class Arrival(Enum):
    NOTHING = "nothing"  # in all the time that the poll was given
    USELESS = "useless"  # a tree that continues nothing, or nothing any more
    USABLE = "usable"
    AHEAD = "ahead"  # one that was drafted ahead: the one that was asked for is still to come


class Proposals:
    """Owns the dealings with one drafter, None: nobody, and what the context itself drafts."""

    def __init__(
        self,
        drafter: Drafter | None,
        policy: Policy,
        clock: Callable[[], float],
        prefix: Prefix,
        vocab_size: int,
        stats: SessionStats,
    ) -> None:
        self._drafter = drafter
        self._policy = policy
        self._clock = clock
        self._prefix = prefix
        self._vocab_size = vocab_size
        self._stats = stats
        self._draft: Draft | None = None
        self._ahead: Draft | None = None  # what goes on where the draft at hand ends
        self._lookup: Draft | None = None
        self._held: list[Update] = []  # rows not handed over yet, because no tree is wanted now
        self._asked: dict[int, float] = {}  # base_len of an update that no tree answered yet -> when it left
        self._told_len = 0  # committed_len that the drafter knows
        self._answered_len = 0  # base_len of the newest tree
        self._first_asked_len = 0  # committed_len of the first update since the context was cut or begun
        self._polled_s = 0.0  # when there was no tree yet
        self._origin = ""  # of the trees to come

    @property
    def committed_len(self) -> int:
        """How much of the text needs no new rows for the drafter."""
        if self._drafter is None:
            return len(self._prefix)
        return self._held[-1].committed_len if self._held else self._told_len

    @property
    def draft_age_s(self) -> float | None:
        return self._draft.age_s if self._draft else None

    @property
    def drafted_ahead(self) -> bool:
        """Whether the draft at hand was drafted ahead."""
        return self._draft is not None and self._draft.ahead

    def restart(self, first_token: int, committed_len: int) -> None:
        """The context is cut back to `committed_len` tokens; 0: a new one that begins with `first_token`."""
        self._draft = self._ahead = self._lookup = None
        self._asked.clear()
        self._first_asked_len = self._answered_len = 0
        if self._drafter is None:
            return
        if self._told_len == 0 or committed_len == 0:
            self._held.clear()
            self._drafter.start(first_token)
            self._told_len = 1
            return
        self._held = [
            _first_rows(held, committed_len) for held in self._held if held.start + 1 < committed_len
        ]
        # Said even if nothing is cut: an interrupt may have hit between an update and the note of it.
        self._told_len = min(self._told_len, committed_len)
        self._drafter.rollback(self._told_len)

    def give_up(self) -> None:
        """No tree is wanted for now; the drafter keeps what it knows of the text."""
        self._draft = self._ahead = None
        self._asked.clear()
        if self._drafter is not None and self._told_len > 0:
            self._drafter.rollback(self._told_len)

    def committed(self, update: Update, more_wanted: bool) -> None:
        """Rows were committed. Hands them over if a tree is wanted, else keeps them for later."""
        tokens = update.tokens.tolist()
        if self._lookup is not None:
            self._policy.learn(self._lookup, tokens)
            self._lookup = None
        if self._drafter is None:
            return
        self._held.append(update)
        drafts = [draft for draft in (self._ahead, self._draft) if draft is not None]
        for draft in drafts:
            self._policy.learn(draft, tokens)
        self._draft = next((left for draft in drafts if (left := draft.after(tokens)) is not None), None)
        self._ahead = None
        if more_wanted and self._policy.wants_draft(update.committed_len - self._told_len):
            self._hand_over()

    def await_draft(self, max_size: int, max_depth: int) -> float:
        """Take in what arrived; wait for more as long as the policy finds it worth. Seconds waited."""
        if self._policy.wants_lookup and max_size > 1:
            self._lookup = draft_from_context(self._prefix.tokens)
        if self._drafter is None:
            return 0.0
        while self._take(0.0) is not Arrival.NOTHING:
            pass
        started_s = now_s = self._clock()
        deadline_s = started_s + self._policy.patience_s(self.outlook(max_size, max_depth))
        if deadline_s <= started_s:
            return 0.0
        while now_s < deadline_s and (arrival := self._take(deadline_s - now_s)) is not Arrival.NOTHING:
            now_s = self._clock()
            if arrival is Arrival.AHEAD:
                patience_s = self._policy.patience_s(self.outlook(max_size, max_depth))
                deadline_s = min(deadline_s, now_s + patience_s)
            elif arrival is Arrival.USABLE or self._under_way()[0] is None:
                break  # if the drafter had nothing to propose, no other tree comes
        return self._clock() - started_s

    def outlook(self, max_size: int, max_depth: int) -> Outlook:
        elapsed_s, behind = self._under_way()
        return Outlook(self._draft, elapsed_s, behind, max_size, max_depth, self._origin, self._lookup)

    def _hand_over(self) -> None:
        assert self._drafter is not None
        self._origin = self._drafter.state().origin
        update = replace(_joined(self._held), hints=self._policy.hints())
        self._held = []
        self._drafter.update(update)
        self._told_len = update.committed_len
        self._first_asked_len = self._first_asked_len or update.committed_len
        self._asked[update.committed_len] = self._clock()

    def _take(self, timeout_s: float) -> Arrival:
        """Poll once."""
        assert self._drafter is not None
        if timeout_s > 0:
            self._polled_s = self._clock()
        tree = self._drafter.poll(timeout_s)
        if tree is None:
            self._polled_s = self._clock()
            return Arrival.NOTHING
        if not self._is_continuation(tree):
            self._stats.refused += 1
            return Arrival.USELESS
        if tree.base_len == self._answered_len:
            return self._take_ahead(tree)
        self._answered_len = tree.base_len
        age_s = self._age_s(tree)
        self._answered(tree.base_len)
        with_prompt = tree.base_len == self._first_asked_len
        draft_s = self._drafter.state().draft_s
        draft: Draft | None = Draft(tree, 0, age_s, self._origin, with_prompt, draft_s)
        assert draft is not None
        self._policy.arrived(draft)
        since = self._prefix.tokens[tree.base_len :].tolist()
        if since:
            self._policy.learn(draft, since)
            draft = draft.after(since)
        if draft is None or len(draft.tree) == 1:
            self._stats.stale += 1
            return Arrival.USELESS
        self._asked.clear()  # a tree of use is answered by the rows of its round, which ask for the next
        self._stats.late += bool(since)
        if self._draft is None or draft.depth_offset <= self._draft.depth_offset:
            self._draft = draft
        return Arrival.USABLE

    def _take_ahead(self, tree: DraftTree) -> Arrival:
        """A second tree for the same tokens: the first one, and what was found beyond it since."""
        draft: Draft | None = Draft(tree, 0, 0.0, self._origin, ahead=True)
        assert draft is not None
        since = self._prefix.tokens[tree.base_len :].tolist()
        if not since:
            self._ahead = draft
            return Arrival.AHEAD
        self._policy.learn(draft, since)
        left = draft.after(since)
        if left is not None:
            self._draft = left
        return Arrival.AHEAD

    def _age_s(self, tree: DraftTree) -> float:
        """From its update to its arrival. If the drafter does not say when that was, it was some time since
        the last poll: at the expected time, if that lies between."""
        assert self._drafter is not None
        asked_s, state = self._asked.get(tree.base_len, self._polled_s), self._drafter.state()
        if state.answered_s > asked_s:
            return state.answered_s - asked_s
        expected_s = asked_s + state.expected_wait_s
        return min(max(expected_s, self._polled_s), self._clock()) - asked_s

    def _answered(self, base_len: int) -> None:
        """One tree is under way at a time: rows handed over meanwhile leave together, when it is there."""
        waiting = [base for base in self._asked if base > base_len]
        self._asked = {waiting[-1]: self._clock()} if waiting else {}

    def _is_continuation(self, tree: DraftTree) -> bool:
        """A drafter may be confused or hostile: nothing of its tree is believed."""
        tokens = self._prefix.tokens
        return (
            tree.base_len <= len(tokens)
            and int(tree.tokens[0]) == int(tokens[tree.base_len - 1])
            and int(tree.tokens.min()) >= 0
            and int(tree.tokens.max()) < self._vocab_size
        )

    def _under_way(self) -> tuple[float | None, int]:
        """Seconds since the oldest outstanding update left (None: none is), and tokens committed since."""
        if self._drafter is None:
            return None, 0
        state = self._drafter.state()
        self._origin = state.origin
        if not state.ready or not math.isfinite(state.expected_wait_s):
            self._asked.clear()
            return None, 0
        if state.asked_len is not None:
            if state.asked_len == 0:
                return None, 0
            self._asked[state.asked_len] = state.asked_s
            return self._clock() - state.asked_s, len(self._prefix) - state.asked_len
        expected_s = max(state.expected_wait_s, LEAST_WAIT_S)
        lost_s = self._clock() - LOST_AFTER * expected_s
        self._asked = {base: asked_s for base, asked_s in self._asked.items() if asked_s > lost_s}
        if not self._asked:
            return None, 0
        base_len, asked_s = next(iter(self._asked.items()))
        return self._clock() - asked_s, len(self._prefix) - base_len


def _joined(updates: list[Update]) -> Update:
    if len(updates) == 1:
        return updates[0]
    tokens = np.concatenate([update.tokens for update in updates])
    return Update(updates[0].start, tokens, np.concatenate([update.features for update in updates]))


def _first_rows(update: Update, committed_len: int) -> Update:
    """The rows of `update` that a context cut to `committed_len` tokens still has."""
    count = min(len(update.tokens), committed_len - update.start - 1)
    return Update(update.start, update.tokens[:count], update.features[:count])
