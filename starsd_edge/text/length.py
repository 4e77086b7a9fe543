"""How long a text is in tokens, found out with no more work than the answer is worth.

A tokenizer takes seconds for a megabyte; whether a text fits a context is known after a context of it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from starsd_edge.text.tokenizer import Tokenizer

__all__ = ["Length", "count_tokens"]

PIECE_CHARS = 8192  # counted at a time: a few milliseconds, so that a count can be given up
# What one border costs at most, of a piece or of a text inside a template: a word that is cut in two, a space
# that a tokenizer puts in front of a beginning.
BORDER_TOKENS = 2


@dataclass(frozen=True, slots=True)
class Length:
    """count  about how many tokens a text is; `least`, what it takes at the least wherever it stands."""

    count: int
    least: int


def count_tokens(
    tokenizer: Tokenizer, text: str, limit: int, *, cancelled: Callable[[], bool] = lambda: False
) -> Length:
    """The length of `text`, counted until it surely exceeds `limit`, or until cancelled."""
    count, borders = 0, BORDER_TOKENS
    for start in range(0, len(text), PIECE_CHARS):
        if count - borders > limit or cancelled():
            break
        piece = text[start : start + PIECE_CHARS]
        count += len(tokenizer.encode(tokenizer.neutralise(piece)))
        borders += BORDER_TOKENS
    return Length(count, max(0, count - borders))
