"""What the service makes of its own counters and of what edges report."""

import pytest

from starsd_edge.latency import MAX_COUNT, Histogram
from starsd_edge.protocol.greeting import HelloBody
from starsd_edge.protocol.messages import Head, Hello, Hints, Report
from starsd_edge.protocol.telemetry import (
    MAX_DEPTH,
    EdgeReport,
    EdgeSession,
    Energy,
    GatewaySnapshot,
    Mode,
    ServiceSnapshot,
    Stage,
    Work,
    added,
    decode_report,
    decode_snapshot,
    encode_report,
    encode_snapshot,
)
from starsd_server.ipc import GatewayState
from starsd_server.telemetry import _device_work
from starsd_server.told import MAX_PROGRAMS, Told

from .test_sessions import Room, identity, rows


def times(*seconds: float) -> Histogram:
    histogram = Histogram()
    for value in seconds:
        histogram.add(value)
    return histogram


SEEN = Work(
    num_drafts=9,
    tokens=20,
    bytes_up=1000,
    bytes_down=100,
    stages={Stage.QUEUE: times(0.001), Stage.LINK: times(0.004), Stage.VERIFY: times(0.1)},
)


def told_by(*reports: EdgeReport) -> Told:
    told = Told()
    for report in reports:
        told.take(report)
    return told


def report_of(boot: str, tokens: int, joules: float | None = None) -> EdgeReport:
    energy = Energy(plain_j=joules, plain_tokens=tokens) if joules is not None else None
    session = EdgeSession(f"session of {boot}", Mode.PLAIN, "why", Work(tokens=tokens))
    return EdgeReport(boot, sessions=[session], energy=energy, reconnects=1)


def test_without_a_report_a_device_is_what_the_service_saw() -> None:
    assert _device_work(SEEN, Told().work) == SEEN
    assert _device_work(SEEN, told_by(EdgeReport("boot")).work) == SEEN


def test_an_edge_counts_its_rounds_and_the_service_its_stages_and_bytes() -> None:
    told = [
        Work(num_drafts=5, tokens=14, plain_tokens=3, stages={Stage.VERIFY: times(0.05, 0.05)}),
        Work(num_drafts=2, tokens=6, plain_tokens=1, fallbacks={"late": 1}),
    ]
    report = EdgeReport(
        "boot", sessions=[EdgeSession(str(n), Mode.DRAFTING, "", w) for n, w in enumerate(told)]
    )
    work = _device_work(SEEN, told_by(report).work)
    assert (work.num_drafts, work.tokens, work.plain_tokens, work.fallbacks) == (7, 20, 4, {"late": 1})
    assert (work.bytes_up, work.bytes_down) == (1000, 100)
    assert {stage: h.count for stage, h in work.stages.items()} == {
        Stage.VERIFY: 2,
        Stage.QUEUE: 1,
        Stage.LINK: 1,
    }


def test_sums_are_right_by_depth_and_leave_what_they_add_alone() -> None:
    one = Work(accepted_per_depth=[3, 1], tried_per_depth=[4, 3], fallbacks={"a": 1}, tree_nodes=times(4))
    other = Work(accepted_per_depth=[2, 2, 1], tried_per_depth=[2, 2, 2], fallbacks={"a": 2, "b": 1})
    total = added([one, other])
    assert (total.accepted_per_depth, total.tried_per_depth) == ([5, 3, 1], [6, 5, 2])
    assert (total.fallbacks, total.tree_nodes.count) == ({"a": 3, "b": 1}, 1)
    assert (one.accepted_per_depth, one.fallbacks) == ([3, 1], {"a": 1})


def test_programs_of_one_device_are_added_up_and_a_newer_report_replaces_its_own() -> None:
    """A chat and an endpoint on one device: the counters of neither jump when the other reports."""
    told = told_by(
        report_of("chat", 5), report_of("serve", 100, joules=30.0), report_of("chat", 9, joules=2.0)
    )
    assert told.work is not None
    assert (told.work.tokens, told.reconnects) == (109, 2)
    assert told.sessions.keys() == {"session of chat", "session of serve"}
    assert told.energy == Energy(plain_j=32.0, plain_tokens=109)
    assert told.newest is not None
    assert told.newest.edge_boot == "chat"


def test_counts_stay_when_a_program_is_no_longer_told_apart() -> None:
    told = Told()
    for number in range(3 * MAX_PROGRAMS):
        told.take(report_of(f"boot {number}", 10, joules=1.0))
        assert told.work is not None
        assert told.work.tokens == 10 * (number + 1)
        assert told.energy is not None
        assert told.energy.plain_j == number + 1
    assert len(told.sessions) == MAX_PROGRAMS


# ------------------------------------------------------------------------------- what a device cannot do


def read_by_a_watcher(room: Room) -> ServiceSnapshot:
    snapshot = room.sessions.recorder.snapshot(
        room.now_s, room.sessions.facts(), GatewayState(GatewaySnapshot()), False
    )
    return decode_snapshot(encode_snapshot(snapshot))


LARGEST = Histogram(first=1, counts=[MAX_COUNT], total=1e308)
BEYOND_TOGETHER = {
    "counts": [Work(num_drafts=MAX_COUNT), Work(num_drafts=1)],
    "depths": [Work(accepted_per_depth=[MAX_COUNT]), Work(accepted_per_depth=[1])],
    "a sum": [Work(tree_nodes=LARGEST), Work(tree_nodes=Histogram(1, [0], 1e308))],
    "buckets": [Work(tree_nodes=LARGEST), Work(tree_nodes=Histogram(1, [1], 0.0))],
    "reasons": [Work(fallbacks={f"{at} {n}": 1 for n in range(32)}) for at in ("here", "there")],
}


@pytest.mark.parametrize("works", BEYOND_TOGETHER.values(), ids=BEYOND_TOGETHER)
def test_counts_that_are_too_much_together_are_not_taken(works: list[Work]) -> None:
    """Each of them is within the limits. The snapshot with their sum could not be read, and the gateway ended
    with every one of them that was to be published."""
    room = Room()
    edge = room.edge("device")

    def report(*told: Work) -> None:
        body = EdgeReport("boot", sessions=[EdgeSession(str(n), work=work) for n, work in enumerate(told)])
        message = Report(Head(edge.session), decode_report(encode_report(body)))
        room.sessions.receive("device", b"device", message, room.now_s)

    report(Work(tokens=5))
    report(*works)
    (device,) = read_by_a_watcher(room).devices
    assert (5, {"report": 1}) == (device.work.tokens, device.refusals)
    report(Work(tokens=6))
    (device,) = read_by_a_watcher(room).devices
    assert 6 == device.work.tokens


def test_energy_that_is_too_much_together_is_not_taken() -> None:
    told = told_by(report_of("one", 1, joules=1e308))
    with pytest.raises(ValueError, match="beyond"):
        told.take(report_of("other", 1, joules=1e308))
    assert told.energy == Energy(plain_j=1e308, plain_tokens=1)


def test_the_longest_greeting_and_the_longest_path_can_be_told() -> None:
    """HELLO has longer names than a snapshot, and says any number of accepted tokens."""
    room, long = Room(), "x" * 128
    room.prompted("device").update(*rows(1, 2), Hints(max_nodes=16, num_accepted=255))
    body = HelloBody(
        identity=identity("toy"),
        digest=identity("toy").digest(),
        device=long,
        software=long,
        dtypes=[long, "fp16"],
        max_len=64,
        max_nodes=16,
    )
    room.sessions.receive(long, b"long", Hello(Head(9), body), room.now_s)
    room.settle()
    devices = read_by_a_watcher(room).devices
    assert [MAX_DEPTH, 0] == [len(device.work.accepted_per_depth) for device in devices]
    assert long.startswith(devices[1].device)
