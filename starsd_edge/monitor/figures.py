"""Every number of the monitor, defined once: screen, help, `--once` and docs/metrics.md read these tables.

A figure has a key (for scripts), a title (for columns), a definition (for people), and a function that gets
its value from a view, or None where there is nothing to say.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeAlias, TypeVar

from starsd_edge.monitor.format import Form, shown
from starsd_edge.monitor.views import DeviceView, ServiceView
from starsd_edge.protocol.telemetry import BoardReading, Stage

__all__ = ["DEVICE_FIGURES", "SERVICE_FIGURES", "STAGE_DEFINITIONS", "Figure", "Value", "device_figure"]

Value: TypeAlias = float | int | str | None
V = TypeVar("V")


@dataclass(frozen=True)
class Figure(Generic[V]):
    """One number: how it is called, what it means, where it comes from, how it is printed."""

    key: str
    title: str
    form: Form
    definition: str
    value: Callable[[V], Value]

    def text(self, view: V) -> str:
        """As printed; "-" where there is nothing to say."""
        return shown(self.value(view), self.form)


STAGE_DEFINITIONS: dict[Stage, str] = {
    Stage.LINK: "round trip of an update less the time the service held it; both clocks are the edge's",
    Stage.QUEUE: "from the arrival of an update at the service until its first row enters an engine step",
    Stage.DRAFT: "from there until the tree leaves the service",
    Stage.VERIFY: "the target's forward over the tree, on the edge",
    Stage.SAMPLE: "picking tokens, walking the tree and committing, on the edge",
}


def quantile(stage: Stage, q: float) -> Callable[[DeviceView], float | None]:
    return lambda view: view.work.stage(stage).quantile(q)


def from_board(read: Callable[[BoardReading], Value]) -> Callable[[DeviceView], Value]:
    return lambda view: read(view.board) if view.board else None


def ram_share(board: BoardReading) -> float | None:
    if board.ram_used_bytes is None or not board.ram_total_bytes:
        return None
    return board.ram_used_bytes / board.ram_total_bytes


def cpu_load(board: BoardReading) -> float | None:
    loads = [load for load in board.cpu_loads if load is not None]
    return sum(loads) / len(loads) if loads else None


def drafting_joules(view: DeviceView) -> float | None:
    energy = view.energy
    return energy.drafting_j / energy.drafting_tokens if energy and energy.drafting_tokens else None


def plain_joules(view: DeviceView) -> float | None:
    energy = view.energy
    return energy.plain_j / energy.plain_tokens if energy and energy.plain_tokens else None


DEVICE_FIGURES: list[Figure[DeviceView]] = [
    Figure("device", "DEVICE", Form.TEXT, "name of the device's key file", lambda v: v.device.device),
    Figure(
        "state",
        "STATE",
        Form.TEXT,
        "drafting; plain: decodes without the service's drafts; idle: no session; gone: it said goodbye; "
        "down: connected before, silent now; absent: trusted, never heard of",
        lambda v: v.status.value,
    ),
    Figure(
        "tokens_per_s",
        "TOK/S",
        Form.RATE,
        "committed tokens a second over the window, pauses included: accepted, bonus and plain ones",
        lambda v: v.work.tokens_per_s,
    ),
    Figure(
        "acceptance_length",
        "TAU",
        Form.FACTOR,
        "acceptance length: mean tokens a verified tree brought, bonus included: 1 + accepted / trees",
        lambda v: v.work.acceptance_length,
    ),
    Figure(
        "acceptance_rate",
        "ACC",
        Form.SHARE,
        "accepted draft tokens / drafted tokens; low for wide trees, of which one path can be accepted",
        lambda v: v.work.acceptance_rate,
    ),
    Figure(
        "tree_nodes",
        "TREE",
        Form.RATE,
        "mean nodes of verified trees, root included",
        lambda v: v.work.tree_nodes,
    ),
    Figure("link_p50_s", "LINK50", Form.SECONDS, "median of the stage link", quantile(Stage.LINK, 0.5)),
    Figure("link_p95_s", "LINK95", Form.SECONDS, "95th percentile of link", quantile(Stage.LINK, 0.95)),
    Figure("link_p99_s", "LINK99", Form.SECONDS, "99th percentile of link", quantile(Stage.LINK, 0.99)),
    Figure(
        "jitter_s",
        "JITTER",
        Form.SECONDS,
        "smoothed change of the link time from round to round (RFC 3550, 6.4.1)",
        lambda v: v.device.jitter_s or None,
    ),
    Figure("queue_p50_s", "QUE50", Form.SECONDS, "median of the stage queue", quantile(Stage.QUEUE, 0.5)),
    Figure("queue_p99_s", "QUE99", Form.SECONDS, "99th percentile of queue", quantile(Stage.QUEUE, 0.99)),
    Figure("draft_p50_s", "DRAFT", Form.SECONDS, "median of the stage draft", quantile(Stage.DRAFT, 0.5)),
    Figure("verify_p50_s", "VERIFY", Form.SECONDS, "median of the stage verify", quantile(Stage.VERIFY, 0.5)),
    Figure("sample_p50_s", "SAMPLE", Form.SECONDS, "median of the stage sample", quantile(Stage.SAMPLE, 0.5)),
    Figure(
        "plain_share",
        "PLAIN",
        Form.SHARE,
        "share of committed tokens that came from plain steps",
        lambda v: v.work.plain_share,
    ),
    Figure(
        "speedup",
        "SPEED",
        Form.FACTOR,
        "tokens/s over the device's own plain speed, as calibrated; pauses count against it",
        lambda v: v.speedup,
    ),
    Figure(
        "late_trees",
        "LATE",
        Form.COUNT,
        "trees that came after a plain step and were still of use, in the window",
        lambda v: v.work.grown("late_trees"),
    ),
    Figure(
        "stale_trees",
        "STALE",
        Form.COUNT,
        "trees that could not be followed any more and were dropped, in the window",
        lambda v: v.work.grown("stale_trees"),
    ),
    Figure(
        "timeouts",
        "T/O",
        Form.COUNT,
        "requests without an answer in time, in the window",
        lambda v: v.work.grown("timeouts"),
    ),
    Figure(
        "fallbacks",
        "FALLB",
        Form.COUNT,
        "times the edge went over to plain decoding, in the window; the device page says why",
        lambda v: sum(v.work.fallbacks.values()),
    ),
    Figure(
        "reconnects",
        "RECON",
        Form.COUNT,
        "times the link came back, since the edge started",
        lambda v: v.device.reconnects,
    ),
    Figure(
        "bytes_up_per_s",
        "UP/S",
        Form.BYTES,
        "bytes a second from edge to service",
        lambda v: v.work.rate("bytes_up"),
    ),
    Figure(
        "bytes_down_per_s",
        "DOWN/S",
        Form.BYTES,
        "bytes a second from service to edge",
        lambda v: v.work.rate("bytes_down"),
    ),
    Figure("sessions", "SESS", Form.COUNT, "open sessions", lambda v: len(v.device.sessions)),
    Figure(
        "power_w",
        "POWER",
        Form.WATTS,
        "power of the whole board; the board page says which rails it is the sum of",
        from_board(lambda b: b.power_w),
    ),
    Figure(
        "joules_per_token",
        "J/TOK",
        Form.FACTOR,
        "energy of the whole board while it generated / tokens generated, since the edge started",
        lambda v: v.joules_per_token,
    ),
    Figure(
        "drafting_joules_per_token",
        "J/DRAFT",
        Form.FACTOR,
        "the same over the time that was decoded with drafts",
        drafting_joules,
    ),
    Figure(
        "plain_joules_per_token",
        "J/PLAIN",
        Form.FACTOR,
        "the same over the time that was decoded plainly",
        plain_joules,
    ),
    Figure("gpu_load", "GPU", Form.SHARE, "load of the GPU", from_board(lambda b: b.gpu_load)),
    Figure("cpu_load", "CPU", Form.SHARE, "mean load of the cores that are on", from_board(cpu_load)),
    Figure("ram_share", "RAM", Form.SHARE, "memory in use / memory there", from_board(ram_share)),
    Figure(
        "temperature_c",
        "TEMP",
        Form.CELSIUS,
        "hottest zone of the board",
        from_board(lambda b: max(b.temperatures_c.values(), default=None)),
    ),
    Figure(
        "quiet_s",
        "QUIET",
        Form.AGE,
        "since the device's last message",
        lambda v: v.device.quiet_s,
    ),
    Figure("reason", "REASON", Form.TEXT, "why it does not draft", lambda v: v.reason or None),
]

SERVICE_FIGURES: list[Figure[ServiceView]] = [
    Figure("service", "SERVICE", Form.TEXT, "name of the service", lambda v: v.snapshot.service or None),
    Figure("uptime_s", "up", Form.AGE, "since the service started", lambda v: v.snapshot.uptime_s),
    Figure(
        "tokens_per_s",
        "tok/s",
        Form.RATE,
        "committed tokens a second of all devices together, over the last second",
        lambda v: v.history[-1] if v.history else None,
    ),
    Figure(
        "busy",
        "busy",
        Form.SHARE,
        "share of time the engine spends inside steps",
        lambda v: v.busy_fraction,
    ),
    Figure(
        "demand",
        "wanted",
        Form.SHARE,
        "share of time in which some session waits for the engine; near 100% with busy near 100%: saturated",
        lambda v: v.demand_fraction,
    ),
    Figure(
        "batch_rows",
        "rows",
        Form.RATE,
        "mean rows of an engine step: how many sessions' work is done at once",
        lambda v: v.batch_rows,
    ),
    Figure(
        "step_p50_s", "step", Form.SECONDS, "median time of an engine step", lambda v: v.step_s.quantile(0.5)
    ),
    Figure(
        "queue_depth", "queue", Form.COUNT, "sessions waiting for a step now", lambda v: v.engine.queue_depth
    ),
    Figure(
        "kv_share", "KV", Form.SHARE, "rows of the draft KV cache in use / there", lambda v: v.kv_fraction
    ),
    Figure("evictions", "evicted", Form.COUNT, "idle sessions evicted", lambda v: v.engine.evictions),
    Figure(
        "refused",
        "refused",
        Form.COUNT,
        "admissions refused within the window",
        lambda v: sum(v.refusals.values()),
    ),
    Figure(
        "row_price",
        "price",
        Form.FACTOR,
        "tokens that a row of a tree has to bring to be worth the engine's time; 0 while there is room",
        lambda v: v.engine.row_price,
    ),
    Figure(
        "narrowed_trees",
        "narrowed",
        Form.COUNT,
        "trees of which rows were left out for that price, in the window",
        lambda v: v.narrowed_trees,
    ),
    Figure(
        "ahead_hits",
        "ahead",
        Form.SHARE,
        "share of trees drafted ahead of the edge's answer that were of use",
        lambda v: v.ahead_hit_rate,
    ),
    Figure(
        "bytes_per_s", "link/s", Form.BYTES, "bytes a second, both ways, all devices", lambda v: v.bytes_per_s
    ),
    Figure("sessions", "sessions", Form.COUNT, "sessions that are open", lambda v: v.engine.active_sessions),
    Figure(
        "devices",
        "devices",
        Form.COUNT,
        "devices connected",
        lambda v: sum(device.connected for device in v.snapshot.devices),
    ),
]

BY_KEY = {figure.key: figure for figure in DEVICE_FIGURES}
SERVICE_BY_KEY = {figure.key: figure for figure in SERVICE_FIGURES}


def device_figure(key: str) -> Figure[DeviceView]:
    """The figure of a device called `key`."""
    return BY_KEY[key]
