"""The model in this process: messages in, text out.

The way of an answer: the messages become a prompt that fits the window, the prompt's new part is run in
pieces (so that it can be stopped), then every round's tokens become text, less what a stop string cuts off.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from starsd_edge.chat.answer import (
    AnswerEnd,
    AnswerEvent,
    AnswerPiece,
    AnswerStart,
    Figures,
    FinishReason,
    PromptRead,
)
from starsd_edge.chat.contexts import Context, ContextPool, Pair
from starsd_edge.chat.settings import ChatSettings
from starsd_edge.chat.status import LinkState, LinkStatus
from starsd_edge.chat.window import FittedPrompt, fit_window
from starsd_edge.decoding.decoder import Committed
from starsd_edge.decoding.decoder import FinishReason as Finish
from starsd_edge.errors import UsageError
from starsd_edge.text.detokenize import Detokenizer
from starsd_edge.text.length import count_tokens
from starsd_edge.text.prompt import Prompt, PromptWriter
from starsd_edge.text.stop import StopFilter
from starsd_edge.text.template import Message

__all__ = ["Model", "Speaker"]

# Rows of a prompt run at a time. Between pieces the answer can be stopped and progress shown; a piece costs
# one row more than it has.
PROMPT_PIECE = 512


@dataclass(frozen=True, slots=True)
class Model:
    """What a bundle says of a model, as far as text goes.

    max_len      tokens a context holds
    stop_tokens  ids that end an answer; never shown
    service      address of the draft service, for the status line; "" when there is none
    """

    name: str
    writer: PromptWriter
    max_len: int
    stop_tokens: frozenset[int]
    service: str = ""


class Speaker:
    """A `Backend` over targets in this process. One answer at a time; `cancel` from anywhere.

    joules    energy this device has used so far; None where nothing measures it
    on_close  ends what watches the speaker, before its contexts go
    """

    def __init__(
        self,
        model: Model,
        open_pair: Callable[[], Pair],
        *,
        max_contexts: int = 1,
        clock: Callable[[], float] = time.monotonic,
        joules: Callable[[], float | None] = lambda: None,
        on_close: Callable[[], None] = lambda: None,
    ) -> None:
        self._model = model
        self._joules, self._on_close = joules, on_close
        self._clock = clock
        self._contexts = ContextPool(open_pair, max_contexts, clock)
        self._cancelled = threading.Event()
        self._drafting = True

    @property
    def model(self) -> str:
        return self._model.name

    @property
    def contexts(self) -> list[Context]:
        """The contexts that are open; whoever looks changes nothing."""
        return self._contexts.opened

    @property
    def max_len(self) -> int:
        return self._model.max_len

    @property
    def writer(self) -> PromptWriter:
        return self._model.writer

    def answer(self, messages: Sequence[Message], settings: ChatSettings) -> Iterator[AnswerEvent]:
        """See `Backend.answer`."""
        self._cancelled.clear()
        fitted = fit_window(
            self.writer,
            messages,
            self.max_len,
            max_tokens=settings.max_tokens,
            rule=settings.full_window,
            cancelled=self._cancelled.is_set,
        )
        if fitted is None:
            return _nothing_said()
        return self._answer(fitted, settings)

    def answer_text(self, text: str, settings: ChatSettings) -> Iterator[AnswerEvent]:
        """Continue raw text, in which control tokens are read as such. Raises UsageError like the next."""
        self._cancelled.clear()
        tokenizer = self.writer.tokenizer
        length = count_tokens(tokenizer, text, self.max_len, cancelled=self._cancelled.is_set)
        if self._cancelled.is_set():
            return _nothing_said()
        if length.least >= self.max_len:
            raise _too_long(f"more than {self.max_len}", self.max_len)
        return self._answer_tokens(tokenizer.encode_document(text), settings)

    def answer_tokens(self, tokens: Sequence[int], settings: ChatSettings) -> Iterator[AnswerEvent]:
        """Continue tokens. Raises UsageError when they leave no room for an answer."""
        self._cancelled.clear()
        return self._answer_tokens(tokens, settings)

    def cancel(self) -> None:
        self._cancelled.set()

    def link(self) -> LinkStatus:
        context = self._contexts.newest
        verified = context.switch.verified_of_late
        if context.drafter is None:
            return LinkStatus(LinkState.NONE, local=bool(verified))
        state = context.drafter.state()
        if not self._drafting:
            kind = LinkState.OFF
        elif not context.verifies_trees:
            kind = LinkState.INEXACT
        elif not state.ready:
            kind = LinkState.BLOCKED if state.blocked else LinkState.LOST
        else:
            kind = _LINKED[verified]
        local = kind in (LinkState.LOST, LinkState.BLOCKED) and bool(verified)
        return LinkStatus(kind, self._model.service, state.reason, state.expected_wait_s, local)

    def close(self) -> None:
        self._on_close()
        self._contexts.close()

    def _answer_tokens(self, tokens: Sequence[int], settings: ChatSettings) -> Iterator[AnswerEvent]:
        if len(tokens) >= self.max_len:
            raise _too_long(str(len(tokens)), self.max_len)
        return self._answer(FittedPrompt(Prompt("", tuple(tokens)), 0), settings)

    def _answer(self, fitted: FittedPrompt, settings: ChatSettings) -> Iterator[AnswerEvent]:
        self._drafting = settings.draft
        prompt = np.array(fitted.prompt.tokens, np.int32)
        context = self._contexts.choose(prompt)
        context.switch.drafting = settings.draft
        figures = Figures(
            prompt_tokens=len(prompt),
            cached_tokens=min(max(context.shared(prompt) - 1, 0), context.recorder.kv_len),
        )
        yield AnswerStart(figures.prompt_tokens, figures.cached_tokens, fitted.num_dropped)
        started_s, joules_before = self._clock(), self._joules()
        for read in self._read_prompt(context, prompt.tolist(), settings):
            yield PromptRead(read)
        room = self.max_len - len(prompt)
        reason = FinishReason.CANCELLED
        reading = _Reading(self._model, settings, figures)
        if not self._cancelled.is_set():
            for committed in context.decoder.generate(
                prompt,
                settings.sampling,
                min(settings.max_tokens or room, room),
                self._model.stop_tokens,
            ):
                now_s = self._clock()
                if figures.completion_tokens == 0:
                    figures.first_token_s = now_s - started_s
                figures.generation_s = now_s - started_s - figures.first_token_s
                piece = reading.take(committed, context)
                if piece is not None:
                    yield piece
                if reading.is_stopped:
                    reason = FinishReason.STOP
                    break
                if committed.finish is not None:
                    reason = _REASONS[committed.finish]
                    break
                if self._cancelled.is_set():
                    break
        if reason is FinishReason.CANCELLED or reading.is_stopped:
            context.decoder.abandon()
        joules = self._joules()
        if joules is not None and joules_before is not None:
            figures.joules = joules - joules_before
        figures.calibration_error = tuple(context.switch.calibration_error())
        rest = reading.finish()
        if rest is not None:
            yield rest
        if fitted.prompt.text and not reading.is_stopped:
            self.writer.remember(fitted.prompt, reading.tokens)
        yield AnswerEnd(reason, figures, fitted.num_dropped)

    def _read_prompt(self, context: Context, prompt: list[int], settings: ChatSettings) -> Iterator[int]:
        """Run a long prompt piece by piece, up to the last piece; yields tokens done."""
        done = max(context.shared(np.array(prompt, np.int32)) - 1, 0)
        while len(prompt) - done > PROMPT_PIECE and not self._cancelled.is_set():
            done += PROMPT_PIECE
            for _ in context.decoder.generate(prompt[:done], settings.sampling, 1):
                yield done


def _nothing_said() -> Iterator[AnswerEvent]:
    """The answer that was given up while its prompt was written."""
    return iter([AnswerEnd(FinishReason.CANCELLED, Figures())])


def _too_long(tokens: str, max_len: int) -> UsageError:
    return UsageError(f"the prompt takes {tokens} tokens and the context holds {max_len}: shorten it")


# By whether the last rounds verified trees.
_LINKED = {None: LinkState.CONNECTED, True: LinkState.READY, False: LinkState.UNUSED}
_REASONS = {
    Finish.STOP: FinishReason.STOP,
    Finish.LENGTH: FinishReason.LENGTH,
    Finish.CONTEXT_FULL: FinishReason.LENGTH,
}


class _Reading:
    """Tokens of one answer on their way to text."""

    def __init__(self, model: Model, settings: ChatSettings, figures: Figures) -> None:
        self._model = model
        self._settings = settings
        self._figures = figures
        self._detokenizer = Detokenizer(model.writer.tokenizer)
        self._stops = StopFilter(settings.stop)
        self.tokens: list[int] = []  # less the stop token

    @property
    def is_stopped(self) -> bool:
        """Whether a stop string was reached."""
        return self._stops.matched is not None

    def take(self, committed: Committed, context: Context) -> AnswerPiece | None:
        """The text a round adds, if it adds any."""
        self._figures.add_round(committed.stats)
        self._figures.completion_tokens += len(committed.tokens)
        said = committed.tokens
        if said[-1] in self._model.stop_tokens:
            said = said[:-1]
        self.tokens += said
        text = self._stops.push(self._detokenizer.push(said))
        num_top = self._settings.logprobs
        logprobs = context.recorder.logprobs(said, num_top) if num_top is not None else ()
        return AnswerPiece(text, logprobs) if text or logprobs else None

    def finish(self) -> AnswerPiece | None:
        """What was kept back."""
        if self.is_stopped:
            return None
        text = self._stops.push(self._detokenizer.flush()) + self._stops.flush()
        return AnswerPiece(text) if text else None
