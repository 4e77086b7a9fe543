"""The context window: which turns of a conversation a prompt holds.

The rule. A prompt must leave `reserve` tokens for the answer. When it does not, the oldest turns (a user's
message and what answered it) are left out, a quarter of the window at a time: the first turns are dropped up
to a quarter, then up to half, and so on, until the rest fits. The system message and the last user's message
always stay. Dropping in quarters, measured from the start of the conversation, keeps the beginning of the
prompt the same for many turns, so that the KV cache stays of use; and the same conversation always gives the
same prompt, whoever sends it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from starsd_edge.chat.settings import FullWindow
from starsd_edge.errors import UsageError
from starsd_edge.text.prompt import Prompt, PromptWriter
from starsd_edge.text.template import Message, Role

__all__ = ["FittedPrompt", "fit_window"]

BLOCKS = 4  # turns are dropped by a quarter of the window
MESSAGE_OVERHEAD_TOKENS = 6  # about what a template puts around a message; only places the block borders
MIN_RESERVE_TOKENS = 16  # an answer shorter than this is no answer
RESERVE_SHARE = 8  # unless told, an eighth of the window is kept for the answer


@dataclass(frozen=True, slots=True)
class FittedPrompt:
    """A prompt that fits, and how many messages at the start of the conversation it leaves out."""

    prompt: Prompt
    num_dropped: int


def fit_window(
    writer: PromptWriter,
    messages: Sequence[Message],
    max_len: int,
    *,
    max_tokens: int | None,
    rule: FullWindow,
) -> FittedPrompt:
    """The prompt for `messages` in a context of `max_len` tokens.

    max_tokens  what the answer may take; what is kept free for it is this or an eighth of the window,
                whichever is less

    Raises UsageError when the last message alone does not fit, or when turns would have to go and the rule
    is to refuse.
    """
    reserve = max(MIN_RESERVE_TOKENS, max_len // RESERVE_SHARE)
    if max_tokens is not None:
        reserve = min(reserve, max_tokens)
    room = max_len - reserve
    prompt = writer.write(messages)
    if len(prompt.tokens) <= room:
        return FittedPrompt(prompt, 0)
    if rule is FullWindow.REFUSE:
        raise UsageError(
            f"the conversation takes {len(prompt.tokens)} tokens and the context holds {max_len}, {reserve} "
            "of them kept for the answer: start afresh, or let the oldest turns go (full_window drop-oldest)"
        )
    head = [message for message in messages[:1] if message.role is Role.SYSTEM]
    for start in _block_starts(writer, messages[len(head) :], max_len):
        prompt = writer.write([*head, *messages[len(head) + start :]])
        if len(prompt.tokens) <= room:
            return FittedPrompt(prompt, start)
    raise UsageError(
        f"this message takes {len(prompt.tokens)} tokens; the context holds {max_len}, {reserve} of them "
        "kept for the answer: shorten it or split it"
    )


def _block_starts(writer: PromptWriter, messages: Sequence[Message], max_len: int) -> list[int]:
    """Where a prompt may begin: the first turn behind each quarter of the window, and the last turn."""
    tokenizer = writer.tokenizer
    turns = [i for i, message in enumerate(messages) if message.role is Role.USER]
    if not turns:
        return []
    starts: list[int] = []
    taken, blocks = 0, 1
    for i, message in enumerate(messages):
        if i in turns and i > 0 and taken * BLOCKS >= max_len * blocks:
            starts.append(i)
            blocks = taken * BLOCKS // max_len + 1
        taken += len(tokenizer.encode(tokenizer.neutralise(message.content))) + MESSAGE_OVERHEAD_TOKENS
    if turns[-1] not in starts:
        starts.append(turns[-1])
    return starts
