"""Events of an answer to OpenAI's bodies: whole, or chunk by chunk. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import msgspec

from starsd_edge.chat.answer import AnswerEnd, AnswerPiece, FinishReason, TokenLogprob
from starsd_edge.endpoint.figures import metrics_of, timings_of, usage_of
from starsd_edge.endpoint.openai import (
    ChatChoice,
    ChatChunk,
    ChatResponse,
    ChunkChoice,
    CompletionChoice,
    CompletionResponse,
    Delta,
    LogprobEntry,
    Logprobs,
    OutMessage,
    TextLogprobs,
)
from starsd_edge.text.tokenizer import Tokenizer

__all__ = ["DONE", "AnswerBody", "ChatBody", "CompletionBody", "Reply", "sse"]

DONE = b"data: [DONE]\n\n"
# What a client is told of an answer that its own disconnect ended: nobody reads it.
FINISH_WORDS = {
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.CANCELLED: "stop",
}


@dataclass(frozen=True, slots=True)
class Reply:
    """What all bodies of one answer carry. `wants_usage` asks for the chunk of figures."""

    id: str
    created: int
    model: str
    wants_usage: bool


class AnswerBody(Protocol):
    """How one kind of request is answered."""

    def opening(self) -> list[bytes]:
        """Chunks before any text."""
        ...

    def chunk(self, piece: AnswerPiece) -> list[bytes]: ...

    def closing(self, end: AnswerEnd) -> list[bytes]:
        """The last chunks, [DONE] excluded."""
        ...

    def whole(self, pieces: list[AnswerPiece], end: AnswerEnd) -> bytes: ...


class ChatBody:
    """/v1/chat/completions."""

    def __init__(self, reply: Reply, tokenizer: Tokenizer) -> None:
        self._reply = reply
        self._tokenizer = tokenizer

    def opening(self) -> list[bytes]:
        return [self._chunk(ChunkChoice(Delta(role="assistant", content="")))]

    def chunk(self, piece: AnswerPiece) -> list[bytes]:
        return [self._chunk(ChunkChoice(Delta(content=piece.text), logprobs=self._logprobs([piece])))]

    def closing(self, end: AnswerEnd) -> list[bytes]:
        chunks = [self._chunk(ChunkChoice(Delta(), finish_reason=FINISH_WORDS[end.reason]))]
        if self._reply.wants_usage:
            reply = self._reply
            figures = ChatChunk(
                reply.id,
                reply.created,
                reply.model,
                [],
                usage_of(end.figures),
                metrics_of(end.figures),
                timings_of(end.figures),
                end.num_dropped,
            )
            chunks.append(sse(figures))
        return chunks

    def whole(self, pieces: list[AnswerPiece], end: AnswerEnd) -> bytes:
        reply = self._reply
        text = "".join(piece.text for piece in pieces)
        choice = ChatChoice(OutMessage(text), FINISH_WORDS[end.reason], self._logprobs(pieces))
        return msgspec.json.encode(
            ChatResponse(
                reply.id,
                reply.created,
                reply.model,
                [choice],
                usage_of(end.figures),
                metrics_of(end.figures),
                timings_of(end.figures),
                end.num_dropped,
            )
        )

    def _chunk(self, choice: ChunkChoice) -> bytes:
        reply = self._reply
        usage = None if reply.wants_usage else msgspec.UNSET
        return sse(ChatChunk(reply.id, reply.created, reply.model, [choice], usage))

    def _logprobs(self, pieces: list[AnswerPiece]) -> Logprobs | None:
        entries = [entry for piece in pieces for entry in piece.logprobs]
        if not entries:
            return None
        return Logprobs([self._entry(entry) for entry in entries])

    def _entry(self, found: TokenLogprob) -> LogprobEntry:
        top = [_one_entry(self._tokenizer, token, logprob) for token, logprob in found.top]
        entry = _one_entry(self._tokenizer, found.token, found.logprob)
        entry.top_logprobs = top
        return entry


class CompletionBody:
    """/v1/completions."""

    def __init__(self, reply: Reply, tokenizer: Tokenizer) -> None:
        self._reply = reply
        self._tokenizer = tokenizer
        self._offset = 0  # characters of text handed out

    def opening(self) -> list[bytes]:
        return []

    def chunk(self, piece: AnswerPiece) -> list[bytes]:
        choice = CompletionChoice(piece.text, logprobs=self._logprobs([piece]))
        return [sse(self._response(choice, None if self._reply.wants_usage else msgspec.UNSET))]

    def closing(self, end: AnswerEnd) -> list[bytes]:
        choice = CompletionChoice("", FINISH_WORDS[end.reason])
        chunks = [sse(self._response(choice, None if self._reply.wants_usage else msgspec.UNSET))]
        if self._reply.wants_usage:
            figures = self._response(choice, msgspec.UNSET)
            figures.choices = []
            chunks.append(sse(_with_figures(figures, end)))
        return chunks

    def whole(self, pieces: list[AnswerPiece], end: AnswerEnd) -> bytes:
        text = "".join(piece.text for piece in pieces)
        choice = CompletionChoice(text, FINISH_WORDS[end.reason], self._logprobs(pieces))
        return msgspec.json.encode(_with_figures(self._response(choice, msgspec.UNSET), end))

    def _response(self, choice: CompletionChoice, usage: msgspec.UnsetType | None) -> CompletionResponse:
        reply = self._reply
        return CompletionResponse(reply.id, reply.created, reply.model, [choice], usage)

    def _logprobs(self, pieces: list[AnswerPiece]) -> TextLogprobs | None:
        entries = [entry for piece in pieces for entry in piece.logprobs]
        if not entries:
            return None
        result = TextLogprobs([], [], [], [])
        for entry in entries:
            text = _token_text(self._tokenizer, entry.token)
            result.tokens.append(text)
            result.token_logprobs.append(entry.logprob)
            result.top_logprobs.append({_token_text(self._tokenizer, t): value for t, value in entry.top})
            result.text_offset.append(self._offset)
            self._offset += len(text)
        return result


def sse(body: msgspec.Struct) -> bytes:
    """One server-sent event."""
    return b"data: " + msgspec.json.encode(body) + b"\n\n"


def _with_figures(response: CompletionResponse, end: AnswerEnd) -> CompletionResponse:
    response.usage = usage_of(end.figures)
    response.metrics = metrics_of(end.figures)
    response.timings = timings_of(end.figures)
    return response


def _one_entry(tokenizer: Tokenizer, token: int, logprob: float) -> LogprobEntry:
    return LogprobEntry(_token_text(tokenizer, token), logprob, list(tokenizer.token_bytes(token)))


def _token_text(tokenizer: Tokenizer, token: int) -> str:
    return tokenizer.token_bytes(token).decode("utf-8", "replace")
