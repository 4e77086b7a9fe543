"""The interactive chat: reads lines with prompt_toolkit, answers them, obeys slash commands."""

from __future__ import annotations

import base64
from collections.abc import Iterable
from pathlib import Path

from prompt_toolkit import PromptSession
from prompt_toolkit.buffer import Buffer
from prompt_toolkit.completion import CompleteEvent, Completer, Completion
from prompt_toolkit.document import Document
from prompt_toolkit.filters import Condition
from prompt_toolkit.formatted_text import FormattedText
from prompt_toolkit.input import Input
from prompt_toolkit.input.typeahead import get_typeahead, store_typeahead
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.keys import Keys
from prompt_toolkit.output import ColorDepth, Output
from prompt_toolkit.styles import Style

from starsd_edge.chat.commands import Action, complete_command, is_command, run_command
from starsd_edge.chat.conversation import Conversation
from starsd_edge.chat.history import clear_history, open_history
from starsd_edge.chat.keyboard import terminal_given_back
from starsd_edge.chat.screen import clip, fold
from starsd_edge.chat.show import Look, say, show_answer
from starsd_edge.chat.status import figures_line, link_words
from starsd_edge.errors import StarSDError, UsageError

__all__ = ["Repl", "is_open_block", "unquote_block"]

PROMPT = ">>> "
# Copied text must not carry marks of ours: continued lines are indented and nothing else.
CONTINUATION = " " * len(PROMPT)
QUOTES = '"""'
STATUS_REFRESH_S = 1.0  # how soon a lost service shows while the user types
MAX_OSC52_BYTES = 74_994  # what terminals accept of a clipboard sequence, before base64


class Repl:
    """One interactive session.

    history_folder  where the typed lines are kept; None keeps none
    """

    def __init__(
        self,
        conversation: Conversation,
        look: Look,
        history_folder: Path | None,
        terminal_input: Input | None = None,
        terminal_output: Output | None = None,
    ) -> None:
        self._conversation = conversation
        self._look = look
        self._history = open_history(history_folder)
        self._session: PromptSession[str] = PromptSession(
            multiline=True,
            history=self._history,
            completer=_Commands(),
            # Room for a menu is kept below the line while it may complete, and only then.
            complete_while_typing=Condition(lambda: self._session.default_buffer.text.startswith("/")),
            key_bindings=_keys(),
            bottom_toolbar=self._toolbar,
            refresh_interval=STATUS_REFRESH_S,
            prompt_continuation=CONTINUATION,
            enable_open_in_editor=True,
            tempfile_suffix=".md",
            style=Style.from_dict({"bottom-toolbar": "noreverse", "bottom-toolbar.text": "noreverse"}),
            color_depth=None if look.colour else ColorDepth.DEPTH_1_BIT,
            input=terminal_input,
            output=terminal_output,
        )

    def run(self, first: str | None = None) -> None:
        """Until the user leaves; `first` is answered before they are asked."""
        with terminal_given_back(self._look.out):
            if first is not None:
                show_answer(self._conversation, self._conversation.ask(first), self._look)
            self._loop()

    def _loop(self) -> None:
        draft = ""
        while True:
            try:
                text = unquote_block(self._session.prompt(PROMPT, default=draft))
            except KeyboardInterrupt:
                if not self._session.default_buffer.text:  # else it took back what was written
                    say(self._look, "Ctrl-D or /bye leaves.")
                draft = ""
                continue
            except EOFError:
                return
            draft = ""
            if self._taken_back():
                say(self._look, "stopped")
                continue
            if not text.strip():
                continue
            if not is_command(text):
                show_answer(self._conversation, self._conversation.ask(text), self._look)
                continue
            action, draft = self._obey(text)
            if action is Action.LEAVE:
                return

    def _taken_back(self) -> bool:
        """Whether Ctrl-C followed so soon that the prompt still read it."""
        keys = get_typeahead(self._session.input)
        if any(key.key is Keys.ControlC for key in keys):
            return True
        store_typeahead(self._session.input, keys)
        return False

    def _obey(self, line: str) -> tuple[Action, str]:
        """Run a command; what is left of it, and the text to begin the next line with."""
        try:
            outcome = run_command(self._conversation, line)
            for said in outcome.lines:
                self._look.out.write("\n".join(fold(said, self._look.columns())) + "\n")
            if outcome.action is Action.REGENERATE:
                show_answer(self._conversation, self._conversation.regenerate(), self._look)
            elif outcome.action is Action.COPY:
                self._copy(outcome.text)
            elif outcome.action is Action.CLEAR_HISTORY:
                clear_history(self._history)
            elif outcome.action is Action.EDIT:
                return outcome.action, self._edit(outcome.text)
            return outcome.action, ""
        except StarSDError as error:
            failure = str(error)
        except KeyboardInterrupt:
            failure = "interrupted"
        except Exception as error:  # a command that fails takes no conversation with it
            failure = f"{line.split()[0]} failed: {type(error).__name__}: {error}"
        say(self._look, failure)
        return Action.NONE, ""

    def _copy(self, text: str) -> None:
        """OSC 52 reaches the clipboard of the terminal the user sits at, also through SSH."""
        data = text.encode(errors="replace")[:MAX_OSC52_BYTES]
        self._look.out.write(f"\x1b]52;c;{base64.b64encode(data).decode()}\x07")
        self._look.out.flush()

    def _edit(self, text: str) -> str:
        """What the user's editor makes of `text`."""
        import click

        try:
            edited = click.edit(text, extension=".md", require_save=False)
        except (click.ClickException, OSError, ValueError) as error:
            said = error.message if isinstance(error, click.ClickException) else str(error)
            raise UsageError(
                f"the editor cannot be run ({said}): set EDITOR to one, and begin again"
            ) from error
        return (edited or "").rstrip("\n")

    def _toolbar(self) -> FormattedText:
        parts = [link_words(self._conversation.link())]
        if self._conversation.figures is not None:
            parts.append(figures_line(self._conversation.figures))
        width = self._look.columns() - 1
        line = " · ".join(parts)
        if len(line) > width:  # a reason may be long, and neither may hide the other
            line = "\n".join(clip(part, width) for part in reversed(parts))
        return FormattedText([("class:bottom-toolbar.text", line)])


def is_open_block(text: str) -> bool:
    """Whether a text of several lines was begun with three quotes and not ended yet."""
    stripped = text.strip()
    return stripped.startswith(QUOTES) and (len(stripped) < 2 * len(QUOTES) or not stripped.endswith(QUOTES))


def unquote_block(text: str) -> str:
    """The text without its three quotes at both ends."""
    stripped = text.strip()
    if stripped.startswith(QUOTES) and not is_open_block(text):
        return stripped[len(QUOTES) : -len(QUOTES)].strip("\n")
    return text


class _Commands(Completer):
    """Completes slash commands, nothing else."""

    def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterable[Completion]:
        line = document.text_before_cursor
        if not line.startswith("/") or "\n" in document.text:
            return
        word = line.split(" ")[-1]
        for found in complete_command(line):
            yield Completion(found, start_position=-len(word))


def _keys() -> KeyBindings:
    keys = KeyBindings()

    @keys.add("enter")
    def _send(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        if _accept_completion(buffer):
            return
        if is_open_block(buffer.text):
            buffer.newline(copy_margin=False)
        else:
            buffer.validate_and_handle()

    @keys.add("escape", "enter")
    def _new_line(event: KeyPressEvent) -> None:
        event.current_buffer.newline(copy_margin=False)

    @keys.add("tab")
    def _complete(event: KeyPressEvent) -> None:
        # Not left to the menu: it is filled in the background, and a fast typist's Tab would be lost.
        buffer = event.current_buffer
        line = buffer.document.text_before_cursor
        found = complete_command(line) if line.startswith("/") else []
        if len(found) == 1:
            buffer.insert_text(found[0][len(line.split(" ")[-1]) :])
        elif buffer.complete_state is not None:
            buffer.complete_next()
        elif found:
            buffer.start_completion(select_first=False)

    @keys.add("c-g")
    def _editor(event: KeyPressEvent) -> None:
        event.current_buffer.open_in_editor()

    return keys


def _accept_completion(buffer: Buffer) -> bool:
    """Enter on a chosen completion takes it instead of sending the line."""
    state = buffer.complete_state
    if state is None or state.current_completion is None:
        return False
    buffer.complete_state = None
    return True
