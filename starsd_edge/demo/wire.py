"""What `starsd demo` and its targets say to each other: a JSON object a line, on stdin and stdout."""

from __future__ import annotations

import enum

import msgspec

from starsd_edge.demo.report import Answer

__all__ = ["Answered", "Ask", "Mode", "Piece", "Ready", "Reply"]


class Mode(enum.Enum):
    PLAIN = "plain"
    STARSD = "starsd"


class Ask(msgspec.Struct, frozen=True, kw_only=True):
    """Answer `prompt`; `stream` asks for Pieces on the way."""

    prompt: str
    mode: Mode
    max_tokens: int
    stream: bool = False


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """The model is loaded and measured. `curve` is forward seconds for n nodes."""

    runtime: str
    quantisation: str
    curve: dict[int, float]


class Piece(msgspec.Struct, frozen=True, tag="piece"):
    """Text that is final; num_tokens of it came at once."""

    text: str
    num_tokens: int


class Answered(msgspec.Struct, frozen=True, tag="answered"):
    answer: Answer


Reply = Ready | Piece | Answered
