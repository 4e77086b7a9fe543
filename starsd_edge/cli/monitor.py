"""`starsd monitor`: every link of the star in one terminal; the same figures for scripts; recordings."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable
from pathlib import Path

import click

from starsd_edge.errors import UsageError
from starsd_edge.link.address import MONITOR_PORT, is_port, monitor_address, monitor_of
from starsd_edge.link.keys import key_dir
from starsd_edge.link.pins import edge_keys, is_host, pinned_services
from starsd_edge.monitor.feed import Feed, Source, WatchKeys, ZmqFeed
from starsd_edge.monitor.link_state import LinkState
from starsd_edge.monitor.model import Model, ServiceModel
from starsd_edge.monitor.recording import Recorder, ReplayFeed
from starsd_edge.monitor.report import Format, report
from starsd_edge.ranges import FiniteRange

__all__ = ["command"]

DEFAULT_ENDPOINT = f"tcp://127.0.0.1:{MONITOR_PORT}"
LONGEST_WAIT_S = 10.0  # of --once, for a service that says nothing
POLL_S = 0.2


class MonitorGroup(click.Group):
    """Sub-commands, and without one of their names: watch."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if not args or (args[0] not in self.commands and args[0] not in ("-h", "--help")):
            args = ["watch", *args]
        return super().parse_args(ctx, args)


@click.group(cls=MonitorGroup, context_settings={"help_option_names": ["-h", "--help"]})
def command() -> None:
    """Watch draft services and their devices.

    `starsd monitor [SERVICE]...` is short for `starsd monitor watch`. A SERVICE is an address
    (tcp://host:port, host:port, host), or the name of a pinned service; without any: the one on this
    machine. Press ? for help.
    """


services_argument = click.argument("services", nargs=-1, metavar="[SERVICE]...")
keys_option = click.option(
    "--keys", type=click.Path(path_type=Path), help="Keys folder, if not the usual one."
)
format_options = [
    click.option("--json", "form", flag_value=Format.JSON, type=Format, help="For scripts."),
    click.option("--csv", "form", flag_value=Format.CSV, type=Format, help="Devices, one a line."),
    click.option("--markdown", "form", flag_value=Format.MARKDOWN, type=Format, help="For bug reports."),
]


def with_format(function: Callable[..., None]) -> Callable[..., None]:
    for option in reversed(format_options):
        function = option(function)
    return function


@command.command("watch")
@services_argument
@keys_option
@click.option(
    "--once", is_flag=True, help="Print the figures of --for seconds and leave; 1 where no service is heard."
)
@click.option("--for", "seconds", default=2.0, show_default=True, type=FiniteRange(1.0, 3600.0))
@with_format
@click.option("--ascii", "ascii_only", is_flag=True, help="No block characters.")
def watch(
    services: tuple[str, ...],
    keys: Path | None,
    once: bool,
    seconds: float,
    form: Format | None,
    ascii_only: bool,
) -> None:
    """Watch in the terminal, or print the figures once."""
    if form is not None and not once:
        raise UsageError("--json, --csv and --markdown go with --once, or with `starsd monitor stream`")
    with opened(ZmqFeed(sources_of(services, keys))) as feed:
        if once:
            model = observe(feed, seconds)
            click.echo(report(model, float("inf"), form or Format.MARKDOWN))
            if not any(service.kept for service in model.services):
                raise SystemExit(1)  # said above, with the reason
        else:
            show(feed, ascii_only=ascii_only)


@command.command("stream", short_help="Print the figures again and again, as JSON or CSV.")
@services_argument
@keys_option
@with_format
@click.option("--every", default=1.0, show_default=True, type=FiniteRange(0.5, 3600.0), help="Seconds.")
@click.option("--count", type=click.IntRange(1), help="Reports; without it until Ctrl-C.")
def stream(
    services: tuple[str, ...], keys: Path | None, form: Format | None, every: float, count: int | None
) -> None:
    """Print the figures again and again: a line of JSON each time, or CSV lines."""
    with opened(ZmqFeed(sources_of(services, keys))) as feed:
        model, printed = Model.of(feed.names), 0
        while count is None or printed < count:
            gather(feed, model, every)
            click.echo(report(model, max(every, 2.0), form or Format.JSON, head=printed == 0))
            printed += 1


@command.command("record")
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False))
@services_argument
@keys_option
@click.option("--for", "seconds", type=FiniteRange(1.0), help="Seconds; without it until Ctrl-C.")
def record(file: Path, services: tuple[str, ...], keys: Path | None, seconds: float | None) -> None:
    """Write down what a monitor sees, for a bug report. *.gz is compressed.

    A recording holds names, addresses and fingerprints, no keys and nothing of any text.
    """
    with opened(ZmqFeed(sources_of(services, keys))) as feed:
        start_s, number = time.monotonic(), 0
        recorder = Recorder(file, feed.names, start_s)
        try:
            with contextlib.suppress(KeyboardInterrupt):
                while seconds is None or time.monotonic() - start_s < seconds:
                    for arrival in feed.poll(POLL_S):
                        recorder.snapshot(arrival)
                        number += 1
                    recorder.links(feed.links, time.monotonic())
        finally:
            recorder.close()
    click.echo(f"{file}: {number} snapshots; show it with: starsd monitor replay {file}")


@command.command("replay")
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False))
@click.option("--speed", default=1.0, show_default=True, type=FiniteRange(0.01, 1000.0))
@click.option("--once", is_flag=True, help="Print the figures of the whole recording and leave.")
@with_format
@click.option("--ascii", "ascii_only", is_flag=True, help="No block characters.")
def replay(file: Path, speed: float, once: bool, form: Format | None, ascii_only: bool) -> None:
    """Show a recording."""
    if not once:
        with opened(ReplayFeed(file, speed=speed)) as feed:
            show(feed, ascii_only=ascii_only)
        return
    recording = ReplayFeed(file, speed=float("inf"))
    model = Model.of(recording.names)
    while not recording.ended:
        for arrival in recording.poll(0.0):
            model.take(arrival.source, arrival.snapshot, arrival.num_bytes)
        model.note_links(recording.links)
    recording.close()
    click.echo(report(model, float("inf"), form or Format.MARKDOWN))


@command.command("export", short_help="Serve the figures to a Prometheus on this machine.")
@services_argument
@keys_option
@click.option(
    "--listen", default="127.0.0.1:9464", show_default=True, help="Loopback only; port 0: any free."
)
def export(services: tuple[str, ...], keys: Path | None, listen: str) -> None:
    """Serve the figures to a Prometheus on this machine, at http://LISTEN/metrics."""
    from starsd_edge.monitor.exporter import Exporter

    host, _, port = listen.rpartition(":")
    if not host or not is_port(port, 0):
        raise UsageError(f"--listen {listen}: give HOST:PORT, port 0 to 65535")
    with opened(ZmqFeed(sources_of(services, keys))) as feed:
        exporter = Exporter(feed, host.strip("[]"), int(port))
        click.echo(f"http://{host}:{exporter.port}/metrics")
        with contextlib.suppress(KeyboardInterrupt):
            exporter.run()


@command.command("figures", short_help="Print what every number means (Markdown).")
def figures() -> None:
    """Print what every number means, and the metrics for Prometheus (Markdown)."""
    from starsd_edge.monitor.definitions import definitions_page

    click.echo(definitions_page(), nl=False)


def opened(feed: Feed) -> contextlib.AbstractContextManager[Feed]:
    return contextlib.closing(feed)


def show(feed: Feed, *, ascii_only: bool) -> None:
    """The screen. Raises UsageError where there is no terminal."""
    from starsd_edge.monitor.app import run
    from starsd_edge.monitor.terminal import Terminal, wants_colour

    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise UsageError("this is no terminal: use --once, or starsd monitor stream")
    blocks = "utf" in (sys.stdout.encoding or "").lower()
    run(feed, Terminal(colour=wants_colour()), ascii_only=ascii_only or not blocks)


def observe(feed: Feed, seconds: float) -> Model:
    """What is known after the first `seconds` in which every service was heard, or of what came instead."""
    model = Model.of(feed.names)
    deadline_s = time.monotonic() + LONGEST_WAIT_S
    while any(undecided(service) for service in model.services) and time.monotonic() < deadline_s:
        gather(feed, model, POLL_S)
    if any(service.kept for service in model.services):
        gather(feed, model, seconds)
    return model


def undecided(service: ServiceModel) -> bool:
    """Neither heard nor known to be silent for a reason."""
    return not service.kept and service.link.state in (LinkState.CONNECTING, LinkState.UP)


def gather(feed: Feed, model: Model, seconds: float) -> None:
    """Feed the model for so long."""
    end_s = time.monotonic() + seconds
    while (left_s := end_s - time.monotonic()) > 0:
        for arrival in feed.poll(min(left_s, POLL_S)):
            model.take(arrival.source, arrival.snapshot, arrival.num_bytes)
        model.note_links(feed.links)


def sources_of(services: tuple[str, ...], keys: Path | None) -> list[Source]:
    """Where to look: each service by address or pinned name, with the keys for it."""
    folder = keys or key_dir()
    return [source_of(service, folder) for service in services or (DEFAULT_ENDPOINT,)]


def source_of(service: str, folder: Path) -> Source:
    """Raises UsageError or ConfigError where the address or a key is missing."""
    pin = next((pin for pin in pinned_services(folder) if pin.name == service), None)
    if pin is not None and not pin.address and not is_host(service):
        raise UsageError(
            f"{service} is pinned without an address, and no host has that name: watch HOST:PORT, or "
            f"`starsd keys pin {service} KEY --address HOST:PORT`"
        )
    endpoint = monitor_of(pin.address) if pin is not None and pin.address else monitor_address(service)
    edge = edge_keys(endpoint, pin.public if pin else None, folder)
    watch_keys = None
    if edge is not None:
        own = edge.own
        watch_keys = WatchKeys(own.key.public.encode(), own.secret.encode(), edge.service.encode())
    return Source(service.removeprefix("tcp://"), endpoint, watch_keys)
