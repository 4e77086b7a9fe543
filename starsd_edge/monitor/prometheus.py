"""Snapshots as Prometheus metrics: the table of all of them. Pure.

Speculative counters mean what vLLM's `spec_decode` counters of the same name mean, so queries carry over:

    acceptance rate     rate(starsd_spec_num_accepted_tokens_total) / rate(starsd_spec_num_draft_tokens_total)
    acceptance length   1 + rate(starsd_spec_num_accepted_tokens_total) / rate(starsd_spec_num_drafts_total)

Counters count from the service's start. Buckets end at powers of two, where the histograms of snapshots are
exact for times; for counts (rows, nodes) a bound is up to one bucket of 9% too high.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from starsd_edge.latency import LOWEST, Histogram
from starsd_edge.monitor.exposition import Kind, Metric, Sample, Watched
from starsd_edge.monitor.link_state import LinkState
from starsd_edge.protocol.telemetry import DeviceSnapshot, Mode, ServiceSnapshot, Work

__all__ = ["METRICS"]

SECONDS_BOUNDS = [LOWEST * 2.0**octave for octave in range(6, 25)]  # 64 us to 17 s
COUNT_BOUNDS = [float(2**octave) for octave in range(11)]  # 1 to 1024


def of_service(
    read: Callable[[ServiceSnapshot], float | Histogram | None],
) -> Callable[[Watched], Iterator[Sample]]:
    """One series for each service that was heard."""

    def samples(watched: Watched) -> Iterator[Sample]:
        value = read(watched.snapshot) if watched.snapshot is not None else None
        if value is not None:
            yield (), value

    return samples


def by_reason(
    label: str, read: Callable[[ServiceSnapshot], dict[str, int]]
) -> Callable[[Watched], Iterator[Sample]]:
    """A series for each reason."""

    def samples(watched: Watched) -> Iterator[Sample]:
        if watched.snapshot is not None:
            for reason, count in read(watched.snapshot).items():
                yield ((label, reason),), count

    return samples


def of_devices(
    read: Callable[[DeviceSnapshot], Iterable[Sample]],
) -> Callable[[Watched], Iterator[Sample]]:
    """Series of each device, with the label `device` first."""

    def samples(watched: Watched) -> Iterator[Sample]:
        for device in watched.snapshot.devices if watched.snapshot is not None else ():
            for labels, value in read(device):
                yield (("device", device.device), *labels), value

    return samples


def of_device(
    read: Callable[[DeviceSnapshot], float | Histogram | None],
) -> Callable[[Watched], Iterator[Sample]]:
    """One series for each device that has the value."""

    def one(device: DeviceSnapshot) -> Iterator[Sample]:
        value = read(device)
        if value is not None:
            yield (), value

    return of_devices(one)


def of_work(read: Callable[[Work], float | Histogram]) -> Callable[[Watched], Iterator[Sample]]:
    return of_device(lambda device: read(device.work))


def labelled(label: str, values: Iterable[tuple[str, float | Histogram]]) -> Iterator[Sample]:
    return ((((label, name),), value) for name, value in values)


def up(watched: Watched) -> Iterator[Sample]:
    yield (), float(watched.link is LinkState.UP)


def link_states(watched: Watched) -> Iterator[Sample]:
    return labelled("state", ((state.value, float(watched.link is state)) for state in LinkState))


def info(watched: Watched) -> Iterator[Sample]:
    snapshot = watched.snapshot
    if snapshot is not None:
        heads = ",".join(head.name for head in snapshot.heads)
        facts = ("software", snapshot.software), ("scheduler", snapshot.engine.scheduler), ("heads", heads)
        yield (*facts, ("hardware", snapshot.engine.hardware)), 1.0


def modes(device: DeviceSnapshot) -> Iterator[Sample]:
    counts = {mode: sum(session.mode is mode for session in device.sessions) for mode in Mode}
    return labelled("mode", ((mode.value, count) for mode, count in counts.items()))


def per_position(counts: list[int]) -> Iterator[Sample]:
    return labelled("position", ((str(position), count) for position, count in enumerate(counts)))


def energy(device: DeviceSnapshot, *, joules: bool) -> Iterator[Sample]:
    spent = device.energy
    if spent is not None:
        drafting = spent.drafting_j if joules else spent.drafting_tokens
        plain = spent.plain_j if joules else spent.plain_tokens
        yield from labelled("mode", (("drafting", drafting), ("plain", plain)))


def cpu_load(device: DeviceSnapshot) -> float | None:
    loads = [load for load in device.board.cpu_loads if load is not None] if device.board else []
    return sum(loads) / len(loads) if loads else None


def kv_share(snapshot: ServiceSnapshot) -> float | None:
    engine = snapshot.engine
    return engine.kv_rows_used / engine.kv_rows_total if engine.kv_rows_total else None


C, G, H = Kind.COUNTER, Kind.GAUGE, Kind.HISTOGRAM

METRICS: list[Metric] = [
    Metric("starsd_service_up", G, "1 while snapshots of the service arrive", (), up),
    Metric(
        "starsd_service_link_state",
        G,
        "1 for the state the link to the service is in",
        ("state",),
        link_states,
    ),
    Metric(
        "starsd_service_info",
        G,
        "Always 1; what serves",
        ("software", "scheduler", "heads", "hardware"),
        info,
    ),
    Metric(
        "starsd_service_uptime_seconds", G, "Since the service started", (), of_service(lambda s: s.uptime_s)
    ),
    Metric(
        "starsd_service_draining",
        G,
        "1 while it takes no new sessions",
        (),
        of_service(lambda s: float(s.draining)),
    ),
    Metric(
        "starsd_engine_busy_seconds_total",
        C,
        "Time inside engine steps",
        (),
        of_service(lambda s: s.engine.busy_s),
    ),
    Metric(
        "starsd_engine_demand_seconds_total",
        C,
        "Time in which any session waited for the engine",
        (),
        of_service(lambda s: s.engine.demand_s),
    ),
    Metric("starsd_engine_steps_total", C, "Engine steps", (), of_service(lambda s: s.engine.steps)),
    Metric(
        "starsd_engine_step_seconds",
        H,
        "Time of an engine step",
        (),
        of_service(lambda s: s.engine.step_s),
        SECONDS_BOUNDS,
    ),
    Metric(
        "starsd_draft_batch_rows",
        H,
        "Rows of an engine step",
        (),
        of_service(lambda s: s.engine.batch_rows),
        COUNT_BOUNDS,
    ),
    Metric(
        "starsd_draft_queue_depth",
        G,
        "Sessions that wait for a step",
        (),
        of_service(lambda s: s.engine.queue_depth),
    ),
    Metric("starsd_sessions_active", G, "Open sessions", (), of_service(lambda s: s.engine.active_sessions)),
    Metric(
        "starsd_sessions_max",
        G,
        "Sessions there is room for",
        (),
        of_service(lambda s: s.engine.max_sessions),
    ),
    Metric("starsd_kv_cache_usage_ratio", G, "Draft KV rows in use / there", (), of_service(kv_share)),
    Metric(
        "starsd_kv_evictions_total", C, "Idle sessions evicted", (), of_service(lambda s: s.engine.evictions)
    ),
    Metric(
        "starsd_admissions_refused_total",
        C,
        "Sessions and requests refused",
        ("reason",),
        by_reason("reason", lambda s: s.engine.refusals),
    ),
    Metric(
        "starsd_draft_row_price",
        G,
        "Tokens that a row of a tree has to bring; 0 while the engine has room",
        (),
        of_service(lambda s: s.engine.row_price),
    ),
    Metric(
        "starsd_narrowed_trees_total",
        C,
        "Trees of which rows were left out for that price",
        (),
        of_service(lambda s: s.engine.narrowed_trees),
    ),
    Metric(
        "starsd_ahead_drafts_total",
        C,
        "Trees drafted ahead of the edge's answer",
        (),
        of_service(lambda s: s.engine.ahead_drafts),
    ),
    Metric(
        "starsd_ahead_hits_total", C, "Those that were of use", (), of_service(lambda s: s.engine.ahead_hits)
    ),
    Metric(
        "starsd_ahead_seconds_total",
        C,
        "Time inside steps for them, which is not counted as busy",
        (),
        of_service(lambda s: s.engine.ahead_s),
    ),
    Metric(
        "starsd_gateway_restarts_total",
        C,
        "Restarts of the gateway",
        (),
        of_service(lambda s: s.gateway.restarts),
    ),
    Metric(
        "starsd_gateway_messages_total",
        C,
        "Messages, up from the edges and down to them",
        ("direction",),
        by_reason("direction", lambda s: {"up": s.gateway.messages_up, "down": s.gateway.messages_down}),
    ),
    Metric(
        "starsd_gateway_bytes_total",
        C,
        "Bytes, up from the edges and down to them",
        ("direction",),
        by_reason("direction", lambda s: {"up": s.gateway.bytes_up, "down": s.gateway.bytes_down}),
    ),
    Metric(
        "starsd_gateway_dropped_total",
        C,
        "Messages not let through",
        ("reason",),
        by_reason("reason", lambda s: s.gateway.dropped),
    ),
    Metric(
        "starsd_gateway_refused_peers",
        G,
        "Strangers that knocked lately",
        (),
        of_service(lambda s: len(s.gateway.refused_peers)),
    ),
    Metric(
        "starsd_device_connected",
        G,
        "1 while the device is heard",
        ("device",),
        of_device(lambda d: float(d.connected)),
    ),
    Metric(
        "starsd_device_quiet_seconds",
        G,
        "Since its last message",
        ("device",),
        of_device(lambda d: d.quiet_s),
    ),
    Metric(
        "starsd_device_sessions",
        G,
        "Its open sessions, by how they decode",
        ("device", "mode"),
        of_devices(modes),
    ),
    Metric(
        "starsd_device_plain_tokens_per_second",
        G,
        "Its own plain speed, as calibrated",
        ("device",),
        of_device(lambda d: d.plain_tokens_per_s),
    ),
    Metric(
        "starsd_device_refusals_total",
        C,
        "Requests of the device that were refused",
        ("device", "reason"),
        of_devices(lambda d: labelled("reason", d.refusals.items())),
    ),
    Metric(
        "starsd_device_reconnects_total",
        C,
        "Times its link came back",
        ("device",),
        of_device(lambda d: d.reconnects),
    ),
    Metric(
        "starsd_link_jitter_seconds",
        G,
        "Smoothed change of the link time (RFC 3550)",
        ("device",),
        of_device(lambda d: d.jitter_s),
    ),
    Metric(
        "starsd_link_bytes_total",
        C,
        "Bytes, up from the edge and down to it",
        ("device", "direction"),
        of_devices(lambda d: labelled("direction", (("up", d.work.bytes_up), ("down", d.work.bytes_down)))),
    ),
    Metric(
        "starsd_stage_seconds",
        H,
        "Time of a round's stage: link, queue, draft, verify, sample",
        ("device", "stage"),
        of_devices(lambda d: labelled("stage", ((stage.value, h) for stage, h in d.work.stages.items()))),
        SECONDS_BOUNDS,
    ),
    Metric("starsd_spec_num_drafts_total", C, "Trees verified", ("device",), of_work(lambda w: w.num_drafts)),
    Metric(
        "starsd_spec_num_draft_tokens_total",
        C,
        "Draft tokens verified, roots not counted",
        ("device",),
        of_work(lambda w: w.draft_tokens),
    ),
    Metric(
        "starsd_spec_num_accepted_tokens_total",
        C,
        "Draft tokens accepted, bonus tokens not counted",
        ("device",),
        of_work(lambda w: w.accepted_tokens),
    ),
    Metric(
        "starsd_spec_num_accepted_tokens_per_pos_total",
        C,
        "Trees of which depth position + 1 was accepted",
        ("device", "position"),
        of_devices(lambda d: per_position(d.work.accepted_per_depth)),
    ),
    Metric(
        "starsd_spec_num_tried_per_pos_total",
        C,
        "Trees whose walk came to depth position, and that went on",
        ("device", "position"),
        of_devices(lambda d: per_position(d.work.tried_per_depth)),
    ),
    Metric(
        "starsd_tree_nodes",
        H,
        "Nodes of verified trees, root included",
        ("device",),
        of_work(lambda w: w.tree_nodes),
        COUNT_BOUNDS,
    ),
    Metric(
        "starsd_tokens_total",
        C,
        "Committed tokens: accepted, bonus and plain",
        ("device",),
        of_work(lambda w: w.tokens),
    ),
    Metric(
        "starsd_plain_tokens_total", C, "Those of plain steps", ("device",), of_work(lambda w: w.plain_tokens)
    ),
    Metric(
        "starsd_prompt_tokens_total", C, "Tokens of prompts", ("device",), of_work(lambda w: w.prompt_tokens)
    ),
    Metric(
        "starsd_late_trees_total",
        C,
        "Trees late, and still of use",
        ("device",),
        of_work(lambda w: w.late_trees),
    ),
    Metric(
        "starsd_stale_trees_total",
        C,
        "Trees that could not be followed",
        ("device",),
        of_work(lambda w: w.stale_trees),
    ),
    Metric(
        "starsd_guard_steps_total",
        C,
        "Plain steps that settled a decision too close for the runtime's rounding",
        ("device",),
        of_work(lambda w: w.guard_steps),
    ),
    Metric(
        "starsd_timeouts_total",
        C,
        "Requests without an answer in time",
        ("device",),
        of_work(lambda w: w.timeouts),
    ),
    Metric(
        "starsd_fallbacks_total",
        C,
        "Times the edge went over to plain decoding",
        ("device", "reason"),
        of_devices(lambda d: labelled("reason", d.work.fallbacks.items())),
    ),
    Metric(
        "starsd_board_power_watts",
        G,
        "Power of the whole board",
        ("device",),
        of_device(lambda d: d.board.power_w if d.board else None),
    ),
    Metric(
        "starsd_board_rail_watts",
        G,
        "Power of a rail",
        ("device", "rail"),
        of_devices(lambda d: labelled("rail", d.board.rails_w.items() if d.board else ())),
    ),
    Metric(
        "starsd_board_temperature_celsius",
        G,
        "Temperature of a zone",
        ("device", "zone"),
        of_devices(lambda d: labelled("zone", d.board.temperatures_c.items() if d.board else ())),
    ),
    Metric(
        "starsd_board_gpu_load_ratio",
        G,
        "Load of the GPU",
        ("device",),
        of_device(lambda d: d.board.gpu_load if d.board else None),
    ),
    Metric(
        "starsd_board_cpu_load_ratio",
        G,
        "Mean load of the cores that are on",
        ("device",),
        of_device(cpu_load),
    ),
    Metric(
        "starsd_board_memory_used_bytes",
        G,
        "Memory in use",
        ("device",),
        of_device(lambda d: d.board.ram_used_bytes if d.board else None),
    ),
    Metric(
        "starsd_board_memory_total_bytes",
        G,
        "Memory there",
        ("device",),
        of_device(lambda d: d.board.ram_total_bytes if d.board else None),
    ),
    Metric(
        "starsd_energy_joules_total",
        C,
        "Energy of the whole board while it generated, by how it decoded",
        ("device", "mode"),
        of_devices(lambda d: energy(d, joules=True)),
    ),
    Metric(
        "starsd_energy_tokens_total",
        C,
        "Tokens generated meanwhile",
        ("device", "mode"),
        of_devices(lambda d: energy(d, joules=False)),
    ),
]
