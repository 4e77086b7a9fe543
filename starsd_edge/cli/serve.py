"""`starsd serve`: the model of this device behind OpenAI's API."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import click

from starsd_edge.cli.model_options import model_options
from starsd_edge.defaults import DRAIN_S, ENDPOINT_PORT, MAX_DRAIN_S
from starsd_edge.errors import ConfigError, UsageError
from starsd_edge.ranges import FiniteRange

if TYPE_CHECKING:
    from starsd_edge.chat.speaker import Speaker

__all__ = ["command"]

LINK_LOOK_S = 1.0  # a service that is there answers the first greeting within this


@click.command()
@model_options
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", default=ENDPOINT_PORT, show_default=True, type=click.IntRange(0, 65535))
@click.option(
    "--api-key-file",
    type=click.Path(path_type=Path, dir_okay=False),
    help="File with the key that clients must send; $STARSD_API_KEY holds one too. Needed off loopback.",
)
@click.option("--tls-cert", type=click.Path(path_type=Path, dir_okay=False), help="Certificate chain, PEM.")
@click.option(
    "--tls-key", type=click.Path(path_type=Path, dir_okay=False), help="Its key. Both off loopback."
)
@click.option("--cors-origin", "origins", multiple=True, help="Web page origin that may ask; repeatable.")
@click.option(
    "--max-waiting",
    default=16,
    show_default=True,
    type=click.IntRange(1),
    help="Requests that may wait; more are told to come again.",
)
@click.option(
    "--conversations",
    default=2,
    show_default=True,
    type=click.IntRange(1),
    help="Conversations whose KV cache is kept.",
)
@click.option(
    "--drain",
    "drain_s",
    default=DRAIN_S,
    show_default=True,
    type=FiniteRange(0, MAX_DRAIN_S),
    metavar="SECONDS",
    help="For answers under way when it is told to stop.",
)
def command(
    bundle: str | None,
    quant: str | None,
    threads: int | None,
    provider: str | None,
    context: int | None,
    service: str | None,
    draft: str,
    keys: Path | None,
    host: str,
    port: int,
    api_key_file: Path | None,
    tls_cert: Path | None,
    tls_key: Path | None,
    origins: tuple[str, ...],
    max_waiting: int,
    conversations: int,
    drain_s: float,
) -> None:
    """Serve the model to programs that speak OpenAI's API.

    Base URL for them: http://127.0.0.1:8642/v1
    """
    import time

    from starsd_edge.chat.settings import ChatSettings
    from starsd_edge.cli.drafts import find_draft_service
    from starsd_edge.cli.runtime import ModelChoice, default_sampling, open_bundle, open_speaker
    from starsd_edge.config import read_config
    from starsd_edge.endpoint.app import Endpoint
    from starsd_edge.endpoint.guard import Guard
    from starsd_edge.endpoint.server import Tls, check_exposure, check_tls, open_socket, serve
    from starsd_edge.endpoint.worker import Worker

    config = read_config().chat
    api_key = _api_key(api_key_file)
    if (tls_cert is None) != (tls_key is None):
        raise UsageError("--tls-cert and --tls-key go together")
    tls = Tls(tls_cert, tls_key) if tls_cert and tls_key else None
    check_exposure(host, api_key, tls)
    if tls is not None:
        check_tls(tls)
    drafts = find_draft_service(service or config.service, keys)
    choice = ModelChoice(bundle or config.bundle or "embedded", quant, threads, context, provider)
    with open_socket(host, port) as listener:
        opened = open_bundle(choice, _report)
        speaker = open_speaker(
            opened, choice, drafts, report=_report, max_contexts=conversations, draft=draft
        )
        worker = Worker(speaker, max_waiting)
        endpoint = Endpoint(
            worker=worker,
            model_id=speaker.model,
            defaults=ChatSettings(sampling=default_sampling(opened.manifest, seed=0), draft=draft != "off"),
            guard=Guard(api_key, origins),
            created=int(time.time()),
        )
        name, number = listener.getsockname()[:2]
        shown = f"[{name}]" if ":" in name else name
        url = f"{'https' if tls else 'http'}://{shown}:{number}/v1"
        ended = threading.Event()
        threading.Thread(target=_tell_link, args=(speaker, ended), daemon=True).start()
        try:
            serve(endpoint, listener, tls, lambda: _report(f"{speaker.model} at {url}"), drain_s)
        finally:
            ended.set()
            worker.close()
            speaker.close()


def _tell_link(speaker: Speaker, ended: threading.Event) -> None:
    """Say how the draft service stands, and again when it comes or goes, or takes a context no more."""
    from starsd_edge.chat.status import LinkState, link_words

    told: tuple[bool, bool] | None = None
    while not ended.wait(LINK_LOOK_S):
        link = speaker.link()
        stands = (link.state.is_linked, link.state is LinkState.BLOCKED)
        if stands != told:
            told = stands
            _report(link_words(link))


def _api_key(file: Path | None) -> str:
    if file is None:
        return os.environ.get("STARSD_API_KEY", "")
    try:
        key = file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} cannot be read: {getattr(error, 'strerror', error)}") from error
    if not key:
        raise ConfigError(f"{file} holds no key")
    return key


def _report(line: str) -> None:
    click.echo(line, err=True)
