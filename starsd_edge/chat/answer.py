"""What asking a model gives: pieces of text, then how it ended and its figures."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from enum import Enum
from typing import TypeAlias

from starsd_edge.metrics import RoundKind, RoundStats

__all__ = [
    "AnswerEnd",
    "AnswerEvent",
    "AnswerPiece",
    "AnswerStart",
    "Figures",
    "FinishReason",
    "PromptRead",
    "TokenLogprob",
]


class FinishReason(str, Enum):
    """Why an answer ended."""

    STOP = "stop"  # the model said so, or a stop string was reached
    LENGTH = "length"  # max_tokens, or the context is full
    CANCELLED = "cancelled"  # the user stopped it; what was said is kept


@dataclass(slots=True)
class Figures:
    """What one answer took.

    cached_tokens    of the prompt that were in the KV cache already
    first_token_s    from the start of the prompt's prefill to the first token
    generation_s     from the first token to the last
    verified         (draft tokens verified, accepted) -> rounds, for rounds that verified a tree
    plain_rounds     rounds without a tree
    settled          plain forwards that decided what the margin guard would not trust a tree with
    settled_s        what they took
    calibration_error  by depth, how far accepted shares have been from the probabilities expected, in this
                     context; empty where none are
    joules           used by the whole device, the prompt included; None where nothing measures it
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    queue_s: float = 0.0
    first_token_s: float = 0.0
    generation_s: float = 0.0
    verified: Counter[tuple[int, int]] = field(default_factory=Counter)
    plain_rounds: int = 0
    settled: int = 0
    settled_s: float = 0.0
    calibration_error: tuple[float, ...] = ()
    joules: float | None = None

    def add_round(self, stats: RoundStats) -> None:
        """Count one round of the decode loop."""
        self.settled += stats.settled
        self.settled_s += stats.settled_s
        if stats.kind is RoundKind.VERIFY:
            self.verified[stats.size - 1, stats.num_accepted] += 1
        elif stats.kind is RoundKind.PLAIN:
            self.plain_rounds += 1

    @property
    def tree_rounds(self) -> int:
        return sum(self.verified.values())

    @property
    def drafted(self) -> int:
        return sum(drafted * rounds for (drafted, _), rounds in self.verified.items())

    @property
    def accepted(self) -> int:
        return sum(accepted * rounds for (_, accepted), rounds in self.verified.items())

    @property
    def tokens_a_round(self) -> float:
        """Over all rounds, plain ones too; 1 before the first."""
        rounds = self.tree_rounds + self.plain_rounds
        return 1.0 + self.accepted / rounds if rounds else 1.0

    @property
    def acceptance_length(self) -> float:
        """tau: tokens of a round that verified a tree, bonus included; 1 before the first."""
        return 1.0 + self.accepted / self.tree_rounds if self.tree_rounds else 1.0

    @property
    def joules_per_token(self) -> float | None:
        """Energy of the whole answer, prompt included, over its tokens."""
        if self.joules is None or not self.completion_tokens:
            return None
        return self.joules / self.completion_tokens

    @property
    def tokens_per_s(self) -> float:
        """Decoding speed without the first token, which belongs to the prefill; 0 when there is no other."""
        rest = self.completion_tokens - 1
        return rest / self.generation_s if rest > 0 and self.generation_s > 0 else 0.0


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A chosen token's log-probability under the target, and the likeliest alternatives at its place."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class AnswerStart:
    """The prompt is ready to run: its size, how much of it is cached, and how many messages were left out."""

    prompt_tokens: int
    cached_tokens: int
    num_dropped: int


@dataclass(frozen=True, slots=True)
class PromptRead:
    """Part of a long prompt was run: tokens done, cached ones included."""

    num_tokens: int


@dataclass(frozen=True, slots=True)
class AnswerPiece:
    """More text; `logprobs` of the tokens read since the last piece, when asked for."""

    text: str
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class AnswerEnd:
    """The last event of every answer that did not fail."""

    reason: FinishReason
    figures: Figures
    num_dropped: int = 0


AnswerEvent: TypeAlias = AnswerStart | PromptRead | AnswerPiece | AnswerEnd
