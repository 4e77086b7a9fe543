"""One conversation: text in, pieces of text out. No terminal, no sockets.

What was said is a list of messages; every answer is made from the whole list. The backend finds out by itself
how much of it is in its KV cache, so an edit, /regen or /load needs nothing but a change of the list.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from starsd_edge.chat.answer import AnswerEnd, AnswerEvent, AnswerPiece, Figures, FinishReason
from starsd_edge.chat.backend import Backend
from starsd_edge.chat.settings import SETTINGS, ChatSettings, change_setting, show_setting
from starsd_edge.chat.status import LinkState, LinkStatus, link_words
from starsd_edge.decoding.sampling import MAX_SEED
from starsd_edge.errors import UsageError
from starsd_edge.text.template import Message, Role
from starsd_edge.whole_file import save_as

__all__ = ["Conversation"]

FILE_VERSION = 1


class Conversation:
    """Messages, settings and the backend that answers them."""

    def __init__(self, backend: Backend, settings: ChatSettings | None = None) -> None:
        self.backend = backend
        self.settings = settings or ChatSettings()
        self.defaults = self.settings  # what it began with: the model's own, and the user's
        self.messages: list[Message] = []
        self.figures: Figures | None = None  # of the newest answer
        self._regenerated = 0  # times the newest answer was asked for again
        self._blocked = False  # the user knows that this conversation is drafted for no more

    @property
    def last_answer(self) -> str | None:
        """The newest answer, also when it was stopped early."""
        if self.messages and self.messages[-1].role is Role.ASSISTANT:
            return self.messages[-1].content
        return None

    def link(self) -> LinkStatus:
        """The draft service as this conversation uses it: switched on or off at once, not with the next
        answer."""
        link = self.backend.link()
        if link.state is LinkState.NONE:
            return link
        if not self.settings.draft:
            return replace(link, state=LinkState.OFF)
        return replace(link, state=LinkState.CONNECTED) if link.state is LinkState.OFF else link

    def news(self) -> str:
        """What the user is told once: that this conversation is drafted for no more, and why; else ""."""
        link = self.link()
        if link.state is LinkState.BLOCKED and not self._blocked:
            self._blocked = True
            return link_words(link)
        if link.state.is_linked and link.state is not LinkState.BLOCKED:
            self._blocked = False
        return ""

    def ask(self, text: str) -> Iterator[AnswerEvent]:
        """Say `text` and answer it. An answer that is stopped is kept as far as it came.

        When nothing was said at all, the conversation is as it was before.
        """
        self._regenerated = 0
        self.messages.append(Message(Role.USER, text))
        return self._answer(restore=self.messages[:-1])

    def regenerate(self) -> Iterator[AnswerEvent]:
        """Answer the newest question again, with the next seed. Raises UsageError when there is none."""
        before = list(self.messages)
        while self.messages and self.messages[-1].role is Role.ASSISTANT:
            self.messages.pop()
        if not self.messages:
            raise UsageError("there is nothing to answer again")
        self._regenerated += 1
        return self._answer(restore=before)

    def clear(self) -> None:
        """Forget everything said; settings stay."""
        self.messages.clear()
        self.figures = None
        self._regenerated = 0

    def save(self, path: Path) -> None:
        """Write messages and settings as JSON, in one step: a full disk leaves an older file as it was.

        Raises UsageError where no ordinary file can be written.
        """
        saved = {
            "starsd_chat": FILE_VERSION,
            "model": self.backend.model,
            "settings": {name: show_setting(self.settings, name) for name in SETTINGS},
            "messages": [{"role": m.role.value, "content": m.content} for m in self.messages],
        }
        try:
            save_as(path, json.dumps(saved, ensure_ascii=False, indent=2) + "\n")
        except (OSError, ValueError) as error:  # a letter that no file can hold, a path that none can have
            raise UsageError(f"cannot save to {path}: {reason_of(error)}") from error

    def load(self, path: Path) -> None:
        """Continue a saved conversation with its settings. Raises UsageError for a file that is none."""
        try:
            if path.exists() and not path.is_file():  # a pipe or a device may have no end
                raise UsageError(f"cannot load {path}: it is no ordinary file")
            text = path.read_bytes()
        except (OSError, ValueError) as error:
            raise UsageError(f"cannot load {path}: {reason_of(error)}") from error
        try:
            saved = json.loads(text)
        except (ValueError, RecursionError):
            saved = None
        messages, settings = _read_saved(saved, path)
        self.clear()
        self.messages = messages
        self.settings = settings

    def _answer(self, restore: list[Message]) -> Iterator[AnswerEvent]:
        messages = list(self.messages)
        if self.settings.system:
            messages = [Message(Role.SYSTEM, self.settings.system), *messages]
        said = ""
        answered = False
        try:
            for event in self.backend.answer(messages, self._settings_now()):
                if isinstance(event, AnswerPiece):
                    said += event.text
                elif isinstance(event, AnswerEnd):
                    self.figures = event.figures
                    answered = event.reason is not FinishReason.CANCELLED
                yield event
        finally:
            if said or answered:
                self.messages.append(Message(Role.ASSISTANT, said))
            else:
                self.messages = restore

    def _settings_now(self) -> ChatSettings:
        if self._regenerated == 0:
            return self.settings
        sampling = self.settings.sampling
        seed = (sampling.seed + self._regenerated) % (MAX_SEED + 1)
        return replace(self.settings, sampling=replace(sampling, seed=seed))


def _read_saved(saved: Any, path: Path) -> tuple[list[Message], ChatSettings]:
    if not isinstance(saved, dict) or saved.get("starsd_chat") != FILE_VERSION:
        raise UsageError(f"{path} is not a saved chat of this program (version {FILE_VERSION})")
    try:
        messages = [Message(Role(m["role"]), str(m["content"])) for m in saved["messages"]]
        settings = ChatSettings()
        for name, value in saved["settings"].items():
            settings = change_setting(settings, name, value)
    except (KeyError, TypeError, ValueError, AttributeError, UsageError) as error:
        raise UsageError(f"{path} is damaged: {error}") from error
    return messages, settings


def reason_of(error: Exception) -> str:
    """What went wrong with a file that was named already."""
    return (isinstance(error, OSError) and error.strerror) or str(error)
