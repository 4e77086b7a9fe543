"""Tokens arrive one by one, characters do not end where tokens end: hand out text as soon as it is certain.

Whatever the split, the pieces add up to `Tokenizer.decode` of all tokens.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable

from starsd_edge.text.tokenizer import Tokenizer

__all__ = ["Detokenizer"]


class Detokenizer:
    """Incremental `Tokenizer.decode`; one object per answer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._at_start = tokenizer.strips_first_space

    def push(self, tokens: Iterable[int]) -> str:
        """The text that became certain; bytes of an unfinished character are kept back."""
        special = self._tokenizer.special_ids
        data = b"".join(self._tokenizer.token_bytes(token) for token in tokens if token not in special)
        if self._at_start and data:
            data = data.removeprefix(b" ")
            self._at_start = False
        return self._decoder.decode(data)

    def flush(self) -> str:
        """The tokens ended: U+FFFD when they ended inside a character."""
        return self._decoder.decode(b"", final=True)
