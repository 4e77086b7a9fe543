"""One message of every kind, and the variants that change its bytes: what the golden vectors hold.

Run this file to print the vectors of the present code: `python -m tests.core.protocol.wire_samples`. They are
changed by hand, never by a test: bytes that change are a new version of the protocol.
"""

from __future__ import annotations

import numpy as np

from starsd_edge.latency import Histogram
from starsd_edge.protocol.codec import encode
from starsd_edge.protocol.features import EncodedRows, FeatureDtype
from starsd_edge.protocol.greeting import HelloBody, Identity, WelcomeBody
from starsd_edge.protocol.messages import (
    Busy,
    BusyReason,
    Close,
    Draft,
    Error,
    ErrorCode,
    GoAway,
    Head,
    Hello,
    Hints,
    Message,
    NeedPrefill,
    Open,
    Ping,
    Pong,
    Prefill,
    PrefillAck,
    Report,
    Update,
    Welcome,
)
from starsd_edge.protocol.telemetry import BoardReading, EdgeReport, EdgeSession, Energy, Mode, Stage, Work

__all__ = ["SAMPLES"]

SESSION, BOOT = 0x0102030405060708, 0x1112131415161718
NEW = Head(SESSION)
OPENING = Head(SESSION, BOOT, epoch=1, round_id=1, base_len=1, prefix_crc=0x99F8B879)
ROUND = Head(SESSION, BOOT, epoch=1, round_id=7, base_len=45, prefix_crc=0xA1B2C3D4)
BARE = Head(SESSION, BOOT)

IDENTITY = Identity(
    target="TinyLlama-1.1B",
    target_hash="9c" * 32,
    vocab_size=32000,
    tokenizer_hash="5e" * 32,
    hidden_size=2048,
    feature_size=2048,
    feature_layers=(-1,),
    feature_norm=True,
)
HELLO = HelloBody(
    identity=IDENTITY,
    digest=IDENTITY.digest(),
    device="jet1",
    software="0.1.0",
    dtypes=["fp16", "bf16", "int8"],
    max_len=4096,
    max_nodes=60,
    profile="agx-orin-fp16",
    cost_sizes=[1, 16, 64],
    cost_seconds=[0.03, 0.04, 0.075],
)
WELCOME = WelcomeBody(
    service="bench",
    software="0.1.0",
    head="tinyllama-eagle",
    digest=IDENTITY.digest(),
    dtype="fp16",
    max_len=4096,
    max_nodes=60,
)
TOKENS = np.array([5, 513, 31999], np.int32)
# [3, 2]: 1.0, -2.0 / 0.5, 65504.0 / 0.0, -0.0
FP16_ROWS = EncodedRows(FeatureDtype.FP16, 3, 2, bytes.fromhex("003c00c00038ff7b00000080"))
BF16_ROWS = EncodedRows(FeatureDtype.BF16, 3, 2, bytes.fromhex("803f00c0003f804700000080"))
# rows of two int8 and one scale: 127 and -127 times 1.0, and so on
INT8_ROWS = EncodedRows(FeatureDtype.INT8, 3, 2, bytes.fromhex("7f81003c01ff003800000100"))

# No field has its default: what a report can say, in the order of the tables of docs/protocol.md.
REPORT = EdgeReport(
    edge_boot="b7",
    software="0.1.0",
    sessions=[
        EdgeSession(
            session=f"{SESSION:016x}",
            mode=Mode.PLAIN,
            reason="the draft service is late",
            work=Work(
                num_drafts=3,
                draft_tokens=45,
                accepted_tokens=4,
                accepted_per_depth=[3, 1],
                tried_per_depth=[3, 3],
                tokens=9,
                plain_tokens=2,
                prompt_tokens=41,
                late_trees=1,
                stale_trees=1,
                timeouts=1,
                fallbacks={"the draft service is late": 2},
                bytes_up=90_000,
                bytes_down=700,
                stages={Stage.LINK: Histogram(80, [2, 1], 0.0035), Stage.VERIFY: Histogram(120, [3], 0.09)},
                tree_nodes=Histogram(192, [3], 48.0),
            ),
        )
    ],
    board=BoardReading(
        source="tegrastats",
        model="NVIDIA Jetson AGX Orin",
        l4t="36.4.3",
        jetpack="6.2",
        power_mode="MAXN",
        ram_used_bytes=4 << 30,
        ram_total_bytes=32 << 30,
        swap_used_bytes=1 << 20,
        swap_total_bytes=16 << 30,
        cpu_loads=[0.5, None],
        cpu_mhz=[2201.0, None],
        gpu_load=0.75,
        gpu_mhz=1300.5,
        memory_bus_load=0.25,
        temperatures_c={"cpu": 51.5},
        rails_w={"VDD_GPU_SOC": 9.5, "VDD_CPU_CV": 2.25},
        power_w=11.75,
        power_rails=["VDD_GPU_SOC", "VDD_CPU_CV"],
        other={"fan": "30%"},
    ),
    energy=Energy(drafting_j=12.5, drafting_tokens=40, plain_j=3.5, plain_tokens=5),
    jitter_s=0.0005,
    reconnects=2,
    last_outage="the draft service stopped answering",
    plain_tokens_per_s=7.5,
)

SAMPLES: dict[str, Message] = {
    "hello": Hello(NEW, HELLO),
    "welcome": Welcome(BARE, WELCOME),
    "welcome-resumed": Welcome(Head(SESSION, BOOT, 1, 0, 45, 0xA1B2C3D4), WELCOME),
    "open": Open(OPENING, 1),
    "prefill-fp16": Prefill(ROUND, TOKENS, FP16_ROWS),
    "prefill-bf16": Prefill(ROUND, TOKENS, BF16_ROWS),
    "prefill-int8": Prefill(ROUND, TOKENS, INT8_ROWS),
    "prefill-wide-ids": Prefill(ROUND, np.array([5, 65536, 128255], np.int32), FP16_ROWS),
    "prefill-ack": PrefillAck(ROUND),
    "update": Update(ROUND, TOKENS, FP16_ROWS, Hints(24, 2, 16, 0, 40_000, 30_000, 2_500, 1_800)),
    "update-ahead": Update(ROUND, TOKENS, FP16_ROWS, Hints(24, 2, 16, 250, 40_000, 30_000, 2_500, 1_800)),
    "update-no-rows": Update(
        ROUND, np.zeros(0, np.int32), EncodedRows(FeatureDtype.FP16, 0, 2, b""), Hints()
    ),
    "draft": Draft(ROUND, np.array([9, 10, 11], np.int32), np.array([0, 0, 1], np.int32), 150, 4_200),
    "draft-ahead": Draft(
        ROUND, np.array([9, 10], np.int32), np.array([0, 1], np.int32), 0, 4_200, ahead=True
    ),
    "draft-wide-ids": Draft(ROUND, np.array([9, 70_000], np.int32), np.array([0, 1], np.int32), 150, 4_200),
    "draft-empty": Draft(ROUND, np.zeros(0, np.int32), np.zeros(0, np.int32), 1, 2),
    "need-prefill": NeedPrefill(Head(SESSION, BOOT, 1, 7, 31, 0x0BADF00D)),
    "need-prefill-all": NeedPrefill(Head(SESSION, BOOT, 1, 7)),
    "busy": Busy(ROUND, 1_500, BusyReason.MEMORY),
    "ping": Ping(BARE, 0xFEDCBA9876543210),
    "ping-padded": Ping(BARE, 3, b"\x00\xff\x00\xff"),
    "pong": Pong(BARE, 0xFEDCBA9876543210, 320),
    "report": Report(BARE, EdgeReport(edge_boot="b7", reconnects=2)),
    "report-full": Report(BARE, REPORT),
    "close": Close(BARE),
    "goaway": GoAway(BARE, 30_000),
    "error": Error(ROUND, ErrorCode.INCOMPATIBLE, "hidden_size is 2048 here and 4096 there", 1),
}


def vectors() -> str:
    """Every sample as its name and one line of hex a frame."""
    blocks = [
        "\n".join([name, *(f"  {frame.hex()}" for frame in encode(sample))])
        for name, sample in SAMPLES.items()
    ]
    return "\n".join(blocks) + "\n"


if __name__ == "__main__":
    print(vectors(), end="")  # noqa: T201  # this is what running the file is for
