"""`starsd chat`: talk to a model, in a terminal or through a pipe."""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from starsd_edge.cli.model_options import model_options
from starsd_edge.errors import ConfigError, ResourceError, UsageError

if TYPE_CHECKING:
    from starsd_edge.chat.backend import Backend
    from starsd_edge.chat.conversation import Conversation
    from starsd_edge.chat.settings import ChatSettings
    from starsd_edge.cli.runtime import ModelChoice
    from starsd_edge.config import ChatConfig
    from starsd_edge.decoding.sampling import SamplingParams

__all__ = ["command"]

# Seeds that a user can read and type again.
MAX_RANDOM_SEED = 2**31
# The embedded model is small and may repeat itself until its context is full, which nobody waits for.
MAX_TOKENS_ONCE = 512
MAX_TOKENS_HELP = (
    "Longest answer.  [default: what the context holds; where the embedded model answers once, "
    f"{MAX_TOKENS_ONCE}]"
)


@click.command()
@click.argument("prompt", nargs=-1)
@model_options
@click.option(
    "--attach",
    metavar="URL",
    help="Use the model of a running `starsd serve`; 'off' loads one here. By default one on this machine is "
    "used where no flag asks for a certain model.",
)
@click.option("--system", metavar="TEXT", help="System message.")
@click.option("--set", "changes", multiple=True, metavar="NAME=VALUE", help="Any setting of /set.")
@click.option("--seed", type=click.IntRange(0), help="The same seed gives the same text; random by default.")
@click.option("--max-tokens", type=click.IntRange(1), help=MAX_TOKENS_HELP)
@click.option("-i", "--interactive", is_flag=True, help="Go on with a chat after PROMPT.")
@click.option("-q", "--quiet", is_flag=True, help="Nothing but the answers.")
@click.option("--json", "as_json", is_flag=True, help="Answer and figures as one JSON object.")
@click.option("--no-history", is_flag=True, help="Neither read nor write the history of typed lines.")
@click.option("--no-markdown", is_flag=True, help="Show answers as the model writes them.")
def command(
    prompt: tuple[str, ...],
    bundle: str | None,
    quant: str | None,
    threads: int | None,
    provider: str | None,
    context: int | None,
    service: str | None,
    draft: str,
    keys: Path | None,
    attach: str | None,
    system: str | None,
    changes: tuple[str, ...],
    seed: int | None,
    max_tokens: int | None,
    interactive: bool,
    quiet: bool,
    as_json: bool,
    no_history: bool,
    no_markdown: bool,
) -> None:
    """Chat with a model.

    With PROMPT, or with text piped in, answers once. /help lists what can be done inside a chat.
    """
    from starsd_edge.bundle import Bundle
    from starsd_edge.chat.conversation import Conversation
    from starsd_edge.chat.settings import ChatSettings
    from starsd_edge.cli.runtime import EMBEDDED, ModelChoice
    from starsd_edge.config import read_config

    if quant is not None and bundle not in (None, EMBEDDED):
        raise UsageError("--quant is for the embedded model; a bundle has the precision it was exported with")
    config = read_config().chat
    choice = ModelChoice(bundle or config.bundle or EMBEDDED, quant, threads, context, provider)
    if choice.bundle != EMBEDDED and attach in (None, "off"):
        Bundle.open(Path(choice.bundle))  # a wrong folder is told before anyone is asked for a question
    question = _question(prompt)
    if as_json and (interactive or question is None):
        raise UsageError("--json answers once: give a question, and leave -i out")
    if interactive and not sys.stdin.isatty():
        raise UsageError("-i needs a terminal to go on in: the input is none")
    flags = {
        "seed": seed,
        "system": system,
        "max_tokens": max_tokens,
        "markdown": "off" if no_markdown else None,
        "draft": "off" if draft == "off" else None,
    }
    once = question is not None and not interactive
    limit: int | None = None
    wanted = [*_pairs(changes), *flags.items()]

    report = _silent if quiet or as_json else _report
    asked_for = choice != ModelChoice() or service is not None
    server = _server(attach, asked_for=asked_for)
    if server is not None:
        backend, sampling = _attached(server)
    else:
        if once and choice.bundle == EMBEDDED:
            limit = MAX_TOKENS_ONCE
        address = service or config.service
        backend, sampling = _loaded(choice, address, keys, draft, report=report)
    try:
        conversation = Conversation(
            backend, _settings(_configured(ChatSettings(sampling=sampling, max_tokens=limit), config), wanted)
        )
        if question is not None and once:
            _answer_once(conversation, question, report, as_json=as_json)
        else:
            history = config.history and not no_history and not os.environ.get("STARSD_NO_HISTORY")
            if not quiet:
                _report(_banner(backend, server))
            _interact(conversation, question, quiet=quiet, history=history)
    finally:
        backend.close()


def _server(attach: str | None, *, asked_for: bool) -> str | None:
    """The server to use; None to load the model here."""
    from starsd_edge.chat.remote import find_server
    from starsd_edge.defaults import ENDPOINT_PORT

    if attach is not None:
        return None if attach == "off" else attach
    here = f"http://127.0.0.1:{ENDPOINT_PORT}"
    return here if not asked_for and find_server(here) else None


def _attached(url: str) -> tuple[Backend, SamplingParams]:
    from starsd_edge.chat.remote import RemoteBackend

    remote = RemoteBackend(url, os.environ.get("STARSD_API_KEY", ""))
    return remote, replace(remote.sampling, seed=secrets.randbelow(MAX_RANDOM_SEED))


def _loaded(
    choice: ModelChoice,
    service: str | None,
    keys: Path | None,
    draft: str,
    *,
    report: Callable[[str], None],
) -> tuple[Backend, SamplingParams]:
    from starsd_edge.cli.drafts import find_draft_service
    from starsd_edge.cli.runtime import default_sampling, open_bundle, open_speaker

    drafts = find_draft_service(service, keys)
    bundle = open_bundle(choice, report)
    sampling = default_sampling(bundle.manifest, seed=secrets.randbelow(MAX_RANDOM_SEED))
    return open_speaker(bundle, choice, drafts, report=report, draft=draft), sampling


def _question(prompt: tuple[str, ...]) -> str | None:
    """PROMPT, what is piped in, or both; None for a terminal without PROMPT."""
    parts = [" ".join(prompt)] if prompt else []
    if not sys.stdin.isatty():
        parts.append(_piped().strip("\n"))
    question = "\n\n".join(part for part in parts if part.strip())
    if not question and not sys.stdin.isatty():
        raise UsageError("there is nothing to answer: the input is empty")
    return question or None


def _piped() -> str:
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise UsageError(
            f"the input is not {error.encoding} text (byte {error.start}): convert it with iconv, or set a "
            "locale that reads it"
        ) from error


def _configured(settings: ChatSettings, config: ChatConfig) -> ChatSettings:
    """Changed by the settings file. Raises ConfigError that names it."""
    from starsd_edge.config import config_path

    try:
        return _settings(settings, config.settings.items())
    except UsageError as error:
        raise ConfigError(f"{config_path()}: {error}") from error


def _settings(settings: ChatSettings, wanted: Iterable[tuple[str, object]]) -> ChatSettings:
    """Changed by everything that is not None, later ones last."""
    from starsd_edge.chat.settings import change_setting

    for name, value in wanted:
        if value is not None:
            text = {True: "on", False: "off"}[value] if isinstance(value, bool) else str(value)
            settings = change_setting(settings, name, text)
    return settings


def _pairs(changes: Iterable[str]) -> list[tuple[str, str]]:
    pairs = []
    for change in changes:
        name, equals, value = change.partition("=")
        if not equals:
            raise UsageError(f"--set takes NAME=VALUE, not {change!r}")
        pairs.append((name.strip(), value))
    return pairs


def _answer_once(
    conversation: Conversation, question: str, report: Callable[[str], None], *, as_json: bool
) -> None:
    from starsd_edge.chat.answer import FinishReason
    from starsd_edge.chat.once import answer_once
    from starsd_edge.chat.status import LinkState, link_words

    try:
        reason = answer_once(conversation, question, sys.stdout, as_json=as_json)
        if (link := conversation.link()).state in (LinkState.LOST, LinkState.BLOCKED):
            report(link_words(link))
    except BrokenPipeError:
        # Whoever read our output has seen enough. Nothing may be written at exit either.
        _write_no_more()
        return
    except OSError as error:
        _write_no_more()
        raise ResourceError(f"the answer cannot be written: {error.strerror}") from error
    if reason is FinishReason.CANCELLED:
        raise KeyboardInterrupt


def _write_no_more() -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _interact(conversation: Conversation, question: str | None, *, quiet: bool, history: bool) -> None:
    from starsd_edge.chat.repl import Repl
    from starsd_edge.chat.show import Look
    from starsd_edge.config import state_dir

    look = Look(
        sys.stdout,
        live=sys.stdout.isatty() and os.environ.get("TERM") != "dumb",
        colour=not os.environ.get("NO_COLOR"),
        quiet=quiet,
    )
    Repl(conversation, look, state_dir() if history else None).run(question)


def _banner(backend: Backend, server: str | None) -> str:
    """What this chat uses. The draft service is the status line's business."""
    parts = [backend.model, f"{backend.max_len} tokens"]
    if server is not None:
        parts.append(f"served at {server}")
    return " · ".join([*parts, "/help"])


def _report(line: str) -> None:
    """What happens before the chat begins; not part of any answer."""
    click.echo(click.style(line, dim=True), err=True)


def _silent(line: str) -> None:
    pass
