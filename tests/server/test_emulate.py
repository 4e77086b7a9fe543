"""Emulated hardware: recordings, the roofline, and a fleet against a real service."""

from __future__ import annotations

import gc
import os
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest

from starsd_edge.decoding.costs import load_profile
from starsd_edge.errors import UnreachableError, UsageError
from starsd_edge.protocol.codec import encode
from starsd_edge.protocol.features import FeatureDtype
from starsd_edge.protocol.messages import Head, Report
from starsd_edge.protocol.telemetry import EdgeReport
from starsd_server.config import HeadSource, ServiceConfig
from starsd_server.emulate.bench import BenchPlan, jain, measure
from starsd_server.emulate.devices import FleetPlan, Players
from starsd_server.emulate.engines import (
    EmulatedEngine,
    EngineProfile,
    engine_profile_names,
    load_engine_profile,
)
from starsd_server.emulate.machine import machine_use, resident_mib
from starsd_server.emulate.record import recorded_trees
from starsd_server.emulate.round_profile import RoundProfile, Table, worker_parts
from starsd_server.emulate.soak import MAX_GROWTH_MIB, Reading, growth_mib, soak
from starsd_server.emulate.trace import Conversation, RecordedTrees, Trace, record_trees, row_key
from starsd_server.emulate.virtual import VirtualClock, VirtualService, measure_virtually
from starsd_server.engine import Engine
from starsd_server.heads.checkpoint import HeadManifest, save_head
from starsd_server.heads.grow import GrowthLimits
from starsd_server.heads.head import HeadKind
from starsd_server.rows import Precision, RowHead
from starsd_server.scheduling import Limits
from starsd_server.step import Advanced, Extend, Grow, TreeReady, WorkItem
from starsd_server.stepping import Clock

from .heads import HIDDEN, TOY, VOCAB, random_head, save_toy_head

LIMITS = GrowthLimits(12, 4, 4)
SOAK_ROUNDS = 2000


def random_trace(conversations: int = 3, length: int = 40) -> Trace:
    rng = np.random.default_rng(0)
    return Trace(
        tuple(
            Conversation(
                rng.integers(0, VOCAB, length).astype(np.int32),
                rng.standard_normal((length - 1, HIDDEN)).astype(np.float16),
                prompt_len=10 + number,
            )
            for number in range(conversations)
        )
    )


def real_engine() -> Engine:
    return Engine(RowHead(random_head(HeadKind.EAGLE1), Precision.INT8), slots=4, max_len=128)


def tree_at(
    engine: Engine | EmulatedEngine, conversation: Conversation, rows: int, floor: float = 0.0
) -> tuple[TreeReady, list[int]]:
    """The tree on the first `rows` rows, and the beams of the steps it took; narrowed where there is a
    `floor`."""
    session = engine.reset(0)
    tokens, features = conversation.tokens[1 : rows + 1], conversation.features[:rows]
    item: WorkItem = Extend(session, tokens, features, 0, LIMITS)
    beams = []
    while True:
        engine.launch([item])
        (outcome,) = engine.collect()
        if floor and isinstance(outcome, Advanced):
            outcome = engine.narrow(session, floor)
        if isinstance(outcome, TreeReady):
            return outcome, beams
        assert isinstance(outcome, Advanced)
        beams.append(outcome.beams)
        item = Grow(session)


def test_a_trace_can_be_what_a_service_sees_of_it() -> None:
    """Nothing is lost in float16, which it was recorded in; a little in the other two."""
    trace = random_trace()
    errors = {
        dtype: max(
            float(np.abs(seen.features.astype(np.float32) - told.features).max())
            for seen, told in zip(trace.rounded(dtype).conversations, trace.conversations, strict=True)
        )
        for dtype in FeatureDtype
    }
    assert errors[FeatureDtype.FP16] == 0
    assert 0 < errors[FeatureDtype.BF16] < 0.02
    assert 0 < errors[FeatureDtype.INT8] < 0.05


def test_the_emulated_engine_answers_as_the_real_one_did(tmp_path: Path) -> None:
    """Same tree, same steps with the same rows, at every recorded position; saved and loaded in between."""
    trace = random_trace()
    recorded = record_trees(real_engine(), trace, LIMITS)
    assert len(recorded) == sum(len(c.tokens) - c.prompt_len for c in trace.conversations)
    trace.save(tmp_path)
    recorded.save(tmp_path / "trees.npz")
    again = Trace.load(tmp_path)
    emulated = EmulatedEngine(
        load_engine_profile("rtx-4090"), RecordedTrees.load(tmp_path / "trees.npz"), slots=2, max_len=128
    )
    for conversation, copy in zip(trace.conversations, again.conversations, strict=True):
        np.testing.assert_array_equal(conversation.features, copy.features)
        real, real_beams = tree_at(real_engine(), conversation, conversation.prompt_len)
        played, played_beams = tree_at(emulated, copy, copy.prompt_len)
        assert real.tokens.tolist() == played.tokens.tolist()
        assert real.parents.tolist() == played.parents.tolist()
        assert real_beams == played_beams


def test_trees_of_two_nodes_are_recorded(tmp_path: Path) -> None:
    """They have no step after the first, and `--max-nodes 2` ended as a bug."""
    recorded = record_trees(real_engine(), random_trace(), GrowthLimits(2, 1, 0))
    recorded.save(tmp_path / "trees.npz")
    again = RecordedTrees.load(tmp_path / "trees.npz")
    conversation = random_trace().conversations[0]
    rows = conversation.prompt_len
    found = again.find(rows, row_key(conversation.tokens[1 : rows + 1]))
    assert found is not None
    assert (1, ()) == (len(found.tree.tokens), found.levels)
    assert len(recorded) == len(again)


def test_a_head_that_was_trained_anew_is_recorded_anew(tmp_path: Path) -> None:
    """Under its old name it got the trees of the one before."""
    head, trace = save_toy_head(tmp_path / "head"), random_trace()

    def recording() -> Path:
        profile = load_profile("agx-orin-int4")
        return recorded_trees(trace, tmp_path, head, None, profile, 12, 0.01, lambda text: None)

    before = recording()
    assert before == recording()
    trained = random_head(HeadKind.EAGLE1, seed=1)
    save_head(trained, HeadManifest(name="toy-head", head=trained.config, identity=TOY), head)
    after = recording()
    assert before != after
    assert before.read_bytes() != after.read_bytes()


def test_the_emulated_engine_narrows_trees_as_the_real_one_does() -> None:
    """The same rows are run; the tree lacks what they kept out of the recorded one, and nothing else."""
    trace = random_trace()
    emulated = EmulatedEngine(
        load_engine_profile("rtx-4090"), record_trees(real_engine(), trace, LIMITS), slots=2, max_len=128
    )
    narrowed = 0
    for conversation in trace.conversations:
        whole, _ = tree_at(real_engine(), conversation, conversation.prompt_len)
        floor = float(whole.probabilities[1])
        real, real_beams = tree_at(real_engine(), conversation, conversation.prompt_len, floor)
        played, played_beams = tree_at(emulated, conversation, conversation.prompt_len, floor)
        assert real_beams == played_beams
        assert set(played.probabilities.tolist()) <= set(real.probabilities.tolist())
        assert (np.diff(played.probabilities) <= 0).all()
        assert (played.parents <= np.arange(len(played.parents))).all()
        narrowed += len(played.tokens) < len(whole.tokens)
    assert narrowed


def test_a_step_costs_its_bytes_until_there_are_rows_enough_to_cost_more() -> None:
    """The roofline of a 4090 for Vicuna-7B's head: 0.91 ms of reading, arithmetic exceeds it at 123 rows."""
    profile = load_engine_profile("rtx-4090")
    assert profile.step_s(1, 0) == profile.step_s(100, 0)
    assert profile.step_s(1, 0) == pytest.approx(0.00116, rel=0.01)
    assert profile.step_s(640, 0) > 4 * profile.step_s(100, 0) - 4 * profile.launch_s
    assert profile.step_s(1, 64 * 300) > profile.step_s(1, 0)


def test_an_unknown_engine_is_refused_with_the_names_there_are() -> None:
    with pytest.raises(UsageError, match=engine_profile_names()[0]):
        load_engine_profile("abacus")


@pytest.mark.parametrize(("shares", "index"), [([1, 1, 1, 1], 1.0), ([1, 0, 0, 0], 0.25), ([0, 0], 1.0)])
def test_jains_index(shares: list[float], index: float) -> None:
    assert index == pytest.approx(jain(np.array(shares, float)))


@pytest.mark.slow
def test_a_fleet_is_served_and_counted(tmp_path: Path) -> None:
    """Two emulated devices, real processes and sockets, int8 features, a recorded head for the real one."""
    save_toy_head(tmp_path / "head")
    trace = random_trace()
    record_trees(real_engine(), trace, LIMITS).save(tmp_path / "trees.npz")
    plan = BenchPlan(
        config=ServiceConfig(
            heads=(HeadSource(str(tmp_path / "head")),),
            bind="tcp://127.0.0.1:0",
            monitor="tcp://127.0.0.1:0",
            folder="",
            engine="rtx-4090",
            trees=str(tmp_path / "trees.npz"),
        ),
        fleet=FleetPlan(
            TOY,
            trace,
            load_profile("agx-orin-int4"),
            max_nodes=12,
            wait_s=0.01,
            dtype=FeatureDtype.INT8,
        ),
        warm_up_s=1.0,
        seconds=2.0,
    )
    row = measure(plan, "batched", [None] * 2)
    assert row.system_tokens_per_s > 0
    assert row.acceptance_length >= 1.0
    assert 0 < row.engine_busy_fraction <= 1
    assert 0 < row.busy_while_waited_for <= 1
    assert row.fairness_jain > 0.5
    assert row.batch_rows_mean >= 1


def virtual_plan(folder: Path, limits: Limits | None = None) -> BenchPlan:
    trace = random_trace()
    record_trees(real_engine(), trace, LIMITS).save(folder / "trees.npz")
    return BenchPlan(
        config=ServiceConfig(
            heads=(),
            bind="",
            folder="",
            engine="rtx-4090",
            trees=str(folder / "trees.npz"),
            max_len=128,
            limits=limits or Limits(),
        ),
        fleet=FleetPlan(TOY, trace, load_profile("agx-orin-int4"), max_nodes=12, wait_s=0.01),
        warm_up_s=0.5,
        seconds=1.0,
    )


@pytest.mark.parametrize("scheduler", ["batched", "serial"])
def test_virtual_time_needs_no_processes(tmp_path: Path, scheduler: str) -> None:
    """The same devices and sessions in one process, in seconds that pass only when told."""
    row = measure_virtually(virtual_plan(tmp_path), scheduler, [None] * 3, host_factor=0.0)
    assert row.rounds_per_s > 3
    assert row.busy_while_waited_for == pytest.approx(1.0)
    assert (row.batch_rows_mean > 7) or scheduler == "serial"


def test_no_session_waits_longer_than_one_step_to_start(tmp_path: Path) -> None:
    """Sixteen devices whose rounds fall as they fall: each is in the first step that begins after its rows
    came in, prompts beside it or not."""
    plan = virtual_plan(tmp_path)
    row = measure_virtually(plan, "batched", [None] * 16, host_factor=0.0)
    largest = 16 * LIMITS.top_k + plan.config.limits.chunk_rows
    longest_s = load_engine_profile("rtx-4090").step_s(largest, 16 * 128)
    assert row.queue_ms_max <= 1e3 * longest_s
    assert row.rounds_per_s > 100
    assert measure_virtually(plan, "serial", [None] * 16, 0.0).queue_ms_max > 3e3 * longest_s


def test_a_service_that_refuses_the_devices_is_named_with_its_reason(tmp_path: Path) -> None:
    plan = virtual_plan(tmp_path)
    service = VirtualService(plan, "batched", VirtualClock(host_factor=0.0))
    others = replace(plan.fleet, identity=msgspec.structs.replace(TOY, target_hash="ff"))
    service._players = Players(others, service._clock)
    service.join([None])
    with pytest.raises(UnreachableError, match=r"refuses the devices of the benchmark: .*does not fit"):
        service.run(1.0)


def test_what_has_come_in_when_a_step_begins_is_received_before_the_next_however_slow_the_host_is(
    tmp_path: Path,
) -> None:
    """A host that takes longer for a message than a step lasts; one comes in as each step begins."""
    clock = VirtualClock(host_factor=100.0)
    service = VirtualService(virtual_plan(tmp_path), "batched", clock)
    begin, report = service.sessions.begin, encode(Report(Head(1), EdgeReport(edge_boot="1")))
    late: list[bool] = []

    def watched(now: Clock) -> bool:
        hurried = service.sessions.hurried
        if hurried:
            late.append(any(frames is report for _, _, frames in service._inbox))
        begun = begin(now)
        if begun:
            service._inbox.append((clock(), 0, report))
        return begun

    service.sessions.begin = watched  # type: ignore[method-assign]
    service.join([None] * 2)
    service.run(5.0)
    assert len(late) > 5
    assert not any(late)


def test_reading_the_processor_time_is_not_the_hosts_work() -> None:
    """A processor that reads its own time in 2 us, and works for 10 us between one look at the clock and the
    next."""
    processor = TimedByItself(reading_s=2e-6)
    clock = VirtualClock(1.0, processor)
    with clock.host_works:
        looks = []
        for _ in range(5):
            processor.now_s += 10e-6
            looks.append(clock())
    assert looks == pytest.approx([10e-6, 20e-6, 30e-6, 40e-6, 50e-6])
    assert clock() == pytest.approx(50e-6)


def test_what_was_there_before_is_no_garbage_while_virtual_time_passes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    frozen: list[int] = []
    run = VirtualService.run

    def watched(service: VirtualService, until_s: float) -> None:
        frozen.append(gc.get_freeze_count())
        run(service, until_s)

    monkeypatch.setattr(VirtualService, "run", watched)
    measure_virtually(virtual_plan(tmp_path), "batched", [None])
    assert len(frozen) == 2
    assert min(frozen) > 1000
    assert gc.get_freeze_count() == 0


class TimedByItself:
    def __init__(self, reading_s: float) -> None:
        self.now_s, self._reading_s = 0.0, reading_s

    def __call__(self) -> float:
        self.now_s += self._reading_s
        return self.now_s


def slow_by_the_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine like a CPU's: 1 ms a step, and 1 ms more for every 8 rows."""
    profile = EngineProfile("slow", "a CPU", "toy", "", "", 8.0, 0.0, 8000.0, 1.0, 8000.0, 0.0005)
    assert profile.free_rows == 8
    assert profile.step_s(16, 0) == pytest.approx(0.0025)
    monkeypatch.setattr("starsd_server.emulate.virtual.load_engine_profile", lambda name: profile)


def test_sharing_brings_more_and_shorter_waits_where_the_engine_is_saturated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twenty-four devices where eight rows come free."""
    slow_by_the_row(monkeypatch)
    plan = replace(virtual_plan(tmp_path), warm_up_s=3.0, seconds=5.0)
    shared, whole = (
        measure_virtually(plan, scheduler, [None] * 24, host_factor=0.0) for scheduler in ("batched", "whole")
    )
    assert shared.system_tokens_per_s >= whole.system_tokens_per_s
    assert shared.draft_ms_p50 < 0.5 * whole.draft_ms_p50
    assert shared.queue_ms_p99 + shared.draft_ms_p99 < whole.queue_ms_p99 + whole.draft_ms_p99
    assert shared.fairness_jain >= 0.95 * whole.fairness_jain
    assert 0.2 < shared.narrowed_share <= 1.0  # each tree is counted once, however many levels lose rows
    assert whole.narrowed_share == 0.0


def test_an_engine_with_room_drafts_as_if_nobody_shared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the last digit, with one device and with three."""
    slow_by_the_row(monkeypatch)
    plan = virtual_plan(tmp_path)
    for edges in ([None], [None] * 3):
        shared, whole = (
            measure_virtually(plan, scheduler, edges, host_factor=0.0) for scheduler in ("batched", "whole")
        )
        assert shared == replace(whole, scheduler="batched")


def test_eight_greedy_sessions_of_one_device_cost_another_at_most_a_fifth_of_its_rounds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On an engine that slows down with every row: what is shared is a step, by device."""
    slow_by_the_row(monkeypatch)
    plan = virtual_plan(tmp_path)
    plan = replace(plan, warm_up_s=2.0, seconds=20.0)
    alone, beside = (
        measure_virtually(plan, "batched", edges, host_factor=0.0)
        for edges in (["modest"], ["modest", *["greedy"] * 8])
    )
    assert beside.first_rounds_per_s >= 0.8 * alone.first_rounds_per_s
    assert beside.rounds_per_s > 2 * beside.first_rounds_per_s
    assert beside.busy_while_waited_for == pytest.approx(1.0)


def test_memory_and_processor_time_of_a_process_are_read() -> None:
    assert resident_mib() > 1
    use = machine_use([os.getpid()])
    sum(range(10_000))
    later = machine_use([os.getpid()]).since(use)
    assert use.cpu_s[0] > 0
    assert later.cpu_s[0] >= 0
    assert later.wait_s[0] >= 0


@pytest.mark.parametrize(
    ("grown", "worker_mib"),
    [
        (0.0, [50] + [100] * 9),
        (0.0, [50, 110, 90, 100, 130, 70, 130, 90, 110, 100]),  # it breathes
        (60.0, [50, *range(110, 200, 10)]),
    ],
)
def test_growth_is_counted_from_the_second_reading(grown: float, worker_mib: list[float]) -> None:
    readings = [Reading(number, mib, 20.0) for number, mib in enumerate(worker_mib)]
    assert growth_mib(readings) == pytest.approx(grown)


@pytest.mark.slow
def test_a_service_takes_no_more_memory_round_after_round(tmp_path: Path) -> None:
    """A short soak, real processes: what is kept of every round would show with fifteen kilobytes each."""
    plan = virtual_plan(tmp_path)
    head = tmp_path / "head"
    save_toy_head(head)
    config = msgspec.structs.replace(
        plan.config,
        engine="real",
        heads=(HeadSource(str(head)),),
        bind="tcp://127.0.0.1:0",
        monitor="tcp://127.0.0.1:0",
        limits=Limits(device_rows_per_s=1e6),
    )
    seen: list[Reading] = []
    readings = soak(replace(plan, config=config), "batched", [None] * 8, SOAK_ROUNDS, seen.append)
    assert readings == seen
    assert readings[-1].rounds >= SOAK_ROUNDS
    assert growth_mib(readings) <= MAX_GROWTH_MIB


def test_every_sampled_moment_of_a_round_has_a_part(tmp_path: Path) -> None:
    """Real sessions and a real engine at one table: head, tree and the rest are told apart."""
    plan = virtual_plan(tmp_path)
    save_toy_head(tmp_path / "head")
    config = msgspec.structs.replace(plan.config, engine="real", heads=(HeadSource(str(tmp_path / "head")),))
    parts = worker_parts(Table(replace(plan, config=config), 2), 2, 300)
    assert {"head", "tree"} <= set(parts)
    profile = RoundProfile({"head": 2.0, "scores": 1.0, "tree": 0.25, "gateway": 0.5}, 300)
    assert profile.beside_head_ms == pytest.approx(0.75)
    assert "not head     0.750 ms" in profile.lines()
