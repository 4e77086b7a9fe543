"""The texts a head learns from, written or read by the target itself.

A head must guess what *this* target says next, so its own answers teach best. It writes the questions, too:
the chat template is cut off where the user speaks and the target goes on from there, which gives prompts of
the kind it was trained on without any data set. Text that is only read costs far less per token (a prefill
instead of one forward a token) and helps where the head should know a domain.

Every forward gives the features along with the logits, so nothing is computed twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from starsd_edge.decoding.roles import Target
from starsd_edge.decoding.sampling import SamplingParams, pick
from starsd_edge.decoding.tree import DraftTree
from starsd_edge.errors import BundleError
from starsd_edge.text.prompt import PromptWriter
from starsd_edge.text.template import Message, Role
from starsd_edge.types import FeatureArray, Float32Array, TokenArray
from starsd_server.train.store import CorpusWriter
from starsd_server.train.texts import KnownText

__all__ = ["ChatWriter", "read_text"]

# Questions are drawn warm for variety, answers the way people run small models: greedily, or slightly warm.
QUESTION = SamplingParams(temperature=1.0, top_p=0.95)
WARM_ANSWER = SamplingParams(temperature=0.7, top_p=0.95)
MAX_QUESTION_TOKENS = 64
# A user's message that no tokenizer or template changes, to find where the template lets the user speak.
PLACEHOLDER = "STARSD-PLACEHOLDER"
# What stands for a question of no words, so that every number gives a chat.
NOTHING_ASKED = "Hello."


@dataclass(frozen=True, slots=True)
class _Written:
    tokens: TokenArray  # [n]
    features: FeatureArray  # [n, F]


class ChatWriter:
    """Lets one target talk to itself. Chat number i is the same on every run.

    Raises BundleError when the template does not show where the user speaks.
    """

    def __init__(
        self, target: Target, prompts: PromptWriter, stop_tokens: Sequence[int], max_answer_tokens: int
    ) -> None:
        self._target, self._prompts = target, prompts
        self._stop, self._max_answer = frozenset(stop_tokens), max_answer_tokens
        text = prompts.write([Message(Role.USER, PLACEHOLDER)], add_generation_prompt=False).text
        before, found, _ = text.partition(PLACEHOLDER)
        if not found:
            raise BundleError("the model's chat template does not show the user's message; train on --text")
        self._opening = np.array(prompts.tokenizer.encode(before), np.int32)

    def write(self, number: int, corpus: CorpusWriter) -> None:
        """One question and its answer; even numbers are answered greedily."""
        greedy = number % 2 == 0
        question = self._continue(self._opening, QUESTION, number, MAX_QUESTION_TOKENS)
        ids = [int(token) for token in question.tokens[len(self._opening) :] if int(token) not in self._stop]
        message = self._prompts.tokenizer.decode(ids).strip() or NOTHING_ASKED
        prompt = np.array(self._prompts.write([Message(Role.USER, message)]).tokens, np.int32)
        answer = self._continue(prompt, SamplingParams() if greedy else WARM_ANSWER, number, self._max_answer)
        corpus.append(answer.tokens, answer.features, len(prompt), greedy=greedy)

    def _continue(self, prompt: TokenArray, params: SamplingParams, seed: int, limit: int) -> _Written:
        """`prompt` and up to `limit` tokens after it, all with their features; ends behind a stop token."""
        params = SamplingParams(temperature=params.temperature, top_p=params.top_p, seed=seed)
        target, tokens = self._target, prompt.tolist()
        target.truncate(0)
        output = target.prefill(prompt)
        rows = [output.features]
        for _ in range(limit):
            token = _pick(output.logits[-1], params, tokens)
            if target.max_tree_size() < 1:
                break
            tokens.append(token)
            output = target.forward(DraftTree.root_only(token, len(tokens)))
            target.keep([0])
            rows.append(output.features)
            if token in self._stop:
                break
        return _Written(np.array(tokens, np.int32), np.concatenate(rows))


def _pick(logits: Float32Array, params: SamplingParams, tokens: list[int]) -> int:
    return pick(logits, params, len(tokens), tokens).token


def read_text(target: Target, text: KnownText, corpus: CorpusWriter) -> None:
    """Run a text that exists through the target."""
    target.truncate(0)
    corpus.append(text.tokens, target.prefill(text.tokens).features, text.start, greedy=text.greedy)
