"""The context window: which turns of a conversation a prompt holds.

The rule. A prompt must leave `reserve` tokens for the answer. When it does not, the oldest turns (a user's
message and what answered it) are left out, a quarter of the window at a time: the first turns are dropped up
to a quarter, then up to half, and so on, until the rest fits. The system message and the last user's message
always stay. Dropping in quarters, measured from the start of the conversation, keeps the beginning of the
prompt the same for many turns, so that the KV cache stays of use; and the same conversation always gives the
same prompt, whoever sends it.

A stranger may send it, so the work is bounded: no message is counted beyond a window's worth, what
cannot fit by count is not written, and the first block that fits is found by halving.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from starsd_edge.chat.settings import FullWindow
from starsd_edge.errors import UsageError
from starsd_edge.text.length import Length, count_tokens
from starsd_edge.text.prompt import Prompt, PromptWriter
from starsd_edge.text.template import Message, Role

__all__ = ["FittedPrompt", "fit_window"]

BLOCKS = 4  # turns are dropped by a quarter of the window
MESSAGE_OVERHEAD_TOKENS = 6  # about what a template puts around a message; only places the block borders
MIN_RESERVE_TOKENS = 16  # an answer shorter than this is no answer
RESERVE_SHARE = 8  # unless told, an eighth of the window is kept for the answer
SHORT_CHARS = 8  # for each token of the window: up to this, writing a prompt is less work than counting first


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
    cancelled: Callable[[], bool] = lambda: False,
) -> FittedPrompt | None:
    """The prompt for `messages` in a context of `max_len` tokens; None once `cancelled` says so.

    max_tokens  what the answer may take; what is kept free for it is this or an eighth of the window,
                whichever is less

    Raises UsageError when the last message alone does not fit, or when turns would have to go and the rule
    is to refuse.
    """
    reserve = max(MIN_RESERVE_TOKENS, max_len // RESERVE_SHARE)
    if max_tokens is not None:
        reserve = min(reserve, max_tokens)
    room = max_len - reserve
    taken: int | None = None  # by what was written last
    if sum(len(message.content) + 1 for message in messages) <= SHORT_CHARS * max_len:
        prompt = writer.write(messages)
        taken = len(prompt.tokens)
        if taken <= room:
            return FittedPrompt(prompt, 0)
    head = [message for message in messages[:1] if message.role is Role.SYSTEM]
    said = messages[len(head) :]
    lengths = [
        count_tokens(writer.tokenizer, message.content, max_len, cancelled=cancelled) for message in messages
    ]
    starts = [0] if rule is FullWindow.REFUSE else _block_starts(said, lengths[len(head) :], max_len)
    if taken is not None:
        starts = starts[1:]  # the whole of it does not fit
    least = _least_from(lengths)
    least_of_head = least[0] - least[len(head)]
    found: FittedPrompt | None = None
    low, high = 0, len(starts)
    while low < high and not cancelled():
        middle = (low + high) // 2
        start = starts[middle]
        taken = None
        if least_of_head + least[len(head) + start] <= room:
            prompt = writer.write([*head, *said[start:]])
            taken = len(prompt.tokens)
        if taken is not None and taken <= room:
            found, high = FittedPrompt(prompt, start), middle
        else:
            low = middle + 1
    if cancelled():
        return None
    if found is not None:
        return found
    tokens = f"more than {room}" if taken is None else str(taken)
    if rule is FullWindow.REFUSE:
        raise UsageError(
            f"the conversation takes {tokens} tokens and the context holds {max_len}, {reserve} "
            "of them kept for the answer: start afresh, or let the oldest turns go (full_window drop-oldest)"
        )
    raise UsageError(
        f"this message takes {tokens} tokens; the context holds {max_len}, {reserve} of them "
        "kept for the answer: shorten it or split it"
    )


def _least_from(lengths: Sequence[Length]) -> list[int]:
    """For every message, and for the end, what it and those behind it take at the least."""
    least = [0] * (len(lengths) + 1)
    for i in reversed(range(len(lengths))):
        least[i] = least[i + 1] + lengths[i].least
    return least


def _block_starts(messages: Sequence[Message], lengths: Sequence[Length], max_len: int) -> list[int]:
    """Where a prompt may begin: the first turn, the first behind each quarter of the window, and the last."""
    starts = [0]
    taken, blocks, last = 0, 1, 0
    for i, (message, length) in enumerate(zip(messages, lengths, strict=True)):
        if message.role is Role.USER:
            last = i
            if i > 0 and taken * BLOCKS >= max_len * blocks:
                starts.append(i)
                blocks = taken * BLOCKS // max_len + 1
        taken += length.count + MESSAGE_OVERHEAD_TOKENS
    if last != starts[-1]:
        starts.append(last)
    return starts
