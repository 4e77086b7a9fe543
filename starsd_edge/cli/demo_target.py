"""`starsd demo-target`: one target process of the demo; asked on stdin, answers on stdout. Not for people."""

from __future__ import annotations

import sys
import time

import click
import msgspec

from starsd_edge.cli.drafts import find_draft_service
from starsd_edge.cli.runtime import ModelChoice, measured_curve, open_bundle, prompt_writer, target_class
from starsd_edge.decoding.costs import CostCurve, load_profile
from starsd_edge.decoding.policy import AdaptivePolicy
from starsd_edge.decoding.roles import Target
from starsd_edge.demo.target_process import DemoTarget
from starsd_edge.demo.wire import Ask, Ready, Reply
from starsd_edge.testing import EmulatedTarget

__all__ = ["command"]

CURVE_POINTS = (1, 2, 4, 8, 16, 32, 64)  # what is told of the curve


@click.command(hidden=True)
@click.option("--quant", required=True)
@click.option("--threads", type=int, required=True)
@click.option("--service", required=True)
@click.option("--profile")
def command(quant: str, threads: int, service: str, profile: str | None) -> None:
    """A target of `starsd demo`."""
    bundle = open_bundle(ModelChoice(quant=quant), lambda _line: None)
    manifest = bundle.manifest
    target: Target = target_class(manifest).load(bundle, threads)
    curve = measured_curve(target)
    emulated: EmulatedTarget | None = None
    if profile:
        target = emulated = EmulatedTarget(target, load_profile(profile), time.monotonic, time.sleep)
        curve = emulated.profile.curve
    drafts = find_draft_service(service, None)
    assert drafts is not None
    drafter = drafts.open_drafter(manifest, curve, manifest.max_len)
    demo = DemoTarget(
        target=target,
        writer=prompt_writer(bundle),
        stop_tokens=frozenset(manifest.stop_tokens),
        drafter=drafter,
        policy=AdaptivePolicy(curve),
        overruns=lambda: emulated.num_overruns if emulated else 0,
    )
    try:
        say(Ready(manifest.flavour, quant, points(curve)))
        for line in sys.stdin:
            for reply in demo.answer(msgspec.json.decode(line, type=Ask)):
                say(reply)
    finally:
        drafter.close()


def points(curve: CostCurve) -> dict[int, float]:
    return {n: curve(n) for n in CURVE_POINTS}


def say(reply: Reply) -> None:
    sys.stdout.write(msgspec.json.encode(reply).decode() + "\n")
    sys.stdout.flush()
