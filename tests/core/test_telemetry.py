import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from starsd_edge.errors import RemoteProtocolError
from starsd_edge.latency import Histogram
from starsd_edge.protocol.telemetry import (
    MAX_REPORT_BYTES,
    MAX_SNAPSHOT_BYTES,
    BoardReading,
    DeviceSnapshot,
    EdgeReport,
    EdgeSession,
    Energy,
    HeadSnapshot,
    Mode,
    ServiceSnapshot,
    SessionSnapshot,
    SessionState,
    Stage,
    Work,
    decode_report,
    decode_snapshot,
    encode_report,
    encode_snapshot,
)


def full_histogram() -> Histogram:
    """As many buckets as a link between 0.1 ms and 10 s fills."""
    return Histogram(first=50, counts=[123456] * 136, total=1e6)


def full_work() -> Work:
    return Work(
        num_drafts=10**9,
        draft_tokens=10**10,
        accepted_tokens=10**9,
        accepted_per_depth=[10**8] * 8,
        fallbacks={"the draft service is late": 10**6, "no route": 10**6},
        stages={stage: full_histogram() for stage in Stage},
        tree_nodes=full_histogram(),
    )


SNAPSHOT = ServiceSnapshot(
    boot_id="00ab",
    sequence=7,
    uptime_s=12.5,
    heads=[HeadSnapshot("smollm2", "SmolLM2-135M-Instruct", "eagle-1")],
    devices=[
        DeviceSnapshot(
            "orin-1",
            connected=True,
            work=full_work(),
            sessions=[SessionSnapshot("01", state=SessionState.VERIFYING, mode=Mode.DRAFTING)],
            board=BoardReading(ram_total_bytes=7620 << 20, cpu_loads=[0.1, None], rails_w={"VDD_IN": 5.2}),
            energy=Energy(drafting_j=10.0, drafting_tokens=20),
        )
    ],
)


def test_a_snapshot_arrives_as_it_left() -> None:
    assert decode_snapshot(encode_snapshot(SNAPSHOT)) == SNAPSHOT


def test_a_report_arrives_as_it_left() -> None:
    report = EdgeReport("boot", sessions=[EdgeSession("01", Mode.PLAIN, "server down", full_work())])
    assert decode_report(encode_report(report)) == report


def test_what_a_newer_version_added_is_skipped() -> None:
    newer = json.loads(encode_snapshot(SNAPSHOT)) | {"weather": {"sky": "blue"}}
    assert decode_snapshot(json.dumps(newer).encode()) == SNAPSHOT


def test_empty_parts_cost_nothing_on_the_wire() -> None:
    assert len(encode_report(EdgeReport("boot"))) < 40


def test_a_large_fleet_fits_the_limit() -> None:
    """256 devices that have seen everything, one session each."""
    device = DeviceSnapshot("d" * 20, work=full_work(), sessions=[SessionSnapshot("s" * 16)])
    assert len(encode_snapshot(ServiceSnapshot("b", 1, 1.0, devices=[device] * 256))) < MAX_SNAPSHOT_BYTES


def test_a_busy_edge_fits_the_limit() -> None:
    report = EdgeReport("boot", sessions=[EdgeSession(f"{n}", work=full_work()) for n in range(8)])
    assert len(encode_report(report)) < MAX_REPORT_BYTES


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"null",
        b"{}",
        b'{"boot_id": "x", "sequence": -1, "uptime_s": 0}',
        b'{"boot_id": "x", "sequence": 1, "uptime_s": NaN}',
        b'{"boot_id": 5, "sequence": 1, "uptime_s": 0}',
        b'{"boot_id": "x", "sequence": 1, "uptime_s": 0, "engine": {"step_s": {"counts": [-1]}}}',
        b'{"boot_id": "x", "sequence": 1, "uptime_s": 0, "engine": {"step_s": {"first": 999999}}}',
        b'{"boot_id": "x", "sequence": 1, "uptime_s": 0, "devices": ' + b"[" * 100_000,
        b'{"boot_id": "' + b"x" * 81 + b'", "sequence": 1, "uptime_s": 0}',
        encode_snapshot(SNAPSHOT)[:-1],
        encode_snapshot(SNAPSHOT) + b"{}",
    ],
)
def test_what_is_no_snapshot_is_refused(data: bytes) -> None:
    with pytest.raises(RemoteProtocolError, match="not a snapshot"):
        decode_snapshot(data)


def test_an_oversized_message_is_refused_before_decoding() -> None:
    with pytest.raises(RemoteProtocolError, match="exceeds the limit"):
        decode_snapshot(b"{" + b" " * MAX_SNAPSHOT_BYTES)
    with pytest.raises(RemoteProtocolError, match="exceeds the limit"):
        decode_report(b"{" + b" " * MAX_REPORT_BYTES)


@settings(max_examples=200)
@given(st.binary(max_size=200))
def test_any_other_bytes_raise_only_a_remote_protocol_error(data: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        decode_snapshot(data)
    with pytest.raises(RemoteProtocolError):
        decode_report(data)
