"""Texts that exist before training: plain files, and chats as token ids that the target wrote elsewhere."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from starsd_edge.errors import ConfigError
from starsd_edge.text.tokenizer import Tokenizer
from starsd_edge.types import TokenArray

__all__ = ["KnownText", "chats_of", "windows_of"]

TEXT_WINDOW_TOKENS = 256


@dataclass(frozen=True, slots=True)
class KnownText:
    """A sequence that the target only has to read.

    tokens  int32 [n], two or more
    start   the first one that the target wrote itself; 0 for plain text, all of which teaches
    greedy  it always wrote the most probable token
    """

    tokens: TokenArray
    start: int
    greedy: bool


def windows_of(tokenizer: Tokenizer, path: Path) -> Iterator[KnownText]:
    """A plain text in pieces. Raises ConfigError when it is not UTF-8."""
    try:
        tokens = np.array(tokenizer.encode(path.read_text("utf-8")), np.int32)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read as UTF-8 text ({error})") from error
    for piece in np.split(tokens, range(TEXT_WINDOW_TOKENS, len(tokens), TEXT_WINDOW_TOKENS)):
        if len(piece) > 1:
            yield KnownText(piece, 0, greedy=False)


def chats_of(path: Path, vocab_size: int, max_len: int) -> Iterator[KnownText]:
    """Chats from a file of JSON lines (plain or .gz), cut to `max_len` tokens.

    A line is an object with `t`, all token ids with the chat template applied; `s`, the index of the first
    token of the answer; `temp`, the temperature it was sampled at, 0 for greedy. Other keys are ignored.

    Raises ConfigError naming the line that is wrong.
    """
    try:
        with (
            gzip.open(path, "rt", encoding="utf-8")
            if path.suffix == ".gz"
            else path.open(encoding="utf-8") as file
        ):
            for number, line in enumerate(file, start=1):
                yield _chat(line, f"{path}, line {number}", vocab_size, max_len)
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read ({error})") from error


def _chat(line: str, where: str, vocab_size: int, max_len: int) -> KnownText:
    try:
        raw: Any = json.loads(line)
        tokens = np.array(raw["t"], np.int64)
        start, temperature = int(raw["s"]), float(raw["temp"])
    except (ValueError, TypeError, KeyError, OverflowError) as error:
        raise ConfigError(f"{where}: needs `t` (token ids), `s` (a number) and `temp` (a number)") from error
    if tokens.ndim != 1 or len(tokens) < 2 or not 0 <= start < len(tokens):
        raise ConfigError(f"{where}: {tokens.shape} tokens with an answer from {start} on are no chat")
    if tokens.min() < 0 or tokens.max() >= vocab_size:
        raise ConfigError(f"{where}: has a token outside 0 to {vocab_size - 1}; is it another model's?")
    return KnownText(tokens[:max_len].astype(np.int32), start, greedy=temperature == 0)
