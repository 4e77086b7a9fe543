"""`starsd bench context`: what a turn's first token costs as a conversation grows."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import click
import msgspec
import numpy as np

from starsd_edge.bench.report import json_option, write_json
from starsd_edge.chat.answer import AnswerEnd, AnswerEvent, AnswerPiece, Figures
from starsd_edge.chat.conversation import Conversation
from starsd_edge.chat.settings import ChatSettings
from starsd_edge.cli.fit import needs_of
from starsd_edge.cli.model_options import model_options
from starsd_edge.cli.runtime import ModelChoice, open_bundle, open_speaker
from starsd_edge.text.template import Message, Role

__all__ = ["ContextReport", "Sharing", "Turn", "command", "measure", "take_turns"]

# Questions of different length, so that the new tokens of turns differ.
QUESTIONS = (
    "Tell me about foxes.",
    "What do they eat, and how do they find it in winter when the ground is frozen and everything is white?",
    "And where do they sleep?",
    "Compare them with wolves: size, packs, prey, the sounds they make, how they raise their young, and what "
    "people have told each other about both of them for hundreds of years. Keep it short.",
    "Why?",
    "Write down three questions that a curious child might ask after hearing all this.",
)


class Turn(msgspec.Struct):
    """One turn. `again_ms` is what its prompt takes from an empty cache, without reuse."""

    prompt_tokens: int
    new_tokens: int
    first_token_ms: float
    first_token_cpu_ms: float
    again_ms: float
    again_cpu_ms: float


class Sharing(msgspec.Struct):
    """Conversations that take turns on one model that keeps the caches of `kept` of them.

    cached_share  of the prompt tokens of all turns but the first, found in a cache
    opened        caches that were opened
    kv_bytes      most that the caches may take, all together
    """

    conversations: int
    kept: int
    opened: int
    cached_share: float
    kv_bytes: int


class ContextReport(msgspec.Struct):
    """`ms_per_new_token` and `fixed_ms`: the line through (new tokens, CPU time to the first token).

    regenerated, edited  tokens run again for /regen, and after a change of the first question
    """

    model: str
    turns: list[Turn]
    ms_per_new_token: float
    fixed_ms: float
    regenerated: int
    edited: int
    sharing: list[Sharing]


@dataclass(frozen=True, slots=True)
class FirstToken:
    """Time to a first token: wall clock, and CPU time of this process, which others do not disturb."""

    figures: Figures
    wall_s: float
    cpu_s: float


@click.command("context")
@model_options
@click.option("--turns", default=len(QUESTIONS), show_default=True, type=click.IntRange(2, 64))
@click.option("--answer-tokens", default=24, show_default=True, type=click.IntRange(1))
@click.option(
    "--conversations",
    default=3,
    show_default=True,
    type=click.IntRange(2, 16),
    help="That take turns on one model: once as many caches are kept, once one less.",
)
@json_option
def command(
    bundle: str | None,
    quant: str | None,
    threads: int | None,
    provider: str | None,
    context: int | None,
    service: str | None,
    draft: str,
    keys: str | None,
    turns: int,
    answer_tokens: int,
    conversations: int,
    json_file: Path | None,
) -> None:
    """Time to the first token, turn by turn: it should grow with what is new, not with what was said.

    Decodes plainly; --service and --keys have no part in it.
    """

    def report(line: str) -> None:
        click.echo(line, err=True)

    choice = ModelChoice(bundle or "embedded", quant, threads, context, provider)
    opened = open_bundle(choice, report)

    settings = ChatSettings(max_tokens=answer_tokens, draft=False)

    def fresh() -> Conversation:
        return Conversation(open_speaker(opened, choice, None, report=report), settings)

    result = measure(fresh, turns)
    for kept in (conversations, conversations - 1):
        speaker = open_speaker(opened, choice, None, report=report, max_contexts=kept)
        talking = [Conversation(speaker, settings) for _ in range(conversations)]
        share = take_turns(talking, turns)
        kv_bytes = needs_of(opened.manifest, kept).kv_bytes_per_token * speaker.max_len
        result.sharing.append(Sharing(conversations, kept, len(speaker.contexts), share, kv_bytes))
        speaker.close()
    click.echo(f"{result.model}: time to the first token of a turn (CPU time in brackets)")
    click.echo(" turn  prompt   new        reused cache           empty cache")
    for number, turn in enumerate(result.turns, 1):
        click.echo(
            f"{number:>5} {turn.prompt_tokens:>7} {turn.new_tokens:>5}"
            f" {turn.first_token_ms:>9.0f} ms ({turn.first_token_cpu_ms:>6.0f})"
            f" {turn.again_ms:>9.0f} ms ({turn.again_cpu_ms:>6.0f})"
        )
    click.echo(f"{result.ms_per_new_token:.2f} ms of CPU a new token, and {result.fixed_ms:.0f} ms a turn")
    click.echo(
        f"/regen runs {result.regenerated} token again; a change of the first question, {result.edited}"
    )
    for sharing in result.sharing:
        click.echo(
            f"{sharing.conversations} conversations in turn, {sharing.kept} caches kept (at most "
            f"{sharing.kv_bytes / 1e6:.0f} MB): {sharing.cached_share:.0%} of the prompts found in them"
        )
    write_json(json_file, msgspec.to_builtins(result))


def measure(fresh: Callable[[], Conversation], turns: int) -> ContextReport:
    """Talk for so many turns; after each, run its prompt once more from an empty cache.

    fresh   a conversation whose backend has nothing in its cache
    """
    conversation, other = fresh(), fresh()
    measured = []
    for number in range(turns):
        first = _ask(conversation, QUESTIONS[number % len(QUESTIONS)])
        # The same messages, answered by a backend that is made to forget them in between.
        _forget(other)
        other.messages = conversation.messages[:-2]
        again = _ask(other, conversation.messages[-2].content)
        measured.append(
            Turn(
                prompt_tokens=first.figures.prompt_tokens,
                new_tokens=first.figures.prompt_tokens - first.figures.cached_tokens,
                first_token_ms=first.wall_s * 1e3,
                first_token_cpu_ms=first.cpu_s * 1e3,
                again_ms=again.wall_s * 1e3,
                again_cpu_ms=again.cpu_s * 1e3,
            )
        )
    regenerated = _new_tokens(conversation.regenerate())
    conversation.messages[0] = Message(Role.USER, "Tell me about badgers.")
    edited = _new_tokens(conversation.ask("Why?"))
    new = np.array([turn.new_tokens for turn in measured], np.float64)
    cpu = np.array([turn.first_token_cpu_ms for turn in measured], np.float64)
    slope, fixed = np.polyfit(new, cpu, 1)
    model = conversation.backend.model
    for used in (conversation, other):
        used.backend.close()
    return ContextReport(model, measured, float(slope), float(fixed), regenerated, edited, [])


def take_turns(conversations: Sequence[Conversation], turns: int) -> float:
    """Every conversation says its line, again and again; the share of later prompts that was cached."""
    prompts = cached = 0
    for turn in range(turns):
        for number, conversation in enumerate(conversations):
            about = f"You are storyteller number {number}. " * (turn == 0)
            figures = _ask(conversation, about + QUESTIONS[(turn + number) % len(QUESTIONS)]).figures
            if turn > 0:
                prompts += figures.prompt_tokens
                cached += figures.cached_tokens
    return cached / prompts


def _new_tokens(events: Iterable[AnswerEvent]) -> int:
    """Tokens of the prompt that were run for an answer."""
    *_, end = events
    assert isinstance(end, AnswerEnd)
    return end.figures.prompt_tokens - end.figures.cached_tokens


def _ask(conversation: Conversation, question: str) -> FirstToken:
    """The whole answer is taken, so that the conversation can go on; timed up to its first token."""
    started_cpu_s = time.process_time()
    cpu_s: float | None = None
    for event in conversation.ask(question):
        if cpu_s is None and isinstance(event, (AnswerPiece, AnswerEnd)):
            cpu_s = time.process_time() - started_cpu_s
        if isinstance(event, AnswerEnd):
            figures = event.figures
    return FirstToken(figures, figures.first_token_s, cpu_s or 0.0)


def _forget(conversation: Conversation) -> None:
    """Overwrite the cache with something that shares nothing with the next prompt."""
    conversation.messages = []
    for _ in conversation.ask("x"):
        pass
