"""Whatever answers: the model in this process, or a `starsd serve` that has it loaded."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from starsd_edge.chat.answer import AnswerEvent
from starsd_edge.chat.settings import ChatSettings
from starsd_edge.chat.status import LinkStatus
from starsd_edge.text.template import Message

__all__ = ["Backend"]


class Backend(Protocol):
    """One model. Answers one conversation at a time, in the thread that iterates."""

    @property
    def model(self) -> str:
        """The model's name."""
        ...

    @property
    def max_len(self) -> int:
        """Tokens the context holds; 0 where it is not known."""
        ...

    def answer(self, messages: Sequence[Message], settings: ChatSettings) -> Iterator[AnswerEvent]:
        """Answer the last message: AnswerStart, PromptRead for long prompts, AnswerPieces, AnswerEnd.

        Raises StarSDError where no answer can be given; nothing of it was shown then, or the rest is lost.
        """
        ...

    def cancel(self) -> None:
        """End the answer under way with what it has. Safe from a signal handler and from other threads."""
        ...

    def link(self) -> LinkStatus:
        """The draft service as it stands now."""
        ...

    def close(self) -> None: ...
