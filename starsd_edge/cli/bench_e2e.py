"""`starsd bench e2e`: questions of a file, answered plainly and with a draft service; peers beside them."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from pathlib import Path

import click
from rich import box
from rich.console import Console
from rich.table import Table

from starsd_edge.bench.e2e import Answer, Answerer, Question, Report, compare, read_questions, summarise
from starsd_edge.bench.report import json_option, write_json
from starsd_edge.cli.bench_peers import PEERS, Generated, Generator, open_peer
from starsd_edge.cli.drafts import find_draft_service
from starsd_edge.cli.runtime import (
    EMBEDDED,
    ModelChoice,
    measured_curve,
    open_board,
    open_bundle,
    prompt_writer,
    target_class,
)
from starsd_edge.decoding.decoder import Decoder
from starsd_edge.decoding.policy import AdaptivePolicy, PlainPolicy
from starsd_edge.decoding.sampling import SamplingParams
from starsd_edge.errors import UnreachableError, UsageError
from starsd_edge.text.prompt import PromptWriter
from starsd_edge.text.template import Message, Role

__all__ = ["command", "converse", "greedy"]

READY_WAIT_S = 60.0
PLAIN, DRAFTED = "plain", "StarSD"


@click.command("e2e")
@click.option(
    "--prompts", required=True, type=click.Path(path_type=Path), help="JSONL: question_id, category, turns."
)
@click.option("--service", required=True, help="tcp://HOST:PORT of a running draft service.")
@click.option("--keys", type=click.Path(path_type=Path), help="Keys folder, off this machine.")
@click.option("--bundle", default=EMBEDDED, show_default=True, help="The target.")
@click.option("--quant", help="Of the embedded model.")
@click.option("--threads", type=click.IntRange(1), help="CPU threads of the target.")
@click.option("--max-tokens", default=256, show_default=True, type=click.IntRange(1), help="Of an answer.")
@click.option("--limit", type=click.IntRange(1), help="Questions of each category; all without it.")
@click.option("--turns", default=2, show_default=True, type=click.IntRange(1), help="Of a question, at most.")
@click.option(
    "--peer",
    "peers",
    multiple=True,
    type=click.Choice(list(PEERS)),
    help="Run beside, in every way it has without a second model.",
)
@json_option
def command(
    prompts: Path,
    service: str,
    keys: Path | None,
    bundle: str,
    quant: str | None,
    threads: int | None,
    max_tokens: int,
    limit: int | None,
    turns: int,
    peers: tuple[str, ...],
    json_file: Path | None,
) -> None:
    """Tokens per second, speed-up and acceptance length per category, on questions such as Spec-Bench's.

    Greedy, one question at a time, every way of decoding in turn on the same model. One question is answered
    every way before it counts.
    """
    questions = [
        Question(each.number, each.category, each.turns[:turns]) for each in read_questions(prompts, limit)
    ]
    opened = open_bundle(ModelChoice(bundle, quant, threads), lambda line: click.echo(line, err=True))
    manifest, stop = opened.manifest, frozenset(opened.manifest.stop_tokens)
    runtime = target_class(manifest)
    drafts = find_draft_service(service, keys)
    assert drafts is not None
    with ExitStack() as stack:
        first = runtime.load(opened, threads)
        curve = measured_curve(first)
        drafter = stack.enter_context(closing(drafts.open_drafter(manifest, curve, manifest.max_len)))
        state = drafter.wait_until_ready(READY_WAIT_S)
        if not state.ready:
            raise UnreachableError(f"{service} does not draft: {state.reason}")
        plain = Decoder(first, None, PlainPolicy(), time.monotonic)
        drafted = Decoder(runtime(opened, first.session), drafter, AdaptivePolicy(curve), time.monotonic)
        generators = {PLAIN: greedy(plain, stop), DRAFTED: greedy(drafted, stop)}
        for peer in peers:
            if bundle != EMBEDDED:
                raise UsageError("--peer compares the embedded model's GGUF file: leave out --bundle")
            gguf: Path = importlib.import_module("starsd_jetson.embedded").gguf_path()
            generators |= open_peer(peer, gguf, stop, threads)
        writer = prompt_writer(opened)
        room = manifest.max_len
        board = stack.enter_context(closing(open_board()))
        ways: dict[str, Answerer] = {
            name: converse(writer, generate, max_tokens, room, stop, board.joules)
            for name, generate in generators.items()
        }
        for way in ways.values():
            way(questions[0])
        compared = []
        for each in compare(questions, ways):
            compared.append(each)
            click.echo(f"{len(compared)}/{len(questions)} {each.question.category}", err=True)
        decoding = {"decoding": drafted.stats.as_dict()}
    report = summarise(compared, PLAIN)
    Console().print(table_of(report))
    facts = {"prompts": prompts.name, "model": manifest.identity.name, "max_tokens": max_tokens}
    write_json(json_file, {**facts, **decoding, **report.as_dict()})


def greedy(decoder: Decoder, stop: frozenset[int]) -> Generator:
    """What a decoder answers. Its cache keeps what prompts share, as a chat's does."""

    def generate(prompt: Sequence[int], max_tokens: int) -> Generated:
        started_s, first_s, tokens, rounds = time.monotonic(), 0.0, [], -1
        for committed in decoder.generate(prompt, SamplingParams(), max_tokens, stop):
            first_s = first_s or time.monotonic() - started_s
            tokens += committed.tokens
            rounds += 1
        return Generated(tokens, first_s, rounds)

    return generate


def converse(
    writer: PromptWriter,
    generate: Generator,
    max_tokens: int,
    max_len: int,
    stop: frozenset[int],
    joules: Callable[[], float | None] = lambda: None,
) -> Answerer:
    """Ask the turns of a question one after the other, with the answers between them.

    A prompt that leaves no room for an answer is cut at its front, as Spec-Bench does for small contexts.
    """

    def answer(question: Question) -> Answer:
        messages: list[Message] = []
        tokens: list[int] = []
        seconds, rounds = 0.0, 0
        first_token_s: float | None = None
        before = joules()
        for turn in question.turns:
            messages.append(Message(Role.USER, turn))
            prompt = writer.write(messages).tokens[-(max_len - max_tokens) :]
            started_s = time.monotonic()
            generated = generate(prompt, max_tokens)
            seconds += time.monotonic() - started_s
            first_token_s = generated.first_token_s if first_token_s is None else first_token_s
            tokens += generated.tokens
            rounds += generated.rounds
            said = [token for token in generated.tokens if token not in stop]
            messages.append(Message(Role.ASSISTANT, writer.tokenizer.decode(said)))
        after = joules()
        spent = after - before if after is not None and before is not None else None
        return Answer(tokens, seconds, first_token_s, rounds, spent)

    return answer


def table_of(report: Report) -> Table:
    table = Table(
        title="tokens per second of whole answers, mean over questions", box=box.SIMPLE, padding=(0, 1, 0, 0)
    )
    for column in ("way", "category"):
        table.add_column(column, no_wrap=True)
    numbers = ["n", "tok/s", f"x {report.baseline}", "accept. length", "same text", "first token ms"]
    measured = any(row.joules_per_token is not None for row in report.rows)
    for column in numbers + ["J/token"] * measured:
        table.add_column(column, justify="right")
    for row in report.rows:
        length = "" if row.acceptance_length is None else f"{row.acceptance_length:.2f}"
        table.add_row(
            row.way,
            row.category,
            str(row.questions),
            f"{row.tokens_per_s:.1f}",
            f"{row.speedup:.2f}",
            length,
            f"{row.identical}/{row.questions}",
            "-" if row.first_token_ms is None else f"{row.first_token_ms:.0f}",
            *([f"{row.joules_per_token:.2f}" if row.joules_per_token is not None else "-"] * measured),
        )
    return table
