"""From snapshots to figures, windows and alarms."""

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from starsd_edge.monitor.alarms import Severity, alarms_of
from starsd_edge.monitor.figures import DEVICE_FIGURES, SERVICE_FIGURES
from starsd_edge.monitor.link_state import Link, LinkState
from starsd_edge.monitor.model import WINDOWS_S, Model
from starsd_edge.monitor.views import DeviceView, Status
from starsd_edge.protocol.telemetry import (
    DeviceSnapshot,
    EngineSnapshot,
    Mode,
    ServiceSnapshot,
    SessionSnapshot,
    Stage,
    Work,
)

from .fleet import durations, service_after
from .scenes import watched

FOREVER = float("inf")


def of_snapshots(*snapshots: ServiceSnapshot) -> Model:
    model = Model.of(["desk"])
    for snapshot in snapshots:
        model.take(0, snapshot, 100)
    model.note_links([Link(LinkState.UP)])
    return model


def with_work(seconds: float, work: Work, **device: object) -> ServiceSnapshot:
    entry = msgspec.structs.replace(DeviceSnapshot("orin", connected=True, work=work), **device)
    return ServiceSnapshot("b0", int(seconds * 2), seconds, devices=[entry])


def only(model: Model, window_s: float = FOREVER) -> DeviceView:
    (view,) = model.device_views(window_s)
    return view


def test_figures_are_growth_over_the_window_by_the_services_own_clock() -> None:
    before = Work(num_drafts=10, accepted_tokens=20, draft_tokens=150, tokens=30, plain_tokens=0)
    after = Work(num_drafts=30, accepted_tokens=50, draft_tokens=450, tokens=90, plain_tokens=10)
    view = only(of_snapshots(with_work(100.0, before), with_work(105.0, after)))
    assert view.work.tokens_per_s == 12.0
    assert view.work.acceptance_length == 1 + 30 / 20
    assert view.work.acceptance_rate == 0.1
    assert view.work.plain_share == pytest.approx(10 / 60)


def test_acceptance_by_depth_counts_trees_that_reached_it() -> None:
    before = Work(num_drafts=10, accepted_per_depth=[8, 4], tried_per_depth=[10, 8])
    after = Work(num_drafts=20, accepted_per_depth=[14, 6, 1, 0], tried_per_depth=[20, 13, 4, 4])
    assert only(of_snapshots(with_work(1.0, before), with_work(2.0, after))).work.depth_rates == [
        0.6,
        0.4,
        0.25,
    ]


def test_stages_are_those_of_the_window() -> None:
    before = Work(stages={Stage.LINK: durations(0.5, 100)})
    after = Work(stages={Stage.LINK: durations(0.5, 100).plus(durations(0.002, 9))})
    view = only(of_snapshots(with_work(1.0, before), with_work(2.0, after)))
    assert view.work.stage(Stage.LINK).count == 9
    assert view.work.stage(Stage.LINK).quantile(0.99) == pytest.approx(0.002, rel=0.05)
    assert view.work.stage(Stage.QUEUE).quantile(0.5) is None


def test_one_snapshot_has_no_speed_yet_and_nothing_is_made_up() -> None:
    model = of_snapshots(with_work(100.0, Work(tokens=50)))
    assert only(model).work.tokens_per_s is None
    empty = {figure.key: figure.text(only(model)) for figure in DEVICE_FIGURES}
    assert (empty["tokens_per_s"], empty["power_w"], empty["joules_per_token"]) == ("-", "-", "-")


@pytest.mark.parametrize("window", range(len(WINDOWS_S)))
def test_a_window_is_as_long_as_it_says_or_as_long_as_we_watched(window: int) -> None:
    model = Model.of(["desk"])
    for number in range(1500):
        model.take(0, with_work(100 + number / 2, Work(tokens=number)), 100)
    watched_s, wanted_s = 749.5, WINDOWS_S[window]
    view = only(model, wanted_s)
    assert min(wanted_s, watched_s) - 10 <= view.seconds <= min(wanted_s, watched_s)
    assert view.work.tokens_per_s == pytest.approx(2.0)


def test_few_snapshots_are_kept_however_long_we_watch() -> None:
    model = Model.of(["desk"])
    for number in range(4000):
        model.take(0, with_work(number / 2, Work()), 100)
    assert len(model.services[0].kept) < 60


def test_reset_starts_every_window_now() -> None:
    model = of_snapshots(with_work(1.0, Work(tokens=10)), with_work(2.0, Work(tokens=1000)))
    model.reset()
    assert only(model).work.tokens_per_s is None
    model.take(0, with_work(4.0, Work(tokens=1010)), 100)
    assert only(model).work.tokens_per_s == 5.0


def test_a_restarted_service_begins_anew() -> None:
    old = [with_work(1.0, Work(tokens=10)), with_work(2.0, Work(tokens=900))]
    new = [
        msgspec.structs.replace(with_work(s, Work(tokens=t)), boot_id="b1") for s, t in ((1.0, 3), (3.0, 7))
    ]
    model = of_snapshots(*old, *new)
    assert only(model).work.tokens_per_s == 2.0
    assert model.services[0].restarts == 1


def test_a_snapshot_that_comes_twice_or_late_changes_nothing() -> None:
    one, two = with_work(1.0, Work(tokens=10)), with_work(2.0, Work(tokens=20))
    model = of_snapshots(one, two, two, one)
    assert only(model).work.tokens_per_s == 10.0


def test_an_edge_that_counts_anew_gives_no_negative_figures() -> None:
    before = Work(tokens=500, num_drafts=100, stages={Stage.VERIFY: durations(0.05, 100)})
    after = Work(tokens=5, num_drafts=1, stages={Stage.VERIFY: durations(0.05, 1)})
    view = only(of_snapshots(with_work(1.0, before), with_work(2.0, after)))
    assert view.work.tokens_per_s == 0.0
    assert view.work.stage(Stage.VERIFY).count == 1


def test_a_device_that_appears_counts_from_nothing() -> None:
    empty = ServiceSnapshot("b0", 1, 1.0)
    assert only(of_snapshots(empty, with_work(3.0, Work(tokens=8)))).work.tokens_per_s == 4.0


@pytest.mark.parametrize(
    ("device", "status"),
    [
        (DeviceSnapshot("d"), Status.ABSENT),
        (DeviceSnapshot("d", quiet_s=20.0), Status.DOWN),
        (DeviceSnapshot("d", quiet_s=20.0, left=True), Status.GONE),
        (DeviceSnapshot("d", connected=True, quiet_s=1.0, left=True), Status.GONE),
        (DeviceSnapshot("d", connected=True), Status.IDLE),
        (DeviceSnapshot("d", connected=True, sessions=[SessionSnapshot("s")]), Status.IDLE),
        (
            DeviceSnapshot("d", connected=True, sessions=[SessionSnapshot("s", mode=Mode.DRAFTING)]),
            Status.DRAFTING,
        ),
        (
            DeviceSnapshot(
                "d",
                connected=True,
                sessions=[SessionSnapshot("s", mode=Mode.DRAFTING), SessionSnapshot("t", mode=Mode.PLAIN)],
            ),
            Status.PLAIN,
        ),
    ],
)
def test_the_state_of_a_device(device: DeviceSnapshot, status: Status) -> None:
    assert only(of_snapshots(ServiceSnapshot("b", 1, 1.0, devices=[device]))).status is status


@settings(max_examples=40)
@given(st.lists(st.tuples(st.floats(0, 1e4), st.integers(0, 5), st.integers(0, 200)), max_size=12))
def test_whatever_a_service_sends_every_figure_can_be_read(sent: list[tuple[float, int, int]]) -> None:
    model = Model.of(["desk"])
    for number, (uptime_s, devices, sequence) in enumerate(sent):
        snapshot = service_after(uptime_s, devices, boot_id=f"b{number % 2}")
        model.take(0, msgspec.structs.replace(snapshot, sequence=sequence), 100)
    for window_s in WINDOWS_S:
        for view in model.device_views(window_s):
            assert all(figure.text(view) for figure in DEVICE_FIGURES)
        service = model.services[0].view(window_s)
        assert service is None or all(figure.text(service) for figure in SERVICE_FIGURES)
        alarms_of(model, model.device_views(window_s), window_s)


class TestAlarms:
    def found(self, model: Model, window_s: float = FOREVER) -> dict[str, str]:
        return {alarm.what: alarm.why for alarm in alarms_of(model, model.device_views(window_s), window_s)}

    def test_nothing_is_wrong(self) -> None:
        model = of_snapshots(*(service_after(s, 1) for s in (100.0, 110.0)))
        for kept in model.services[0].kept:
            kept.snapshot.gateway.refused_peers = []
        assert self.found(model) == {}

    @pytest.mark.parametrize(
        "state", [s for s in LinkState if s not in (LinkState.UP, LinkState.CONNECTING, LinkState.ENDED)]
    )
    def test_a_service_that_is_not_there_and_why(self, state: LinkState) -> None:
        model = Model.of(["desk"])
        model.note_links([Link(state)])
        (alarm,) = alarms_of(model, [], FOREVER)
        assert (alarm.severity, alarm.what, alarm.where) == (Severity.CRITICAL, state.value, "desk")
        assert alarm.why

    def test_the_worst_comes_first(self) -> None:
        alarms = alarms_of(watched(), watched().device_views(FOREVER), FOREVER)
        assert [alarm.severity for alarm in alarms] == sorted(alarm.severity for alarm in alarms)
        assert alarms[0].what == "link down"

    def test_plain_decoding_says_why(self) -> None:
        assert self.found(watched())["plain decoding"] == "waiting costs more than a plain step"

    @pytest.mark.parametrize(
        ("demand", "busy", "saturated"),
        [(1.0, 0.97, True), (0.7, 0.7, False), (1.0, 0.5, False)],
        ids=["waits all the time", "has time left", "waits for something else"],
    )
    def test_a_saturated_drafter(self, demand: float, busy: float, saturated: bool) -> None:
        def at(seconds: float) -> ServiceSnapshot:
            engine = EngineSnapshot(busy_s=seconds * busy, demand_s=seconds * demand)
            return ServiceSnapshot("b", int(seconds), seconds, engine=engine)

        assert ("drafter saturated" in self.found(of_snapshots(at(10.0), at(20.0)))) is saturated

    @pytest.mark.parametrize(
        ("accepted", "fallen"), [(1500, False), (1100, False), (900, True)], ids=["as ever", "a bit", "much"]
    )
    def test_acceptance_that_fell(self, accepted: int, fallen: bool) -> None:
        """1000 trees before brought 2.5 tokens each; 1000 trees of the window bring 1 + accepted / 1000."""
        before = Work(num_drafts=1000, accepted_tokens=1500)
        after = Work(num_drafts=2000, accepted_tokens=1500 + accepted)
        found = self.found(of_snapshots(with_work(1.0, before), with_work(5.0, after)))
        assert ("acceptance fallen" in found) is fallen

    def test_a_few_trees_say_nothing_about_acceptance(self) -> None:
        before = Work(num_drafts=1000, accepted_tokens=1500)
        after = Work(num_drafts=1020, accepted_tokens=1500)
        assert self.found(of_snapshots(with_work(1.0, before), with_work(5.0, after))) == {}

    def test_a_saturated_engine_says_how_many_trees_it_narrowed_in_the_window(self) -> None:
        def at(seconds: float, narrowed: int) -> ServiceSnapshot:
            engine = EngineSnapshot(busy_s=seconds, demand_s=seconds, narrowed_trees=narrowed, row_price=0.1)
            return ServiceSnapshot("b", int(seconds), seconds, engine=engine)

        assert self.found(of_snapshots(at(1.0, 5), at(2.0, 8)))["drafter saturated"].endswith(
            "3 trees narrowed"
        )
        assert "narrowed" not in self.found(of_snapshots(at(1.0, 5), at(2.0, 5)))["drafter saturated"]

    def test_refusals_full_memory_and_strangers_are_named(self) -> None:
        def at(seconds: float, refused: int) -> ServiceSnapshot:
            engine = EngineSnapshot(
                kv_rows_used=100, kv_rows_total=100, refusals={"sessions": refused, "new": 1}
            )
            return ServiceSnapshot("b", int(seconds), seconds, engine=engine, draining=True)

        found = self.found(of_snapshots(at(1.0, 2), at(2.0, 5)))
        assert found["sessions refused"] == "3 x sessions of one device (--device-sessions)"
        assert {"KV cache full", "draining"} <= set(found)
        assert "unknown key" in self.found(watched())["key refused"]
