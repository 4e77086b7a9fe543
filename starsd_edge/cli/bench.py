"""`starsd bench`: benchmarks, each a sub-command loaded when called."""

from __future__ import annotations

import click

from starsd_edge.cli.main import CommandEntry, LazyGroup

__all__ = ["BENCHES", "command"]

BENCHES: dict[str, CommandEntry] = {
    "demo": CommandEntry("starsd_edge.cli.demo", "Plain against StarSD on ten chat prompts."),
    "service": CommandEntry("starsd_server.emulate.cli", "1 to 64 emulated targets against a draft service."),
    "head": CommandEntry("starsd_server.emulate.large_head", "A random head of Vicuna-7B's shape: memory."),
    "fleet": CommandEntry(
        "starsd_server.capacity.fleet_cli", "Thousands of devices, many services, failures."
    ),
    "paper": CommandEntry("starsd_server.capacity.paper_cli", "The StarSD paper's claims as experiments."),
    "target": CommandEntry("starsd_jetson.bench_target", "A model on this machine: speed, trees, memory."),
    "context": CommandEntry("starsd_edge.cli.bench_context", "Time to first token as a conversation grows."),
    "transfer": CommandEntry("starsd_deploy.bench.transfer", "Uploads to a device, beside OpenSSH."),
    "record": CommandEntry("starsd_edge.cli.bench_record", "Record traces for `policy` from a real service."),
    "e2e": CommandEntry("starsd_edge.cli.bench_e2e", "Questions of a file with a running service; peers."),
    "policy": CommandEntry("starsd_edge.bench.policy_cli", "When to wait, how large a tree: 600 conditions."),
    "ahead": CommandEntry("starsd_server.emulate.ahead_cli", "What drafting ahead brings, in virtual time."),
    "monitor": CommandEntry("starsd_edge.bench.monitor_cli", "What watching 50 devices costs."),
    "link": CommandEntry("starsd_edge.bench.link_cli", "What the link costs, against a bare encrypted echo."),
}


@click.group(name="bench", cls=LazyGroup, entries=BENCHES)
def command() -> None:
    """Measure this project, on this machine or in virtual time."""
