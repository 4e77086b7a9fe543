"""The decode loop: propose, forward, verify, commit.

Drafting decides how many tokens a forward settles, never which ones. The loop waits for a drafter only as
long as its policy says, verifies late trees as far as they still continue the text, and without a drafter it
is the same loop with root-only trees.

State is spread over three holders: the target's KV cache, the prefix, and what the drafter was told. Each
round changes them in that order, and `generate` starts by cutting all three back to what they agree on, so
that an answer may be abandoned or interrupted at any point: the next one recomputes what is in doubt.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np

from starsd_edge.decoding.policy import PlainPolicy, Policy
from starsd_edge.decoding.prefix import Prefix, common_length
from starsd_edge.decoding.proposals import Proposals
from starsd_edge.decoding.roles import Drafter, Target, TargetOutput, Update
from starsd_edge.decoding.sampling import SamplingParams, pick
from starsd_edge.decoding.tree import DraftTree
from starsd_edge.decoding.verify import Acceptance, verify
from starsd_edge.errors import UsageError
from starsd_edge.metrics import RoundKind, RoundStats, SessionStats
from starsd_edge.types import TokenArray

__all__ = ["Committed", "Decoder", "Exactness", "FinishReason"]

# A runtime's noise is the largest difference that was measured. A decision is trusted when it would hold
# under twice that, and a margin is twice the noise it withstands (sampling.Pick).
GUARD_PER_NOISE = 4.0


class FinishReason(Enum):
    STOP = "stop"  # a stop token, which is the last one committed
    LENGTH = "length"  # max_tokens were committed
    CONTEXT_FULL = "context_full"  # the target's context holds no further token


class Exactness(Enum):
    EXACT = "exact"  # the text is the target's own, to the bit
    INEXACT = "inexact"  # verify trees although the runtime rounds them differently from plain steps


@dataclass(frozen=True, slots=True)
class Committed:
    """What a round added to the text: at least one token, the stop token included; a reason on the last."""

    tokens: list[int]
    finish: FinishReason | None
    stats: RoundStats


@dataclass(slots=True)
class _Turn:
    """One call of `generate`."""

    params: SamplingParams
    stop_tokens: frozenset[int]
    remaining: int  # tokens still wanted


class Decoder:
    """One context on one target, with or without a drafter; the context itself drafts if the policy wants.

    target, drafter  their owner closes them; nobody else may use them meanwhile
    clock            monotonic seconds
    exactness        EXACT decodes plainly where the runtime cannot reproduce plain steps in a tree
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None,
        policy: Policy,
        clock: Callable[[], float],
        exactness: Exactness = Exactness.EXACT,
    ) -> None:
        invariance = target.spec.invariance
        exact = exactness is Exactness.EXACT
        drafts = drafter is not None or policy.wants_lookup
        self._plain_only = not drafts or (exact and not invariance.exact_tree)
        self._guard = GUARD_PER_NOISE * invariance.noise if exact and not invariance.bitwise else 0.0
        self._target = target
        self._policy: Policy = PlainPolicy() if self._plain_only else policy
        self._clock = clock
        self._prefix = Prefix()
        self._settle = False  # the next forward decides what the margin guard left open
        self.stats = SessionStats()
        self._proposals = Proposals(
            None if self._plain_only else drafter,
            self._policy,
            clock,
            self._prefix,
            target.spec.vocab_size,
            self.stats,
        )

    @property
    def prefix(self) -> TokenArray:
        """int32 [committed_len], read-only: the committed tokens of the context."""
        return self._prefix.tokens

    def generate(
        self,
        prompt_tokens: Sequence[int] | TokenArray,
        params: SamplingParams,
        max_tokens: int,
        stop_tokens: Collection[int] = (),
    ) -> Iterator[Committed]:
        """Continue the prompt; yields after every round. What the context holds already is not run again.

        Raises UsageError, before anything happens, for a prompt that is empty, does not fit or holds tokens
        that the target does not have, and for max_tokens < 1.
        """
        prompt = np.asarray(prompt_tokens, np.int32)
        self._check(prompt, max_tokens)
        turn = _Turn(params, frozenset(stop_tokens), max_tokens)
        return self._rounds(prompt, turn)

    def abandon(self) -> None:
        """Nobody wants more of the answer under way: the drafter need not draft on it. The context stays."""
        self._proposals.give_up()

    def _rounds(self, prompt: TokenArray, turn: _Turn) -> Iterator[Committed]:
        committed = self._prefill(prompt, turn)
        yield committed
        while committed.finish is None:
            committed = self._round(turn)
            yield committed

    def _round(self, turn: _Turn) -> Committed:
        started_s = self._clock()
        tree, waited_s = self._propose(turn)
        draft_age_s = self._proposals.draft_age_s if len(tree) > 1 else None
        ahead = len(tree) > 1 and self._proposals.drafted_ahead
        forward_started_s = self._clock()
        settles = self._settle
        output, acceptance, again_s = self._verify(tree, turn)
        forward_s = self._clock() - forward_started_s
        finish = self._commit(tree, output, acceptance, turn)
        stats = RoundStats(
            kind=RoundKind.VERIFY if len(tree) > 1 else RoundKind.PLAIN,
            size=len(tree),
            num_accepted=acceptance.num_accepted,
            num_tokens=len(acceptance.tokens),
            depth=int(tree.depths.max()),
            waited_s=waited_s,
            forward_s=forward_s,
            total_s=self._clock() - started_s,
            draft_age_s=draft_age_s,
            guarded=acceptance.guarded,
            settled=settles + (again_s is not None),
            settled_s=forward_s if settles else again_s or 0.0,
            ahead=ahead,
        )
        self.stats.add(stats)
        self._policy.observe(stats)
        return Committed(acceptance.tokens, finish, stats)

    def _propose(self, turn: _Turn) -> tuple[DraftTree, float]:
        """The tree to verify, and the seconds spent waiting for it."""
        max_depth = turn.remaining - 1
        max_size = self._target.max_tree_size()
        if self._plain_only or self._settle or max_depth == 0:
            max_size = 1
        waited_s = self._proposals.await_draft(max_size, max_depth)
        tree = self._policy.choose(self._proposals.outlook(max_size, max_depth)) if max_size > 1 else None
        if tree is None:
            tree = DraftTree.root_only(int(self._prefix.tokens[-1]), len(self._prefix))
        return tree, waited_s

    def _verify(self, tree: DraftTree, turn: _Turn) -> tuple[TargetOutput, Acceptance, float | None]:
        """The seconds are those of a plain forward in the tree's place, None where none was needed."""
        context = self._prefix.tokens
        output = self._target.forward(tree)
        guard = self._guard if len(tree) > 1 else 0.0
        acceptance = verify(tree, output.logits, turn.params, context, guard)
        again_s = None
        if not acceptance.path:
            # Not even the root's own decision was safe: this plain forward takes the place of the other.
            started_s = self._clock()
            output = self._target.forward(tree.first(1))
            again_s = self._clock() - started_s
            acceptance = verify(tree.first(1), output.logits, turn.params, context)
        self._settle = acceptance.guarded
        return output, self._cut(acceptance, turn), again_s

    def _cut(self, acceptance: Acceptance, turn: _Turn) -> Acceptance:
        """Nothing past a stop token or the number of tokens wanted."""
        for index, token in enumerate(acceptance.tokens[: turn.remaining]):
            if token in turn.stop_tokens:
                return acceptance.first(index + 1)
        return acceptance.first(turn.remaining)

    def _commit(
        self, tree: DraftTree, output: TargetOutput, acceptance: Acceptance, turn: _Turn
    ) -> FinishReason | None:
        start = tree.base_len - 1
        self._target.keep(acceptance.path)
        self._prefix.append(acceptance.tokens)
        turn.remaining -= len(acceptance.tokens)
        tokens = np.array(acceptance.tokens, np.int32)
        finish = self._finish_reason(acceptance.tokens[-1], turn)
        self._proposals.committed(Update(start, tokens, output.features[acceptance.path]), finish is None)
        return finish

    def _prefill(self, prompt: TokenArray, turn: _Turn) -> Committed:
        started_s = self._clock()
        start = self._reuse(prompt)
        output = self._target.prefill(prompt[start:])
        forward_s = self._clock() - started_s
        first = pick(output.logits[-1], turn.params, len(prompt), prompt).token
        self._prefix.append([*prompt[len(self._prefix) :].tolist(), first])
        turn.remaining -= 1
        rows = np.append(prompt[start + 1 :], np.int32(first))
        finish = self._finish_reason(first, turn)
        self._proposals.committed(Update(start, rows, output.features), finish is None)
        stats = RoundStats(
            kind=RoundKind.PREFILL,
            size=len(rows),
            num_accepted=0,
            num_tokens=1,
            depth=0,
            waited_s=0.0,
            forward_s=forward_s,
            total_s=self._clock() - started_s,
        )
        self.stats.add(stats)
        self._policy.observe(stats)
        return Committed([first], finish, stats)

    def _reuse(self, prompt: TokenArray) -> int:
        """Cut target, prefix and drafter back to what they share with the prompt; the rows that stay.

        The row before the first new token is run again: the drafter pairs its feature with that token.
        """
        common = common_length(self._prefix.tokens, prompt)
        rows = max(0, min(common, self._target.kv_len + 1, self._proposals.committed_len) - 1)
        self._settle = False
        self._target.truncate(rows)
        self._prefix.truncate(min(rows + 1, common))
        self._proposals.restart(int(prompt[0]), min(rows + 1, common))
        return rows

    def _finish_reason(self, last: int, turn: _Turn) -> FinishReason | None:
        if last in turn.stop_tokens:
            return FinishReason.STOP
        if turn.remaining == 0:
            return FinishReason.LENGTH
        if self._target.max_tree_size() == 0:
            return FinishReason.CONTEXT_FULL
        return None

    def _check(self, prompt: TokenArray, max_tokens: int) -> None:
        spec = self._target.spec
        if len(prompt) == 0:
            raise UsageError("an empty prompt cannot be continued: give it at least one token")
        if len(prompt) > spec.max_len:
            raise UsageError(
                f"the prompt has {len(prompt)} tokens, the target's context holds {spec.max_len}: shorten it"
            )
        if prompt.min() < 0 or prompt.max() >= spec.vocab_size:
            raise UsageError(
                f"the prompt holds tokens outside the target's vocabulary of {spec.vocab_size}: "
                "does the tokenizer belong to this bundle?"
            )
        if max_tokens < 1:
            raise UsageError(f"max_tokens must be at least 1, not {max_tokens}")
