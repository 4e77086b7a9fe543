"""`starsd ping`: is the draft service there, and how long does an answer take?"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import click

from starsd_edge.link.ping import Percentiles, PingReport, PingSample, measure_link
from starsd_edge.link.pins import edge_keys, service_address
from starsd_edge.ranges import FiniteRange


@click.command()
@click.argument("service", metavar="ADDRESS")
@click.option("--count", "-c", default=10, show_default=True, type=click.IntRange(1, 10_000))
@click.option("--interval", default=0.2, show_default=True, type=FiniteRange(0, 60), help="Seconds.")
@click.option("--timeout", default=2.0, show_default=True, type=FiniteRange(0.01, 60), help="Seconds.")
@click.option("--keys", type=click.Path(path_type=Path), help="Keys folder, if not the usual one.")
@click.option("--service-key", help="Its public key, where it is not pinned.")
@click.option("--no-upload", is_flag=True, help="Don't measure the bandwidth up.")
@click.option("--json", "as_json", is_flag=True, help="The report for a script, in seconds and bytes.")
def command(
    service: str,
    count: int,
    interval: float,
    timeout: float,
    keys: Path | None,
    service_key: str | None,
    *,
    no_upload: bool,
    as_json: bool,
) -> None:
    """Measure the link to the draft service at ADDRESS (HOST, HOST:PORT or tcp://HOST:PORT; or the name of a
    service that was pinned with its address).

    A ping goes through the service's scheduling loop: it is answered only if the engine turns, and the time
    it waited there is told apart from the time on the line.
    """
    address = service_address(service, keys)
    report = measure_link(
        address,
        edge_keys(address, service_key, folder=keys),
        count=count,
        interval_s=interval,
        timeout_s=timeout,
        with_bandwidth=not no_upload,
        on_sample=(lambda sample: None) if as_json else show_sample,
    )
    if as_json:
        click.echo(json.dumps({**dataclasses.asdict(report), "loss": report.loss}))
    else:
        show_report(report)


def show_sample(sample: PingSample | None) -> None:
    if sample is None:
        click.echo("no answer")
    else:
        click.echo(
            f"{sample.round_trip_s * 1e3:7.2f} ms = "
            f"link {sample.link_s * 1e3:.2f} + service {sample.service_s * 1e3:.2f}"
        )


def show_report(report: PingReport) -> None:
    click.echo(f"\n{report.address}: connected in {report.connect_s * 1e3:.1f} ms")
    click.echo(f"{'ms':<12}{'p50':>8}{'p95':>8}{'p99':>8}")
    for label, values in (
        ("round trip", report.round_trip),
        ("link", report.link),
        ("service", report.service),
    ):
        click.echo(f"{label:<12}{row(values)}")
    click.echo(
        f"jitter {report.jitter_s * 1e3:.2f} ms, {report.lost} of {report.sent} lost"
        + (f", up {report.upload_bytes_per_s / 1e6:.1f} MB/s" if report.upload_bytes_per_s else "")
        + f"; the probes took {report.probe_bytes / 1e3:.1f} kB"
    )


def row(values: Percentiles) -> str:
    return "".join(f"{value * 1e3:8.2f}" for value in (values.p50_s, values.p95_s, values.p99_s))
