"""Show an answer on a terminal while it comes: text above, the status line below, Ctrl-C stops it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TextIO

from starsd_edge.chat.answer import (
    AnswerEnd,
    AnswerEvent,
    AnswerPiece,
    AnswerStart,
    FinishReason,
    PromptRead,
)
from starsd_edge.chat.conversation import Conversation
from starsd_edge.chat.keyboard import interrupts_stop, typed_ahead_unseen
from starsd_edge.chat.markdown import MarkdownStream
from starsd_edge.chat.screen import Screen, terminal_columns
from starsd_edge.chat.status import figures_line, link_words
from starsd_edge.errors import StarSDError

__all__ = ["Look", "say", "show_answer"]


@dataclass(frozen=True, slots=True)
class Look:
    """What the terminal can do, and how much the user wants to see.

    live    the cursor can be moved: there is a status line
    quiet   no figures after an answer
    """

    out: TextIO
    live: bool
    colour: bool
    quiet: bool = False

    def columns(self) -> int:
        return terminal_columns(self.out)


def show_answer(conversation: Conversation, events: Iterator[AnswerEvent], look: Look) -> None:
    """Run an answer to its end. Errors become one line; the conversation keeps what was said."""
    screen = Screen(look.out, live=look.live, columns=look.columns)
    settings = conversation.settings
    text = MarkdownStream(
        look.columns(),
        styled=settings.markdown and look.live,
        colour=look.colour,
        wrap=settings.wrap and look.live,
    )
    end: AnswerEnd | None = None
    failure = ""
    link = conversation.link
    with interrupts_stop(conversation.backend) as interrupts, typed_ahead_unseen():
        try:
            for event in events:
                interrupts.insist()
                if isinstance(event, AnswerPiece):
                    text.resize(look.columns())
                    screen.write(text.push(event.text), text.column)
                    screen.status(link_words(link()))
                elif isinstance(event, AnswerStart):
                    start = event
                    screen.status(f"reading {start.prompt_tokens - start.cached_tokens} tokens")
                elif isinstance(event, PromptRead):
                    screen.status(f"read {event.num_tokens} of {start.prompt_tokens} tokens")
                else:
                    end = event
        except StarSDError as error:
            failure = str(error)
        except KeyboardInterrupt:
            failure = "interrupted"
        except Exception as error:  # nor does an answer that fails end the chat
            failure = f"the answer failed: {type(error).__name__}: {error}"
    screen.write(text.flush(), text.column)
    screen.close()
    if failure:
        say(look, failure)
    elif end is not None and not look.quiet:
        say(look, _closing_line(conversation, end))
        if news := conversation.news():
            say(look, news)


def say(look: Look, line: str) -> None:
    """One line of ours, dim so that it is not taken for the model's."""
    look.out.write(f"\x1b[2m{line}\x1b[0m\n" if look.live else f"{line}\n")
    look.out.flush()


def _closing_line(conversation: Conversation, end: AnswerEnd) -> str:
    parts = [figures_line(end.figures)]
    if end.reason is FinishReason.CANCELLED:
        parts.insert(0, "stopped")
    elif end.reason is FinishReason.LENGTH:
        parts.insert(0, "cut at the token limit")
    if end.num_dropped:
        parts.append(f"the oldest {end.num_dropped} messages no longer fit the context")
    return " · ".join(parts)
