"""Prometheus' text format, and what a metric is made of. Pure.

prometheus.io/docs/instrumenting/exposition_formats
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from starsd_edge.latency import Histogram
from starsd_edge.monitor.format import clean
from starsd_edge.monitor.link_state import LinkState
from starsd_edge.protocol.telemetry import ServiceSnapshot

__all__ = ["Kind", "Metric", "Sample", "Watched", "exposition", "sample_names"]

Labels: TypeAlias = tuple[tuple[str, str], ...]
Sample: TypeAlias = tuple[Labels, "float | Histogram"]


class Kind(enum.Enum):
    """Prometheus' types."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True)
class Watched:
    """A service under the name it is watched by, how its link stands, and its newest snapshot."""

    name: str
    link: LinkState
    snapshot: ServiceSnapshot | None


@dataclass(frozen=True)
class Metric:
    """A family: `samples` gives label values and a number (or a histogram) for each of its series.

    Every series has the label `service`; `labels` are those beyond it, in order.
    """

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...]
    samples: Callable[[Watched], Iterator[Sample]]
    bounds: Sequence[float] = ()


def exposition(metrics: Iterable[Metric], watched: Iterable[Watched]) -> str:
    """All metrics of all services, in Prometheus' text format 0.0.4."""
    services = list(watched)
    lines: list[str] = []
    for metric in metrics:
        lines += [f"# HELP {metric.name} {metric.help}", f"# TYPE {metric.name} {metric.kind.value}"]
        for service in services:
            for labels, value in metric.samples(service):
                named = (("service", service.name), *labels)
                if isinstance(value, Histogram):
                    lines += histogram_lines(metric, named, value)
                else:
                    lines.append(f"{metric.name}{{{text_of(named)}}} {number(value)}")
    return "\n".join(lines) + "\n"


def sample_names(metric: Metric) -> set[str]:
    """The names that its samples have."""
    if metric.kind is Kind.HISTOGRAM:
        return {metric.name + suffix for suffix in ("_bucket", "_sum", "_count")}
    return {metric.name}


def histogram_lines(metric: Metric, labels: Labels, histogram: Histogram) -> Iterator[str]:
    for bound in metric.bounds:
        named = (*labels, ("le", f"{bound:.10g}"))
        yield f"{metric.name}_bucket{{{text_of(named)}}} {histogram.up_to(bound)}"
    yield f"{metric.name}_bucket{{{text_of((*labels, ('le', '+Inf')))}}} {histogram.count}"
    yield f"{metric.name}_sum{{{text_of(labels)}}} {number(histogram.total)}"
    yield f"{metric.name}_count{{{text_of(labels)}}} {histogram.count}"


def text_of(labels: Labels) -> str:
    return ",".join(f'{name}="{escaped(value)}"' for name, value in labels)


def escaped(value: str) -> str:
    return clean(value).replace("\\", "\\\\").replace('"', '\\"')


def number(value: float) -> str:
    return "NaN" if math.isnan(value) else f"{value:.10g}"
