"""`starsd bench record`: traces for `starsd bench policy`, from the embedded model and a running service."""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path

import click

from starsd_edge.bench.recorder import CHAT, COPY, record, save
from starsd_edge.bench.result_files import result_option, unwritten
from starsd_edge.cli.drafts import find_draft_service
from starsd_edge.cli.runtime import ModelChoice, open_bundle, prompt_writer, target_class
from starsd_edge.decoding.costs import CostCurve
from starsd_edge.errors import UnreachableError
from starsd_edge.text.template import Message, Role

__all__ = ["command"]

READY_WAIT_S = 30.0
# As if nodes cost nothing: the service keeps them all.
FREE_NODES = CostCurve((1, 64), (1.0, 1.0))


@click.command(name="record")
@click.option("--service", required=True, help="tcp://HOST:PORT of a draft service on this machine.")
@click.option("--quant", default="fp32", show_default=True, help="Of the embedded model.")
@click.option("--threads", default=1, show_default=True, type=click.IntRange(1))
@click.option(
    "--tokens", default=160, show_default=True, type=click.IntRange(1), help="Of each answer, at most."
)
@result_option("--out", "out", "An .npz file.", required=True)
def command(service: str, quant: str, threads: int, tokens: int, out: Path) -> None:
    """Answer prompts plainly and keep the tree that the service drafts at every token.

    The demo's prompts, and some whose answers repeat much of the prompt.
    """
    drafts = find_draft_service(service, None)
    assert drafts is not None
    bundle = open_bundle(ModelChoice(quant=quant), lambda _line: None)
    manifest = bundle.manifest
    target = target_class(manifest).load(bundle, threads)
    drafter = drafts.open_drafter(manifest, FREE_NODES, manifest.max_len)
    prompts = [(CHAT, text) for text in _prompts("starsd_edge.cli", "demo_prompts.json")]
    prompts += [(COPY, text) for text in _prompts("starsd_edge.bench", "copy_prompts.json")]
    writer, stop = prompt_writer(bundle), frozenset(manifest.stop_tokens)
    traces = []
    try:
        state = drafter.wait_until_ready(READY_WAIT_S)
        if not state.ready:
            raise UnreachableError(f"{service} does not draft: {state.reason}")
        for kind, prompt in prompts:
            ids = list(writer.write([Message(Role.USER, prompt)]).tokens)
            target.truncate(0)
            traces.append(record(kind, target, drafter, ids, tokens, stop))
            click.echo(f"{len(traces[-1].answer)} tokens: {prompt[:60]}")
    finally:
        drafter.close()
    with unwritten(out):
        save(traces, out)


def _prompts(package: str, file: str) -> list[str]:
    texts: list[str] = json.loads((resources.files(package) / file).read_text("utf-8"))
    return texts
