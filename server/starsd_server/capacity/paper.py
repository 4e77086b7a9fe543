"""The claims of the StarSD paper (arXiv 2601.21622) as experiments, beside what batching makes of them.

Measured in virtual time (`emulate.virtual`: real scheduler, sessions, protocol; head and devices take what
their profiles say) and held against the paper's analytic model: a round of N devices takes
T_gamma = N S(d) + T_idle, and from N_full = (RTT + T(n) + S) / S on the host never idles.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from starsd_edge.decoding.costs import DeviceProfile
from starsd_server.capacity.model import DeviceClass, DraftWork, Host, balance
from starsd_server.emulate.bench import BenchPlan, BenchRow
from starsd_server.emulate.engines import EngineProfile
from starsd_server.emulate.virtual import measure_virtually
from starsd_server.scheduling import Policy

__all__ = ["Claim", "Packing", "Paper", "Point", "claims_of", "packing", "reproduce"]

GIB = 2**30


@dataclass(frozen=True, slots=True)
class Point:
    """One measurement and what the models say of it.

    per_round_ms       of a device, all included
    model_tokens_per_s of all devices: docs/capacity.md
    paper_tokens_per_s the paper's: N tau / max(N S, S + RTT + T(n)); only for the serial scheduler
    """

    row: BenchRow
    per_round_ms: float
    model_tokens_per_s: float
    paper_tokens_per_s: float | None


@dataclass(frozen=True, slots=True)
class Packing:
    """Targets on one accelerator, with and without a draft head beside each."""

    memory_gib: float
    with_own_head: int
    with_shared_head: int
    context_with_own_head: int
    context_with_shared_head: int


@dataclass(frozen=True, slots=True)
class Claim:
    """What the paper says, and what was found."""

    claim: str
    found: str
    holds: bool


@dataclass(frozen=True, slots=True)
class Paper:
    """All of it. `full` is N_full of the serial scheduler."""

    points: tuple[Point, ...]
    full: float
    packing: Packing
    claims: tuple[Claim, ...]

    def as_dict(self) -> dict[str, object]:
        points = [
            {
                **point.row.as_dict(),
                "per_round_ms": point.per_round_ms,
                "model_tokens_per_s": point.model_tokens_per_s,
                "paper_tokens_per_s": point.paper_tokens_per_s,
            }
            for point in self.points
        ]
        return {
            "points": points,
            "n_full": self.full,
            "packing": asdict(self.packing),
            "claims": [asdict(claim) for claim in self.claims],
        }


def reproduce(
    plan: BenchPlan,
    device: DeviceProfile,
    engine: EngineProfile,
    work: DraftWork,
    counts: Sequence[int],
    host_factor: float,
    progress: Callable[[str], None],
) -> Paper:
    """Measure every number of devices under both schedulers."""
    points: list[Point] = []
    rtt_s, verify_s = plan.fleet.rtt_s, device.curve(round(work.nodes))
    own_s = work.steps * engine.step_s(round(work.rows / work.steps), round(work.kv_rows))
    away_s = rtt_s + verify_s

    def step_s(rows: float, kv_rows: float) -> float:
        return engine.step_s(round(rows), round(kv_rows))

    for policy in (Policy.SERIAL, Policy.BATCHED):
        for count in counts:
            progress(f"{policy.value}, {count} devices")
            row = measure_virtually(plan, policy.value, [None] * count, host_factor)
            class_ = DeviceClass(device.name, count, device.curve.plain_s, verify_s, rtt_s, work)
            # The tokens that these rounds brought: what a short run accepts is chance.
            scale = row.acceptance_length / work.tokens
            model = balance(Host(step_s, policy), [class_]).tokens_per_s * scale
            paper = None
            if policy is Policy.SERIAL:
                paper = count * row.acceptance_length / max(count * own_s, own_s + away_s)
            points.append(Point(row, 1e3 * count / row.rounds_per_s, model, paper))
    full = (away_s + own_s) / own_s
    packed = packing()
    return Paper(tuple(points), full, packed, tuple(claims_of(points, full, packed, rtt_s)))


def claims_of(points: Sequence[Point], full: float, packed: Packing, rtt_s: float) -> list[Claim]:
    """The paper's claims, judged by the points."""
    serial = sorted((p for p in points if p.row.scheduler == "serial"), key=lambda p: p.row.targets)
    batched = sorted((p for p in points if p.row.scheduler == "batched"), key=lambda p: p.row.targets)
    first, last = serial[0], serial[-1]
    low = [point for point in serial if point.row.targets <= full]
    high = [point for point in serial if point.row.targets >= 2 * full] or [last]
    # In rounds: with what text a device began is not the host's doing.
    devices = low[-1].row.targets
    gain = low[-1].row.rounds_per_s / (first.row.rounds_per_s * devices)
    flat = high[-1].row.rounds_per_s / high[0].row.rounds_per_s
    idle = 1 - last.row.idle_ms_per_round / first.row.idle_ms_per_round
    most = batched[-1]
    bytes_each = most.row.bytes_up_per_round + most.row.bytes_down_per_round
    off = max(
        abs(p.paper_tokens_per_s / p.row.system_tokens_per_s - 1) for p in serial if p.paper_tokens_per_s
    )
    return [
        Claim(
            "low load: system throughput grows with N",
            f"serial, {devices} devices: {gain:.2f} of {devices} times the rounds of one",
            gain > 0.8,
        ),
        Claim(
            f"full load from N_full = {full:.1f} on: the host's rounds per second no longer grow",
            f"serial, {high[0].row.targets} to {high[-1].row.targets} devices: x {flat:.2f}",
            flat < 1.1,
        ),
        Claim(
            "one-for-many leaves the host far less idle than one-for-one",
            f"serial: {first.row.idle_ms_per_round:.1f} ms idle a round with one device, "
            f"{last.row.idle_ms_per_round:.2f} ms with {last.row.targets} ({idle:.0%} less)",
            idle > 0.8,
        ),
        Claim(
            "past N_full queueing slows each device down",
            f"serial, {last.row.targets} devices: {last.row.per_target_tokens_per_s:.1f} tokens/s each "
            f"against {first.row.per_target_tokens_per_s:.1f} alone; "
            f"batched: {most.row.per_target_tokens_per_s:.1f} against "
            f"{batched[0].row.per_target_tokens_per_s:.1f}",
            last.row.per_target_tokens_per_s < 0.8 * first.row.per_target_tokens_per_s,
        ),
        Claim(
            "communication is small beside a round",
            f"{bytes_each / 1e3:.1f} kB and {rtt_s * 1e3:g} ms of {most.per_round_ms:.1f} ms",
            rtt_s * 1e3 < 0.25 * most.per_round_ms,
        ),
        Claim(
            "a shared head leaves the accelerator to targets",
            f"{packed.memory_gib:g} GiB hold {packed.with_shared_head} INT4 targets of 7B instead of "
            f"{packed.with_own_head}; one FP16 target has room for {packed.context_with_shared_head} tokens "
            f"instead of {packed.context_with_own_head}",
            packed.context_with_shared_head > packed.context_with_own_head,
        ),
        Claim(
            "T_gamma = N S(d) + T_idle describes it",
            f"serial: the formula is off by {off:.0%} at most",
            off < 0.15,
        ),
    ]


def packing(memory_gib: float = 24.0, context: int = 2048) -> Packing:
    """Arithmetic, nothing measured: Vicuna-7B (6.74 G parameters, 512 KiB of KV a token in FP16) and its
    EAGLE head with embedding and LM head (0.5 G parameters, 16 KiB of KV a token), 1 GiB for the runtime."""
    target_fp16, target_int4 = 6.74e9 * 2, 6.74e9 * 0.5625  # 4 bits and a scale of 16 for 32 weights
    head, target_kv, head_kv, runtime = 0.498e9 * 2, 512 * 1024, 16 * 1024, 1 * GIB
    room = memory_gib * GIB - runtime
    alone = target_int4 + context * target_kv
    return Packing(
        memory_gib=memory_gib,
        with_own_head=int(room // (alone + head + context * head_kv)),
        with_shared_head=int(room // alone),
        context_with_own_head=int((room - target_fp16 - head) // (target_kv + head_kv)),
        context_with_shared_head=int((room - target_fp16) // target_kv),
    )
