"""What is fuzzed: functions of bytes that may raise nothing.

Each takes whatever a stranger, a device or a service could send, and turns every permitted refusal into a
plain return. Anything else that comes out is a bug.
"""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Callable
from pathlib import Path

from msgspec.structs import replace

from starsd_edge.errors import RemoteProtocolError
from starsd_edge.latency import Histogram
from starsd_edge.protocol.codec import decode, encode
from starsd_edge.protocol.messages import Prefill, Update, WireError
from starsd_edge.protocol.server_connection import refusal
from starsd_edge.protocol.session_table import SessionTable
from starsd_edge.protocol.states import EdgeState
from starsd_edge.protocol.telemetry import (
    DeviceSnapshot,
    EdgeReport,
    EdgeSession,
    Energy,
    ServiceSnapshot,
    SessionSnapshot,
    Work,
    decode_report,
    decode_snapshot,
    encode_report,
    encode_snapshot,
)
from starsd_server.told import Told
from tests.core.protocol.pair import Pair, committed, offer, token_at
from tests.core.protocol.wire_samples import BOOT, SESSION
from tests.core.test_telemetry import SNAPSHOT

__all__ = ["CORPORA", "TARGETS", "join_frames", "split_frames"]

WIRE = Path(__file__).parents[1] / "core" / "protocol" / "wire"


def join_frames(frames: list[bytes]) -> bytes:
    """Frames as one string: a length of two bytes before each."""
    return b"".join(struct.pack("<H", len(frame)) + frame for frame in frames)


def split_frames(data: bytes) -> list[bytes]:
    """Any bytes as frames; the last one takes what is left."""
    frames = []
    while len(data) >= 2 and len(frames) < 5:
        (size,) = struct.unpack_from("<H", data)
        frames.append(data[2 : 2 + size])
        data = data[2 + size :]
    return frames


def fuzz_decode(data: bytes) -> None:
    """The codec and the features: a message that decodes encodes to itself."""
    message, refused = None, None
    try:
        message = decode(split_frames(data))
    except WireError as error:
        refused = error
    if message is None:
        assert refused is not None
        assert decode(refusal(refused, 1)).head.session == (refused.head.session if refused.head else 0)
        return
    if isinstance(message, Prefill | Update):
        with contextlib.suppress(RemoteProtocolError):
            message.features.decode()
    again = decode(encode(message))
    assert type(again) is type(message)
    assert again.head == message.head


def fuzz_service(data: bytes) -> None:
    """A service with one open session: any message leaves it able to answer, and bounded."""
    pair = Pair(session=SESSION, boot_id=BOOT)
    pair.join()
    pair.edge.start(token_at(0), 0.0)
    pair.edge.update(committed(0, 8), 0.0)
    pair.step()
    for message in messages(data):
        for reply in pair.service.receive(message, 1.0):
            decode(reply)
    assert len(pair.service.table) <= 4
    assert len(pair.service.rows) <= 4000


def fuzz_edge(data: bytes) -> None:
    """An edge in the middle of a round: any message leaves it working."""
    pair = Pair(session=SESSION, boot_id=BOOT)
    pair.join()
    pair.edge.start(token_at(0), 0.0)
    pair.edge.update(committed(0, 8), 0.0)
    pair.edge.take_frames()
    now_s = 0.0
    for message in messages(data):
        pair.obey(pair.edge.receive(message, now_s))
        now_s += 0.5
        pair.obey(pair.edge.tick(now_s))
    pair.edge.update(committed(8, 10), now_s)
    pair.edge.drafter_state()
    assert pair.edge.state is not EdgeState.CLOSED


def messages(data: bytes) -> list[list[bytes]]:
    """Several messages out of one string: each is a count of frames, and the frames."""
    found = []
    while data and len(found) < 8:
        count = 1 + data[0] % 3
        frames = split_frames(data[1:])[:count]
        data = data[1 + sum(2 + len(frame) for frame in frames) :]
        try:
            decode(frames)
        except WireError:
            continue  # the codec's own target has seen it; here only what gets past it matters
        found.append(frames)
        if not frames:
            break
    return found


def fuzz_table(data: bytes) -> None:
    """A table without any session."""
    table = SessionTable(offer(BOOT))
    for message in messages(data):
        table.receive("jet1", decode(message), 0.0)
    assert len(table) <= 4


def fuzz_snapshot(data: bytes) -> None:
    """What a monitor reads from the line: a snapshot that decodes encodes to itself."""
    snapshot = None
    with contextlib.suppress(RemoteProtocolError):
        snapshot = decode_snapshot(data)
    if snapshot is not None:
        assert decode_snapshot(encode_snapshot(snapshot)) == snapshot


def fuzz_report(data: bytes) -> None:
    """Two programs of a device report the same: the snapshot can be read, or one is refused."""
    told = Told()
    try:
        told.take(decode_report(data))
        told.take(replace(decode_report(data), edge_boot="the other one"))
    except (RemoteProtocolError, ValueError):
        pass
    sessions = [SessionSnapshot(session.session, work=session.work) for session in told.sessions.values()]
    device = DeviceSnapshot(
        "jet1",
        reconnects=told.reconnects,
        work=told.work or Work(),
        sessions=sessions,
        board=told.board,
        energy=told.energy,
    )
    decode_snapshot(encode_snapshot(ServiceSnapshot("00ab", 1, 0.5, devices=[device])))


TARGETS: dict[str, Callable[[bytes], None]] = {
    "decode": fuzz_decode,
    "service": fuzz_service,
    "edge": fuzz_edge,
    "table": fuzz_table,
    "snapshot": fuzz_snapshot,
    "report": fuzz_report,
}


def read_corpus() -> list[bytes]:
    vectors: list[list[bytes]] = []
    for path in sorted(WIRE.glob("*.hex")):
        for line in path.read_text().splitlines():
            if line.startswith("  "):
                vectors[-1].append(bytes.fromhex(line))
            elif line and not line.startswith("#"):
                vectors.append([])
    return [join_frames(frames) for frames in vectors]


MESSAGES = read_corpus()
TIMES = Histogram(first=1, counts=[1], total=1.0)
WORK = Work(num_drafts=1, accepted_per_depth=[1], fallbacks={"late": 1}, tree_nodes=TIMES)
REPORT = EdgeReport("boot", sessions=[EdgeSession("1", work=WORK)], energy=Energy(1.0, 1, 1.0, 1))
CORPORA: dict[str, list[bytes]] = {
    **dict.fromkeys(TARGETS, MESSAGES),
    "snapshot": [encode_snapshot(SNAPSHOT), encode_snapshot(ServiceSnapshot("00ab", 1, 0.5))],
    "report": [encode_report(REPORT)],
}
