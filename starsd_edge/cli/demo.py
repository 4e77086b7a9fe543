"""`starsd demo`: plain against StarSD decoding on real prompts, in real processes on this machine.

Two timings. This machine's own: the two targets take turns, so that one target and the service have the
machine to themselves while they are measured. And an accelerator's: the targets run at the same time, each
holding its answers back until the profile's verify time has passed; everything but that time is real.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import resources
from pathlib import Path

import click
from rich.console import Console
from rich.progress import Progress

from starsd_edge.bench.report import json_option, write_json
from starsd_edge.bundle import Bundle
from starsd_edge.chat.wrap import Style, StyledText, Wrapper
from starsd_edge.cli.runtime import ModelChoice, model_name, open_bundle
from starsd_edge.decoding.costs import load_profile, profile_names
from starsd_edge.demo.processes import DraftService, TargetProcess
from starsd_edge.demo.report import Comparison, Summary, as_json, as_table, remarks, summarise
from starsd_edge.demo.wire import Ask, Mode, Piece
from starsd_edge.errors import StarSDError
from starsd_edge.machine import describe_machine

__all__ = ["command"]

THIS_MACHINE = "this machine"
ACCELERATOR = "agx-orin-fp16"
NUM_TARGETS = 2
WARM_UP_TOKENS = 8  # first passes bind buffers and open the link; they are not measured


@click.command()
@click.option(
    "--profile",
    type=click.Choice([THIS_MACHINE, *profile_names()]),
    help=f"Timing to show; by default this machine's own, then {ACCELERATOR}, emulated.",
)
@click.option("--prompts", "num_prompts", type=click.IntRange(1), help="How many prompts; by default all.")
@click.option("--max-tokens", type=click.IntRange(2), default=64, show_default=True, help="Of each answer.")
@click.option(
    "--quant",
    type=click.Choice(["fp32", "int8", "int4", "int4-exact"]),
    default="int8",
    show_default=True,
    help="Weights.",
)
@click.option("--threads", type=click.IntRange(1), default=1, show_default=True, help="Of each target.")
@click.option(
    "--head", type=click.Path(path_type=Path), help="Draft head to use instead of the embedded one."
)
@json_option
def command(
    profile: str | None,
    num_prompts: int | None,
    max_tokens: int,
    quant: str,
    threads: int,
    head: Path | None,
    json_file: Path | None,
) -> None:
    """Show what StarSD does: a draft service, two targets, plain against StarSD decoding."""
    for number in (signal.SIGTERM, signal.SIGHUP):  # its processes end with it, as after Ctrl-C
        signal.signal(number, signal.default_int_handler)
    console = Console()
    prompts = load_prompts()[:num_prompts]
    machine = describe_machine()
    console.print(
        f"machine: {machine['cpu']}, {machine['cores']} cores, {machine['memory_gib']} GiB, no GPU used"
    )
    choice = ModelChoice(quant=quant)
    bundle = open_bundle(choice, lambda line: console.print(f"[dim]{line}[/dim]"))
    console.print(f"model: {model_name(choice)}, {quant}, {bundle.path}", soft_wrap=True)
    summaries: list[Summary] = []
    with DraftService(head_options(head, bundle)) as service:
        console.print(f"draft service: {service.address}")
        for name in [profile] if profile else [THIS_MACHINE, ACCELERATOR]:
            args = ["--quant", quant, "--threads", str(threads), "--service", service.address]
            if name != THIS_MACHINE:
                args += ["--profile", name]
                console.print(f"\n[bold]{name}[/bold], emulated: {load_profile(name).source}")
            summaries.append(measure(console, name, args, prompts, max_tokens))
    console.print()
    console.print(as_table(summaries))
    for summary in summaries:
        for line in remarks(summary):
            console.print(line)
    write_json(json_file, figures_of(summaries))
    if any(summary.identical != summary.prompts for summary in summaries):
        raise StarSDError(
            "a text differed between plain and StarSD decoding: that is a bug, please report it"
        )


def head_options(head: Path | None, bundle: Bundle) -> list[str]:
    return ["--target", str(bundle.path), *(["--head", str(head)] if head else [])]


def measure(
    console: Console, name: str, args: Sequence[str], prompts: Sequence[str], max_tokens: int
) -> Summary:
    console.print("[dim]loading two targets[/dim]")
    with TargetProcess(args) as first, TargetProcess(args) as second:
        targets = [first, second]
        at_once = NUM_TARGETS if name != THIS_MACHINE else 1
        for target in targets:
            for mode in Mode:
                target.ask(Ask(prompt="Hello!", mode=mode, max_tokens=WARM_UP_TOKENS))
        stream(console, first, prompts[0], max_tokens)
        with Progress(console=console, transient=True) as progress, ThreadPoolExecutor(at_once) as pool:
            task = progress.add_task(f"{name}: {len(prompts)} prompts, plain and StarSD", total=len(prompts))

            def compare_all(target: TargetProcess, share: Sequence[int]) -> list[tuple[int, Comparison]]:
                done = []
                for index in share:
                    done.append(
                        (index, compare(target, prompts[index], max_tokens, starsd_first=index % 2 == 1))
                    )
                    progress.advance(task)
                return done

            shares = [range(k, len(prompts), NUM_TARGETS) for k in range(NUM_TARGETS)]
            results = [pair for pairs in pool.map(compare_all, targets, shares) for pair in pairs]
    return summarise(name, [comparison for _, comparison in sorted(results, key=lambda pair: pair[0])])


def compare(target: TargetProcess, prompt: str, max_tokens: int, *, starsd_first: bool) -> Comparison:
    """Plain and StarSD on one prompt, one right after the other; which comes first alternates."""
    order = [Mode.STARSD, Mode.PLAIN] if starsd_first else [Mode.PLAIN, Mode.STARSD]
    answers = {
        mode: target.ask(Ask(prompt=prompt, mode=mode, max_tokens=max_tokens)).answer for mode in order
    }
    return Comparison(prompt, answers[Mode.PLAIN], answers[Mode.STARSD])


def stream(console: Console, target: TargetProcess, prompt: str, max_tokens: int) -> None:
    """One answer as a user sees it; what drafting settled in one pass is coloured."""
    colour = console.is_terminal and not console.no_color
    console.print(f"\n[bold]> {prompt}[/bold]")
    if colour:
        console.print("[dim](in colour: several tokens from one pass)[/dim]")
    wrapper = Wrapper(console.width, colour=colour)

    def show(piece: Piece) -> None:
        style = Style(colour=piece.num_tokens > 1)
        first, *others = piece.text.split("\n")
        out = wrapper.push(StyledText(first, style))
        for line in others:
            out += wrapper.newline() + wrapper.push(StyledText(line, style))
        console.file.write(out)
        console.file.flush()

    target.ask(Ask(prompt=prompt, mode=Mode.STARSD, max_tokens=max_tokens, stream=True), show)
    console.file.write(wrapper.flush())
    console.print("\n")


def load_prompts() -> list[str]:
    text = resources.files("starsd_edge.cli").joinpath("demo_prompts.json").read_text(encoding="utf-8")
    prompts: list[str] = json.loads(text)
    return prompts


def figures_of(summaries: Sequence[Summary]) -> dict[str, object]:
    """The first timing's figures at the top; a second one's under "emulated"."""
    figures = as_json(summaries[0])
    if len(summaries) > 1:
        figures["emulated"] = as_json(summaries[1])
    return figures
