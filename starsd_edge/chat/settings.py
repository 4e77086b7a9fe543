"""What a user may set in a chat: one table that /set, /show, the command line and saved chats share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

from starsd_edge.decoding.sampling import SamplingParams
from starsd_edge.errors import UsageError

__all__ = ["SETTINGS", "ChatSettings", "FullWindow", "Setting", "change_setting", "show_setting"]


class FullWindow(str, Enum):
    """What happens when a conversation no longer fits the context (see `window`)."""

    DROP_OLDEST = "drop-oldest"
    REFUSE = "refuse"


@dataclass(frozen=True, slots=True)
class ChatSettings:
    """Everything that shapes an answer, and how it is shown.

    max_tokens   tokens of one answer; None: as many as the context holds
    logprobs     likeliest alternatives to report with every token; None: no log-probabilities
    """

    system: str = ""
    sampling: SamplingParams = field(default_factory=SamplingParams)
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    full_window: FullWindow = FullWindow.DROP_OLDEST
    logprobs: int | None = None
    draft: bool = True
    markdown: bool = True
    wrap: bool = True


@dataclass(frozen=True, slots=True)
class Setting:
    """One name a user may write after /set."""

    help: str
    read: Callable[[ChatSettings], object]
    change: Callable[[ChatSettings, str], ChatSettings]
    choices: tuple[str, ...] = ()


def change_setting(settings: ChatSettings, name: str, value: str) -> ChatSettings:
    """Settings with `name` set from what the user wrote. Raises UsageError that says what is allowed."""
    setting = SETTINGS.get(name)
    if setting is None:
        raise UsageError(f"there is no setting {name!r}; known: {', '.join(SETTINGS)}")
    try:
        return setting.change(settings, value)
    except ValueError as error:
        raise UsageError(f"{name}: {value!r} is not {error}") from error


def show_setting(settings: ChatSettings, name: str) -> str:
    """The value as /set would take it."""
    value = SETTINGS[name].read(settings)
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, Enum):
        return str(value.value)
    if isinstance(value, tuple):
        return " ".join(part.encode("unicode_escape").decode().replace(" ", "\\x20") for part in value)
    return "" if value is None else str(value)


def _number(text: str, kind: Callable[[str], Any], what: str) -> Any:
    try:
        return kind(text)
    except ValueError:
        raise ValueError(what) from None


def _sampling(name: str, kind: Callable[[str], Any], help_text: str) -> Setting:
    what = "a whole number" if kind is int else "a number"

    def change(settings: ChatSettings, text: str) -> ChatSettings:
        values: dict[str, Any] = {name: _number(text, kind, what)}
        return replace(settings, sampling=replace(settings.sampling, **values))

    return Setting(help_text, lambda settings: getattr(settings.sampling, name), change)


def _switch(name: str, help_text: str) -> Setting:
    def change(settings: ChatSettings, text: str) -> ChatSettings:
        if text not in ("on", "off"):
            raise ValueError("on or off")
        values: dict[str, Any] = {name: text == "on"}
        return replace(settings, **values)

    return Setting(help_text, lambda settings: getattr(settings, name), change, ("on", "off"))


def _max_tokens(settings: ChatSettings, text: str) -> ChatSettings:
    if text in ("", "none"):
        return replace(settings, max_tokens=None)
    count = _number(text, int, "a whole number above 0, or none")
    if count < 1:
        raise ValueError("a whole number above 0, or none")
    return replace(settings, max_tokens=count)


def _stop(settings: ChatSettings, text: str) -> ChatSettings:
    """Separated by spaces; \\n, \\t and \\x20 may be written."""
    escaped = text.encode("latin-1", "backslashreplace")
    try:
        stops = tuple(part.decode("unicode_escape") for part in escaped.split())
    except UnicodeDecodeError:
        raise ValueError("text whose backslashes begin \\n, \\t, \\x20, \\u2028 or \\\\") from None
    return replace(settings, stop=stops)


def _full_window(settings: ChatSettings, text: str) -> ChatSettings:
    rules = [rule.value for rule in FullWindow]
    if text not in rules:
        raise ValueError("one of " + ", ".join(rules))
    return replace(settings, full_window=FullWindow(text))


SETTINGS: dict[str, Setting] = {
    "system": Setting(
        "the system message; empty for the model's own",
        lambda settings: settings.system,
        lambda settings, text: replace(settings, system=text),
    ),
    "temperature": _sampling("temperature", float, "0 always takes the likeliest token"),
    "top_k": _sampling("top_k", int, "keep the k likeliest tokens; 0 keeps all"),
    "top_p": _sampling("top_p", float, "keep the likeliest tokens that together reach this probability"),
    "min_p": _sampling(
        "min_p", float, "keep tokens with at least this fraction of the best one's probability"
    ),
    "repetition_penalty": _sampling("repetition_penalty", float, "above 1 discourages what was said before"),
    "presence_penalty": _sampling("presence_penalty", float, "above 0 favours new words"),
    "frequency_penalty": _sampling("frequency_penalty", float, "above 0 discourages frequent words"),
    "seed": _sampling("seed", int, "the same seed gives the same text"),
    "max_tokens": Setting(
        "longest answer in tokens; none for no limit", lambda settings: settings.max_tokens, _max_tokens
    ),
    "stop": Setting("strings that end an answer, separated by spaces", lambda s: s.stop, _stop),
    "full_window": Setting(
        "when the context is full: drop-oldest turns, or refuse",
        lambda settings: settings.full_window,
        _full_window,
        tuple(rule.value for rule in FullWindow),
    ),
    "draft": _switch("draft", "use the draft service; the text is the same either way"),
    "markdown": _switch("markdown", "show bold, headings and code with style"),
    "wrap": _switch("wrap", "break lines between words"),
}
