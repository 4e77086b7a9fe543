"""What a draft service tells whoever watches it, and what an edge reports about itself.

A `ServiceSnapshot` is published about twice a second on the service's monitor socket: two frames, TOPIC and
the JSON of `encode_snapshot`. It is read-only: nothing ever travels the other way. Counters and histograms
count up from the start of the service (`boot_id` names that start), so a lost snapshot loses nothing and a
watcher takes the difference of any two. An `EdgeReport` goes from an edge to its service at most once a
second and counts up from the start of the edge's process; the service passes its readings on in its
snapshots.

Every field that a user sees as a number is defined in `starsd_edge.monitor.definitions`.
Sizes are bounded: what exceeds the limits below is refused before it is decoded.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from itertools import zip_longest
from typing import Annotated, TypeVar

import msgspec

from starsd_edge.errors import RemoteProtocolError
from starsd_edge.latency import MAX_COUNT, Histogram

__all__ = [
    "MAX_DEVICES",
    "MAX_DEPTH",
    "MAX_NAME",
    "MAX_REPORT_BYTES",
    "MAX_SESSIONS_PER_DEVICE",
    "MAX_SNAPSHOT_BYTES",
    "TELEMETRY_VERSION",
    "TOPIC",
    "BoardReading",
    "DeviceSnapshot",
    "EdgeReport",
    "EdgeSession",
    "Energy",
    "EngineSnapshot",
    "GatewaySnapshot",
    "HeadSnapshot",
    "Mode",
    "RefusedPeer",
    "ServiceSnapshot",
    "SessionSnapshot",
    "SessionState",
    "Stage",
    "Work",
    "added",
    "can_be_told",
    "decode_report",
    "decode_snapshot",
    "encode_report",
    "encode_snapshot",
]

TELEMETRY_VERSION = 1
TOPIC = b"starsd.telemetry.1"  # first frame of every publication; a new layout gets a new topic

MAX_SNAPSHOT_BYTES = 2 * 1024 * 1024  # 256 devices with every histogram full take 1.6 MiB
MAX_REPORT_BYTES = 64 * 1024  # eight sessions with every histogram full; a usual report is under 1 KiB
MAX_DEVICES = 1024
MAX_SESSIONS_PER_DEVICE = 64
MAX_DEPTH = 32  # no tree is deeper
MAX_REASONS = 32

MAX_NAME = 80

Count = Annotated[int, msgspec.Meta(ge=0, le=MAX_COUNT)]
Amount = Annotated[float, msgspec.Meta(ge=0)]
Name = Annotated[str, msgspec.Meta(max_length=MAX_NAME)]
Sentence = Annotated[str, msgspec.Meta(max_length=240)]
Depths = Annotated[list[Count], msgspec.Meta(max_length=MAX_DEPTH)]
ByReason = Annotated[dict[Name, Count], msgspec.Meta(max_length=MAX_REASONS)]
Readings = Annotated[dict[Name, float], msgspec.Meta(max_length=64)]


class Stage(str, enum.Enum):
    """Where the time of a round goes. `link` is the round trip less the service's own dwell, so no clock of
    one host is ever compared with that of another."""

    LINK = "link"
    QUEUE = "queue"
    DRAFT = "draft"
    VERIFY = "verify"
    SAMPLE = "sample"


class Mode(str, enum.Enum):
    """How a session decodes right now."""

    IDLE = "idle"
    DRAFTING = "drafting"
    PLAIN = "plain"


class SessionState(str, enum.Enum):
    """Where a session stands in the service."""

    PREFILLING = "prefilling"
    QUEUED = "queued"
    DRAFTING = "drafting"
    VERIFYING = "verifying"  # its tree is with the edge
    IDLE = "idle"
    EVICTED = "evicted"


class Work(msgspec.Struct, omit_defaults=True):
    """What was done for one session, or for all sessions a device ever had. Everything counts up.

    num_drafts, draft_tokens, accepted_tokens and accepted_per_depth have the meaning of vLLM's speculative
    counters: trees verified, their nodes without the root, those accepted without bonus tokens, and, at index
    d, trees of which depth d + 1 was accepted. tried_per_depth[d] counts trees whose walk came to depth d and
    that went on to d + 1: what was accepted there, of what could have been. `tokens` are all committed
    tokens (accepted, bonus and plain), `plain_tokens` those of plain steps among them. `late_trees` came
    after a plain step and were still of use, `stale_trees` could not be followed and were dropped.
    `guard_steps` are plain steps that settled decisions too close for the runtime's rounding.
    """

    num_drafts: Count = 0
    draft_tokens: Count = 0
    accepted_tokens: Count = 0
    accepted_per_depth: Depths = []
    tried_per_depth: Depths = []
    tokens: Count = 0
    plain_tokens: Count = 0
    prompt_tokens: Count = 0
    late_trees: Count = 0
    stale_trees: Count = 0
    timeouts: Count = 0
    fallbacks: ByReason = {}
    guard_steps: Count = 0
    bytes_up: Count = 0  # edge -> service
    bytes_down: Count = 0
    stages: dict[Stage, Histogram] = {}  # seconds
    tree_nodes: Histogram = msgspec.field(default_factory=Histogram)  # nodes of verified trees, root included


def added(works: Iterable[Work]) -> Work:
    """The sum of what was done for several sessions."""
    total = Work()
    for work in works:
        for name in COUNTS:
            setattr(total, name, getattr(total, name) + getattr(work, name))
        total.accepted_per_depth = _added_lists(total.accepted_per_depth, work.accepted_per_depth)
        total.tried_per_depth = _added_lists(total.tried_per_depth, work.tried_per_depth)
        for reason, count in work.fallbacks.items():
            total.fallbacks[reason] = total.fallbacks.get(reason, 0) + count
        for stage, times in work.stages.items():
            total.stages[stage] = total.stages.get(stage, Histogram()).plus(times)
        total.tree_nodes = total.tree_nodes.plus(work.tree_nodes)
    return total


def _added_lists(one: list[int], other: list[int]) -> list[int]:
    return [a + b for a, b in zip_longest(one, other, fillvalue=0)]


COUNTS = (
    "num_drafts",
    "draft_tokens",
    "accepted_tokens",
    "tokens",
    "plain_tokens",
    "prompt_tokens",
    "late_trees",
    "stale_trees",
    "timeouts",
    "guard_steps",
    "bytes_up",
    "bytes_down",
)


class Energy(msgspec.Struct, omit_defaults=True):
    """Joules the board used while it generated, and the tokens it generated meanwhile. Only where the board
    reports power."""

    drafting_j: Amount = 0.0
    drafting_tokens: Count = 0
    plain_j: Amount = 0.0
    plain_tokens: Count = 0


class BoardReading(msgspec.Struct, omit_defaults=True):
    """One look at a device. None and missing keys mean that the device does not say; nothing is made up.

    Loads are shares 0..1; `cpu_loads` has None for a core that is off. `power_rails` says which rails
    `power_w` is the sum of: one rail where the board has a total, several where it has none.
    """

    source: Name = ""
    model: Name = ""
    l4t: Name = ""
    jetpack: Name = ""
    power_mode: Name = ""
    ram_used_bytes: Count | None = None
    ram_total_bytes: Count | None = None
    swap_used_bytes: Count | None = None
    swap_total_bytes: Count | None = None
    cpu_loads: Annotated[list[float | None], msgspec.Meta(max_length=256)] = []
    cpu_mhz: Annotated[list[float | None], msgspec.Meta(max_length=256)] = []
    gpu_load: float | None = None
    gpu_mhz: float | None = None
    memory_bus_load: float | None = None
    temperatures_c: Readings = {}
    rails_w: Readings = {}
    power_w: Amount | None = None
    power_rails: Annotated[list[Name], msgspec.Meta(max_length=8)] = []
    other: Annotated[dict[Name, Name], msgspec.Meta(max_length=64)] = {}


class EdgeSession(msgspec.Struct, omit_defaults=True):
    """One session as its edge sees it. The service adds `queue` and `draft` to the stages."""

    session: Name
    mode: Mode = Mode.IDLE
    reason: Sentence = ""  # why not drafting
    work: Work = msgspec.field(default_factory=Work)


class EdgeReport(msgspec.Struct, omit_defaults=True):
    """What an edge says of itself, at most once a second; counts since `edge_boot`, its process start."""

    edge_boot: Name
    software: Name = ""
    sessions: Annotated[list[EdgeSession], msgspec.Meta(max_length=MAX_SESSIONS_PER_DEVICE)] = []
    board: BoardReading | None = None
    energy: Energy | None = None
    jitter_s: Amount = 0.0
    reconnects: Count = 0
    last_outage: Sentence = ""  # why the link was down the last time
    plain_tokens_per_s: Amount | None = None  # this device's own plain speed, from calibration


class SessionSnapshot(msgspec.Struct, omit_defaults=True):
    """One live session."""

    session: Name
    head: Name = ""
    state: SessionState = SessionState.IDLE
    mode: Mode = Mode.IDLE
    reason: Sentence = ""
    committed_len: Count = 0
    kv_rows: Count = 0
    age_s: Amount = 0.0
    quiet_s: Amount = 0.0  # since its last message
    work: Work = msgspec.field(default_factory=Work)


class DeviceSnapshot(msgspec.Struct, omit_defaults=True):
    """One trusted device; `work` counts all sessions it had since the service started, closed ones too."""

    device: Name
    fingerprint: Name = ""
    address: Name = ""
    software: Name = ""
    feature_dtype: Name = ""
    connected: bool = False
    quiet_s: Amount | None = None  # since its last message; None: never heard of
    left: bool = False  # it said goodbye and has no session
    reason: Sentence = ""  # why it is not connected, or what it last complained about
    reconnects: Count = 0
    jitter_s: Amount = 0.0
    refusals: ByReason = {}  # BUSY and ERROR answers by reason
    plain_tokens_per_s: Amount | None = None
    work: Work = msgspec.field(default_factory=Work)
    sessions: Annotated[list[SessionSnapshot], msgspec.Meta(max_length=MAX_SESSIONS_PER_DEVICE)] = []
    board: BoardReading | None = None
    energy: Energy | None = None


class HeadSnapshot(msgspec.Struct, omit_defaults=True):
    """A draft head the service holds."""

    name: Name
    target: Name = ""
    kind: Name = ""


class EngineSnapshot(msgspec.Struct, omit_defaults=True):
    """The engine and its scheduler. `busy_s` is time inside steps, `demand_s` time in which any session
    waited."""

    hardware: Name = ""
    scheduler: Name = ""
    busy_s: Amount = 0.0
    demand_s: Amount = 0.0
    steps: Count = 0
    step_s: Histogram = msgspec.field(default_factory=Histogram)
    batch_rows: Histogram = msgspec.field(default_factory=Histogram)
    queue_depth: Count = 0  # sessions that wait for a step
    active_sessions: Count = 0
    max_sessions: Count = 0
    kv_rows_used: Count = 0
    kv_rows_total: Count = 0
    kv_bytes_total: Count = 0
    evictions: Count = 0
    refusals: ByReason = {}  # admissions refused
    row_price: Amount = (
        0.0  # tokens that a row of a tree has to bring, as of the newest step; 0: there is room
    )
    narrowed_trees: Count = 0  # of which rows were left out for that price
    ahead_drafts: Count = 0  # trees drafted for a guessed outcome
    ahead_hits: Count = 0  # of these, led on from the outcome
    ahead_s: Amount = 0.0  # in steps for them, which are not in busy_s


class RefusedPeer(msgspec.Struct, omit_defaults=True):
    """Somebody who knocked and was not let in."""

    fingerprint: Name
    address: Name = ""
    reason: Sentence = ""
    times: Count = 0
    quiet_s: Amount = 0.0


class GatewaySnapshot(msgspec.Struct, omit_defaults=True):
    """The process that owns the socket."""

    restarts: Count = 0
    messages_up: Count = 0
    messages_down: Count = 0
    bytes_up: Count = 0
    bytes_down: Count = 0
    dropped: ByReason = {}  # messages not let through, by reason
    refused_peers: Annotated[list[RefusedPeer], msgspec.Meta(max_length=32)] = []


class ServiceSnapshot(msgspec.Struct, omit_defaults=True):
    """One service at one moment. `uptime_s` is its monotonic clock since the start: rates are differences
    over it."""

    boot_id: Name
    sequence: Count
    uptime_s: Amount
    version: int = TELEMETRY_VERSION
    service: Name = ""
    software: Name = ""
    address: Name = ""
    draining: bool = False
    heads: Annotated[list[HeadSnapshot], msgspec.Meta(max_length=64)] = []
    engine: EngineSnapshot = msgspec.field(default_factory=EngineSnapshot)
    gateway: GatewaySnapshot = msgspec.field(default_factory=GatewaySnapshot)
    devices: Annotated[list[DeviceSnapshot], msgspec.Meta(max_length=MAX_DEVICES)] = []


_encoder = msgspec.json.Encoder()
_snapshot_decoder = msgspec.json.Decoder(ServiceSnapshot)
_report_decoder = msgspec.json.Decoder(EdgeReport)
_device_decoder = msgspec.json.Decoder(DeviceSnapshot)


def encode_snapshot(snapshot: ServiceSnapshot) -> bytes:
    """JSON of a snapshot, the second frame after TOPIC."""
    return _encoder.encode(snapshot)


def decode_snapshot(data: bytes | memoryview) -> ServiceSnapshot:
    """A snapshot from its JSON; fields this version does not know are skipped.

    Raises RemoteProtocolError for anything that is too large or does not fit."""
    return _decode(_snapshot_decoder, data, MAX_SNAPSHOT_BYTES, "snapshot")


def can_be_told(device: DeviceSnapshot) -> bool:
    """Whether a snapshot with this in it can be read: sums of what was within the limits may be beyond."""
    try:
        _device_decoder.decode(_encoder.encode(device))
    except (msgspec.MsgspecError, ValueError):
        return False
    return True


def encode_report(report: EdgeReport) -> bytes:
    """JSON of an edge's report."""
    return _encoder.encode(report)


def decode_report(data: bytes | memoryview) -> EdgeReport:
    """A report from its JSON; fields this version does not know are skipped.

    Raises RemoteProtocolError for anything that is too large or does not fit."""
    return _decode(_report_decoder, data, MAX_REPORT_BYTES, "edge report")


_T = TypeVar("_T")


def _decode(decoder: msgspec.json.Decoder[_T], data: bytes | memoryview, limit: int, what: str) -> _T:
    if len(data) > limit:
        raise RemoteProtocolError(f"a {what} of {len(data)} bytes exceeds the limit of {limit}")
    try:
        return decoder.decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise RemoteProtocolError(f"this is not a {what} of version {TELEMETRY_VERSION}: {error}") from error
