"""Messages -> prompt tokens, such that a conversation that goes on keeps the tokens it already has.

A model may write a word in other tokens than the tokenizer would. Reading its answer back as text would
change those tokens, and with them everything the KV cache holds behind them. So answers are remembered as
tokens, and where a new prompt repeats one, its own tokens are used.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace

from starsd_edge.text.template import ChatTemplate, Message
from starsd_edge.text.tokenizer import Place, Tokenizer

__all__ = ["Prompt", "PromptWriter"]

REMEMBERED_ANSWERS = 64  # about as many turns as fit a context; an answer is a few KB


@dataclass(frozen=True, slots=True)
class Prompt:
    """What the model reads: the template's text, and its tokens."""

    text: str
    tokens: tuple[int, ...]


class PromptWriter:
    """Writes the prompts of one model.

    first_token  text of the token that every prompt begins with, put there where the template does not; ""
                 for models without one
    """

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate, first_token: str = "") -> None:
        self._first_token = first_token
        self.tokenizer = tokenizer
        self._template = template
        # text up to the end of an answer -> its tokens
        self._answers: OrderedDict[str, tuple[int, ...]] = OrderedDict()

    def write(self, messages: Sequence[Message], *, add_generation_prompt: bool = True) -> Prompt:
        """The prompt for `messages`. Control tokens in their contents are read as plain letters.

        Raises UsageError when the template refuses the messages.
        """
        safe = [replace(message, content=self.tokenizer.neutralise(message.content)) for message in messages]
        text = self._template.render(safe, add_generation_prompt=add_generation_prompt)
        if not text.startswith(self._first_token):
            text = self._first_token + text
        known = self._longest_known(text)
        if known is None:
            return Prompt(text, tuple(self.tokenizer.encode(text)))
        start = self._answers[known]
        rest = self.tokenizer.encode(text[len(known) :], Place.MIDDLE)
        return Prompt(text, (*start, *rest))

    def remember(self, prompt: Prompt, answer_tokens: Sequence[int]) -> None:
        """The model answered `prompt` with `answer_tokens` (less the stop token)."""
        answer = self.tokenizer.neutralise(self.tokenizer.decode(answer_tokens))
        tokens = (*prompt.tokens, *answer_tokens)
        # Templates put the answer right behind the prompt, or (Vicuna) behind the space of its first token.
        for text in (prompt.text + answer, prompt.text + " " + answer):
            self._answers[text] = tokens
            self._answers.move_to_end(text)
        while len(self._answers) > 2 * REMEMBERED_ANSWERS:
            self._answers.popitem(last=False)

    def _longest_known(self, text: str) -> str | None:
        """The longest remembered beginning of `text` that ends where a control token follows."""
        known = (
            start
            for start in self._answers
            if text.startswith(start) and self.tokenizer.starts_with_special(text[len(start) :])
        )
        return max(known, key=len, default=None)
