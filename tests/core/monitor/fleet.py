"""A made-up service with devices, whose counters grow evenly: what it had done after so many seconds."""

from starsd_edge.latency import Histogram
from starsd_edge.protocol.telemetry import (
    BoardReading,
    DeviceSnapshot,
    Energy,
    EngineSnapshot,
    GatewaySnapshot,
    HeadSnapshot,
    Mode,
    RefusedPeer,
    ServiceSnapshot,
    SessionSnapshot,
    SessionState,
    Stage,
    Work,
)

STAGE_S = {
    Stage.LINK: 0.004,
    Stage.QUEUE: 0.001,
    Stage.DRAFT: 0.006,
    Stage.VERIFY: 0.045,
    Stage.SAMPLE: 0.0004,
}


def durations(typical_s: float, times: int) -> Histogram:
    """Nine in ten at the typical time, the others four times as long."""
    histogram = Histogram()
    histogram.add(typical_s, times - times // 10)
    if times >= 10:
        histogram.add(typical_s * 4, times // 10)
    return histogram


def work_after(seconds: float, *, rounds_per_s: float, accepted: float) -> Work:
    """Trees of 16 nodes and depth 4 of which `accepted` nodes are accepted on average."""
    drafts = int(seconds * rounds_per_s)
    by_depth = [int(drafts * accepted * share) for share in (0.5, 0.27, 0.15, 0.08)]
    tokens = drafts + sum(by_depth)
    return Work(
        num_drafts=drafts,
        draft_tokens=drafts * 15,
        accepted_tokens=sum(by_depth),
        accepted_per_depth=by_depth,
        tried_per_depth=[drafts] * 4,
        tokens=tokens + drafts // 20,
        plain_tokens=drafts // 20,
        late_trees=drafts // 50,
        stale_trees=drafts // 100,
        bytes_up=drafts * 1400,
        bytes_down=drafts * 200,
        stages={stage: durations(typical, drafts) for stage, typical in STAGE_S.items()},
        tree_nodes=durations(16.0, drafts),
    )


BOARD = BoardReading(
    source="tegrastats (JetPack 6 or 7.0)",
    model="NVIDIA Jetson Orin Nano Engineering Reference Developer Kit Super",
    l4t="36.4.4",
    jetpack="6.2.1+b38",
    power_mode="25W",
    ram_used_bytes=6712 << 20,
    ram_total_bytes=7620 << 20,
    swap_used_bytes=369 << 20,
    swap_total_bytes=3810 << 20,
    cpu_loads=[0.38, 0.02, 0.01, 0.0, None, None],
    cpu_mhz=[1497, 729, 729, 729, None, None],
    gpu_load=0.99,
    gpu_mhz=612,
    memory_bus_load=0.61,
    temperatures_c={"cpu": 57.1, "gpu": 58.6, "tj": 58.3},
    rails_w={"VDD_IN": 16.3, "VDD_CPU_GPU_CV": 7.1, "VDD_SOC": 3.1},
    power_w=16.3,
    power_rails=["VDD_IN"],
    other={"NPU": "busy 12%"},
)


def device_after(index: int, seconds: float) -> DeviceSnapshot:
    """Every tenth is down, every seventh decodes plainly, the last of ten has no session."""
    name = f"orin-{index:02d}"
    rounds_per_s = 12.0 + index % 5
    if index % 10 == 3:
        return DeviceSnapshot(name, connected=False, quiet_s=12.0, reason="no message since the link broke")
    session = SessionSnapshot(
        f"{index:016x}",
        head="smollm2",
        state=SessionState.VERIFYING,
        mode=Mode.PLAIN if index % 7 == 5 else Mode.DRAFTING,
        reason="waiting costs more than a plain step" if index % 7 == 5 else "",
        committed_len=100 + int(seconds),
        kv_rows=99 + int(seconds),
        age_s=seconds,
        quiet_s=0.05,
    )
    return DeviceSnapshot(
        name,
        fingerprint="a1b2-c3d4",
        address=f"192.168.1.{index + 10}",
        software="0.1.0",
        feature_dtype="fp16",
        connected=True,
        quiet_s=0.05,
        reconnects=index % 3,
        jitter_s=0.0004,
        plain_tokens_per_s=20.0,
        work=work_after(seconds, rounds_per_s=rounds_per_s, accepted=1.5),
        sessions=[] if index % 10 == 9 else [session],
        board=BOARD if index % 2 == 0 else None,
        energy=Energy(16.3 * seconds, int(30 * seconds), 100.0, 80) if index % 2 == 0 else None,
    )


def service_after(
    seconds: float, devices: int, *, boot_id: str = "b0", demand: float = 0.7
) -> ServiceSnapshot:
    """The whole service."""
    return ServiceSnapshot(
        boot_id,
        sequence=int(seconds * 2),
        uptime_s=seconds,
        service="desk",
        software="0.1.0",
        heads=[HeadSnapshot("smollm2", "SmolLM2-135M-Instruct", "eagle-1")],
        engine=EngineSnapshot(
            hardware="cpu, 2 threads",
            scheduler="batched",
            busy_s=seconds * demand * 0.95,
            demand_s=seconds * demand,
            steps=int(seconds * 100),
            step_s=durations(0.006, int(seconds * 100)),
            batch_rows=durations(12.0, int(seconds * 100)),
            queue_depth=2,
            active_sessions=devices,
            max_sessions=64,
            kv_rows_used=40_000,
            kv_rows_total=131_072,
            row_price=0.04,
            narrowed_trees=int(seconds * 7),
            ahead_drafts=int(seconds * 10),
            ahead_hits=int(seconds * 4),
        ),
        gateway=GatewaySnapshot(
            bytes_up=int(seconds * 40_000),
            bytes_down=int(seconds * 6_000),
            refused_peers=[RefusedPeer("ffff-0000", "10.0.0.9", "unknown key", 3, 5.0)],
        ),
        devices=[device_after(index, seconds) for index in range(devices)],
    )
