"""Slash commands: what they are called, what they do to a conversation, what they say. No terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from enum import Enum, auto
from pathlib import Path

from starsd_edge.chat.conversation import Conversation
from starsd_edge.chat.settings import SETTINGS, change_setting, show_setting
from starsd_edge.chat.status import link_words, statistics
from starsd_edge.errors import UsageError

__all__ = ["COMMANDS", "Action", "Command", "Outcome", "complete_command", "is_command", "run_command"]


class Action(Enum):
    """What is left for the terminal to do."""

    NONE = auto()
    REGENERATE = auto()
    COPY = auto()  # put `text` on the clipboard
    EDIT = auto()  # open the editor with `text` and send what it returns
    CLEAR_HISTORY = auto()
    LEAVE = auto()


@dataclass(frozen=True, slots=True)
class Outcome:
    """Lines to show, and what else is to be done."""

    lines: tuple[str, ...] = ()
    action: Action = Action.NONE
    text: str = ""


@dataclass(frozen=True, slots=True)
class Command:
    """One command; `run` gets what stands behind its name."""

    argument: str
    help: str
    run: Callable[[Conversation, str], Outcome]


def is_command(line: str) -> bool:
    """Whether `line` is meant for us: one line, a slash, a letter ("/usr/bin" with more slashes is text); or
    a word alone that leaves other programs of this kind."""
    if line.strip() in LEAVING:
        return True
    word = line.split(maxsplit=1)[0] if line.split() else ""
    return "\n" not in line.strip() and word[:1] == "/" and word[1:].replace("?", "a").isalpha()


def run_command(conversation: Conversation, line: str) -> Outcome:
    """Do what `line` says. Raises UsageError that says what is allowed."""
    word, _, argument = line.strip().partition(" ")
    name = ALIASES.get(word, word)
    command = COMMANDS.get(name)
    if command is None:
        raise UsageError(f"there is no command {word}; /help lists them all")
    return command.run(conversation, argument.strip())


def complete_command(line: str) -> list[str]:
    """What the last word of `line` may become."""
    words = line.split(" ")
    if len(words) == 1:
        return [name for name in COMMANDS if name.startswith(words[0])]
    if words[0] in ("/set", "/show") and len(words) == 2:
        names: Iterable[str] = SETTINGS if words[0] == "/set" else [*SETTINGS, *VIEWS]
        return [name for name in names if name.startswith(words[1])]
    choices: tuple[str, ...] = ()
    if words[0] == "/set" and len(words) == 3 and words[1] in SETTINGS:
        choices = SETTINGS[words[1]].choices
    elif words[0] == "/draft" and len(words) == 2:
        choices = ("on", "off")
    elif words[0] == "/clear" and len(words) == 2:
        choices = ("history",)
    return [choice for choice in choices if choice.startswith(words[-1])]


def _help(conversation: Conversation, argument: str) -> Outcome:
    rows = [(f"{name} {command.argument}".rstrip(), command.help) for name, command in COMMANDS.items()]
    keys = [
        ("Enter", "send; Alt-Enter begins a new line"),
        ('"""', "begins and ends a text of several lines"),
        ("Ctrl-C", "stops the answer and keeps what was said"),
        ("Ctrl-G", "opens $EDITOR on what you are writing"),
        ("Ctrl-D", "leaves; so does exit or quit alone"),
    ]
    return Outcome(tuple(_columns([*rows, *keys])))


def _clear(conversation: Conversation, argument: str) -> Outcome:
    if argument == "history":
        return Outcome(("The history file is empty.",), Action.CLEAR_HISTORY)
    if argument:
        raise UsageError("/clear forgets the conversation; /clear history empties the history file")
    conversation.clear()
    return Outcome(("The conversation starts afresh.",))


def _set(conversation: Conversation, argument: str) -> Outcome:
    name, _, value = argument.partition(" ")
    if not name:
        return Outcome(tuple(_columns([(name, setting.help) for name, setting in SETTINGS.items()])))
    conversation.settings = change_setting(conversation.settings, name, value.strip())
    return Outcome((f"{name} = {show_setting(conversation.settings, name) or '(none)'}",))


def _show(conversation: Conversation, argument: str) -> Outcome:
    if not argument:
        return Outcome(tuple(_columns([(name, _value(conversation, name)) for name in SETTINGS])))
    if argument in VIEWS:
        return Outcome(tuple(VIEWS[argument](conversation)))
    if argument not in SETTINGS:
        raise UsageError(
            f"there is nothing called {argument!r} to show; known: {', '.join([*SETTINGS, *VIEWS])}"
        )
    return Outcome((f"{argument} = {_value(conversation, argument)}",))


def _value(conversation: Conversation, name: str) -> str:
    """A setting, and what it was at the beginning where that differs."""
    now, before = (
        show_setting(settings, name) or "(none)"
        for settings in (conversation.settings, conversation.defaults)
    )
    return now if now == before else f"{now}  (began with {before})"


def _show_model(conversation: Conversation) -> list[str]:
    backend = conversation.backend
    return _columns(
        [
            ("model", backend.model),
            ("context", f"{backend.max_len} tokens" if backend.max_len else "unknown"),
            ("link", link_words(conversation.link())),
        ]
    )


def _show_conversation(conversation: Conversation) -> list[str]:
    lines = [f"{m.role.value}: {m.content}" for m in conversation.messages]
    return "\n".join(lines).split("\n") if lines else ["Nothing was said yet."]


VIEWS: dict[str, Callable[[Conversation], list[str]]] = {
    "model": _show_model,
    "conversation": _show_conversation,
}


def _save(conversation: Conversation, argument: str) -> Outcome:
    path = _path(argument, "/save FILE")
    conversation.save(path)
    return Outcome((f"Saved {len(conversation.messages)} messages to {path}.",))


def _load(conversation: Conversation, argument: str) -> Outcome:
    path = _path(argument, "/load FILE")
    conversation.load(path)
    return Outcome((f"Loaded {len(conversation.messages)} messages from {path}.",))


def _regen(conversation: Conversation, argument: str) -> Outcome:
    if conversation.settings.sampling.temperature == 0.0:
        return Outcome(
            ("At temperature 0 the answer stays the same; /set temperature 0.7",), Action.REGENERATE
        )
    return Outcome((), Action.REGENERATE)


def _copy(conversation: Conversation, argument: str) -> Outcome:
    answer = conversation.last_answer
    if answer is None:
        raise UsageError("there is no answer to copy yet")
    return Outcome((f"Copied {len(answer)} characters.",), Action.COPY, answer)


def _stats(conversation: Conversation, argument: str) -> Outcome:
    link = conversation.link()
    if conversation.figures is None:
        return Outcome(("No answer yet.", link_words(link)))
    return Outcome(tuple(_columns(statistics(conversation.figures, link))))


def _draft(conversation: Conversation, argument: str) -> Outcome:
    if argument not in ("on", "off"):
        raise UsageError("/draft on or /draft off")
    conversation.settings = replace(conversation.settings, draft=argument == "on")
    words = "on" if argument == "on" else "off; the text stays the same, only the speed changes"
    return Outcome((f"Drafting is {words}.",))


def _system(conversation: Conversation, argument: str) -> Outcome:
    return _set(conversation, f"system {argument}")


def _edit(conversation: Conversation, argument: str) -> Outcome:
    return Outcome((), Action.EDIT, argument)


def _bye(conversation: Conversation, argument: str) -> Outcome:
    return Outcome((), Action.LEAVE)


COMMANDS: dict[str, Command] = {
    "/help": Command("", "this list", _help),
    "/clear": Command("[history]", "forget the conversation, or empty the history file", _clear),
    "/set": Command("NAME VALUE", "change a setting; /set alone lists them", _set),
    "/show": Command("[NAME]", "settings, one of them, the model, or the conversation", _show),
    "/system": Command("TEXT", "set the system message", _system),
    "/save": Command("FILE", "write the conversation and its settings", _save),
    "/load": Command("FILE", "continue a saved conversation", _load),
    "/regen": Command("", "answer the last question again, with the next seed", _regen),
    "/copy": Command("", "put the last answer on the clipboard", _copy),
    "/edit": Command("[TEXT]", "write in $EDITOR", _edit),
    "/stats": Command("", "figures of the last answer, and the link", _stats),
    "/draft": Command("on|off", "use the draft service or not", _draft),
    "/bye": Command("", "leave", _bye),
}
LEAVING = ("exit", "quit")
ALIASES = {"/?": "/help", "/exit": "/bye", "/quit": "/bye", "/retry": "/regen"} | dict.fromkeys(
    LEAVING, "/bye"
)


def _path(argument: str, usage: str) -> Path:
    if not argument:
        raise UsageError(f"{usage}: name a file")
    try:
        return Path(argument).expanduser()
    except RuntimeError as error:  # "~nobody"
        raise UsageError(f"{argument}: {error}") from error


def _columns(rows: list[tuple[str, str]]) -> list[str]:
    width = max((len(name) for name, _ in rows), default=0)
    return [f"{name:<{width}}  {text}".rstrip() for name, text in rows]
