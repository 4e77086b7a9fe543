"""How long a text is in tokens, found out with no more work than the answer is worth.

A tokenizer takes seconds for a megabyte; whether a text fits a context is known after a context of it.
"""

from __future__ import annotations

from collections.abc import Callable

from starsd_edge.text.tokenizer import Tokenizer

__all__ = ["count_tokens", "least_tokens"]

PIECE_CHARS = 8192  # counted at a time: a few milliseconds, so that a count can be given up
# What one border costs at most, of a piece or of a text inside a template: a word that is cut in two, a space
# that a tokenizer puts in front of a beginning.
BORDER_TOKENS = 2


def count_tokens(
    tokenizer: Tokenizer, text: str, limit: int, *, cancelled: Callable[[], bool] = lambda: False
) -> int:
    """About how many tokens the letters of `text` are; counting ends beyond `limit`, or when cancelled."""
    count = 0
    for start in range(0, len(text), PIECE_CHARS):
        if count > limit or cancelled():
            break
        piece = text[start : start + PIECE_CHARS]
        count += len(tokenizer.encode(tokenizer.neutralise(piece)))
    return count


def least_tokens(text: str, count: int) -> int:
    """What `text`, counted as `count`, takes at the least wherever it stands."""
    return max(0, count - BORDER_TOKENS * (1 + len(text) // PIECE_CHARS))
