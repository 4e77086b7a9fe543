"""The page that defines every number, made from the tables that the numbers come from. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from starsd_edge.monitor.alarms import (
    FALLEN_ACCEPTANCE,
    FULL_KV,
    MIN_DRAFTS,
    SATURATED_BUSY,
    SATURATED_DEMAND,
)
from starsd_edge.monitor.figures import DEVICE_FIGURES, SERVICE_FIGURES, STAGE_DEFINITIONS, Figure
from starsd_edge.monitor.link_state import ADVICE, HUNG_AFTER_S
from starsd_edge.monitor.prometheus import METRICS
from starsd_edge.monitor.session_figures import SESSION_FIGURES

__all__ = ["definitions_page"]

HEAD = """\
# Numbers of the monitor, and metrics

Made by `starsd monitor figures` from the tables that screen, reports and exporter read. The same text is on
the monitor's help page (`?`).

A figure covers the window that the screen's head names: 10 seconds, a minute, five minutes, or everything
since the monitor started or was reset (`+`, `-`, `r`). `--once` takes the whole time it watched. Percentiles
come from histograms of eight buckets an octave, so they are right to 4.5%; means are exact. A `-` (JSON:
null) means that there is nothing to say: no round yet, or a board that does not report it. Nothing is
estimated in its place.

Watching disturbs little, and says how much: the head shows the bytes a second that the snapshots take, and
the connections tried to find out why a service is silent (one every five seconds at most). `starsd bench
monitor` measures the rest: with 50 devices at two snapshots a second the monitor took 1.7% of a core on a
terminal of 160x60 and 0.9% on one of 80x24, and a snapshot cost the service 0.3 ms (a shared two-core virtual
machine). `starsd ping` tells what its probes sent: 52 bytes a ping, and 0.5 MB for the bandwidth unless
`--no-upload` is given.
"""

PROMETHEUS = """\
`starsd monitor export [SERVICE]...` serves these at http://127.0.0.1:9464/metrics, for a Prometheus on the
same machine; the way to the services is the monitor's own encrypted one. Every series has the label
`service`. Histograms have the suffixes `_bucket`, `_sum` and `_count`. The speculative counters mean what
vLLM's of the same name mean:

    acceptance rate     rate(starsd_spec_num_accepted_tokens_total[5m])
                        / rate(starsd_spec_num_draft_tokens_total[5m])
    acceptance length   1 + rate(starsd_spec_num_accepted_tokens_total[5m])
                        / rate(starsd_spec_num_drafts_total[5m])

`starsd serve` on a device exports its own requests under the same names, without the label `device`, from its
own `/metrics`: don't add the two up. A Grafana dashboard and alert rules are in `docs/monitoring/`.
"""


def definitions_page() -> str:
    """docs/metrics.md."""
    parts = [HEAD, "## Stages of a round\n", *rows(("stage", "time"), stages())]
    parts += ["## Figures of a device\n", *rows(("column", "key", "meaning"), figures(DEVICE_FIGURES))]
    parts += ["## Figures of a session\n", *rows(("column", "key", "meaning"), figures(SESSION_FIGURES))]
    parts += ["## Figures of a service\n", *rows(("column", "key", "meaning"), figures(SERVICE_FIGURES))]
    parts += ["## States of a link\n", *rows(("state", "what it means and what to do"), states())]
    parts += ["## Alarms\n", *rows(("alarm", "when"), alarms())]
    parts += ["## Prometheus\n", PROMETHEUS, *rows(("metric", "type", "labels", "meaning"), metrics())]
    return "\n".join(parts)


def rows(head: Sequence[str], body: Iterable[Sequence[str]]) -> list[str]:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *body]
    return ["| " + " | ".join(cells) + " |" for cells in lines] + [""]


def stages() -> Iterable[Sequence[str]]:
    return ((stage.value, definition) for stage, definition in STAGE_DEFINITIONS.items())


def figures(table: Sequence[Figure[Any]]) -> Iterable[Sequence[str]]:
    return ((figure.title, f"`{figure.key}`", figure.definition) for figure in table)


def states() -> Iterable[Sequence[str]]:
    return ((state.value, advice or "all is well, or not known yet") for state, advice in ADVICE.items())


def alarms() -> Iterable[Sequence[str]]:
    yield "(state of a link)", f"the monitor does not hear the service; hung: silent for {HUNG_AFTER_S:.0f} s"
    yield "link down", "a device was connected before and is silent now"
    yield "plain decoding", "a session of the device decodes without drafts; the reason is the edge's"
    saturated = f"somebody waits at least {SATURATED_DEMAND:.0%} of the time"
    yield "drafter saturated", f"{saturated} and the engine is busy at least {SATURATED_BUSY:.0%} of it"
    fallen = f"acceptance length under {FALLEN_ACCEPTANCE:.0%} of what it was before the window"
    yield "acceptance fallen", f"{fallen}, with at least {MIN_DRAFTS} trees on either side"
    yield "KV cache full", f"at least {FULL_KV:.0%} of the draft KV rows are in use"
    yield "sessions refused", "admissions were refused within the window"
    yield "key refused", "somebody without a trusted key knocked"
    yield "draining", "the service takes no new sessions"


def metrics() -> Iterable[Sequence[str]]:
    return (
        (f"`{metric.name}`", metric.kind.value, ", ".join(metric.labels), metric.help) for metric in METRICS
    )
