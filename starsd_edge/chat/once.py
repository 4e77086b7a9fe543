"""One question, one answer, no terminal: pipes and scripts."""

from __future__ import annotations

from typing import TextIO

import msgspec

from starsd_edge.chat.answer import AnswerEnd, AnswerPiece, FinishReason
from starsd_edge.chat.conversation import Conversation
from starsd_edge.chat.keyboard import interrupts_stop
from starsd_edge.chat.status import link_words

__all__ = ["AnswerReport", "answer_once"]


class AnswerReport(msgspec.Struct):
    """What --json prints."""

    answer: str
    finish_reason: str
    model: str
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    first_token_ms: float
    tokens_per_s: float
    rounds: int
    plain_rounds: int
    draft_tokens: int
    accepted_tokens: int
    tokens_a_round: float  # plain rounds counted
    acceptance_length: float  # of rounds that verified a tree, bonus included
    joules: float | None  # of the whole device; None where its board reports no power
    link: str


def answer_once(conversation: Conversation, question: str, out: TextIO, *, as_json: bool) -> FinishReason:
    """Answer `question` to `out`: the plain text as it comes, or one JSON object at the end.

    Raises StarSDError when there is no answer.
    """
    said = ""
    with interrupts_stop(conversation.backend) as interrupts:
        for event in conversation.ask(question):
            interrupts.insist()
            if isinstance(event, AnswerPiece):
                said += event.text
                if not as_json:
                    out.write(event.text)
                    out.flush()
            elif isinstance(event, AnswerEnd):
                end = event
    if as_json:
        out.write(msgspec.json.encode(_report(conversation, said, end)).decode() + "\n")
    elif not said.endswith("\n"):
        out.write("\n")
    out.flush()
    return end.reason


def _report(conversation: Conversation, said: str, end: AnswerEnd) -> AnswerReport:
    figures = end.figures
    return AnswerReport(
        answer=said,
        finish_reason=end.reason.value,
        model=conversation.backend.model,
        prompt_tokens=figures.prompt_tokens,
        cached_tokens=figures.cached_tokens,
        completion_tokens=figures.completion_tokens,
        first_token_ms=figures.first_token_s * 1e3,
        tokens_per_s=figures.tokens_per_s,
        rounds=figures.tree_rounds + figures.plain_rounds,
        plain_rounds=figures.plain_rounds,
        draft_tokens=figures.drafted,
        accepted_tokens=figures.accepted,
        tokens_a_round=figures.tokens_a_round,
        acceptance_length=figures.acceptance_length,
        joules=figures.joules,
        link=link_words(conversation.link()),
    )
