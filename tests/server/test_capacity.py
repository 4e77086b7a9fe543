"""The capacity model against the benchmark of the service in virtual time, and what it says of a fleet."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from starsd_edge.decoding.costs import load_profile
from starsd_edge.errors import BundleError, UsageError
from starsd_server.capacity.cli import command, measured_steps
from starsd_server.capacity.groups import parse_groups
from starsd_server.capacity.model import DeviceClass, DraftWork, Host, balance, saturation
from starsd_server.capacity.recorded import work_of
from starsd_server.capacity.scenario import Scenario, changed, examine
from starsd_server.config import HeadSource, ServiceConfig
from starsd_server.emulate.bench import BenchPlan
from starsd_server.emulate.devices import FleetPlan
from starsd_server.emulate.engines import load_engine_profile
from starsd_server.emulate.trace import RecordedTrees, record_trees
from starsd_server.emulate.virtual import measure_virtually
from starsd_server.engine import Engine
from starsd_server.heads.head import HeadKind
from starsd_server.rows import Precision, RowHead
from starsd_server.scheduling import Limits, Policy

from .heads import TOY, random_head
from .test_emulate import LIMITS, random_trace

RTX = load_engine_profile("rtx-4090")
ORIN = load_profile("agx-orin-int4")
RTT_S = 0.002


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> tuple[BenchPlan, DraftWork]:
    """A plan for emulated devices that replay a recording, and the work that it is."""
    folder = tmp_path_factory.mktemp("recording")
    trace = random_trace()
    engine = Engine(RowHead(random_head(HeadKind.EAGLE1), Precision.FLOAT32), slots=4, max_len=128)
    trees = record_trees(engine, trace, LIMITS)
    trees.save(folder / "trees.npz")
    config = ServiceConfig(
        heads=(HeadSource(""),),
        bind="",
        folder="",
        limits=Limits(max_sessions=64, device_rows_per_s=1e9, rows_per_s=1e9),
        max_nodes=LIMITS.max_nodes,
        engine="rtx-4090",
        trees=str(folder / "trees.npz"),
        log_level="warning",
    )
    fleet = FleetPlan(TOY, trace, ORIN, LIMITS.max_nodes, 0.0, RTT_S)
    return BenchPlan(config, fleet, warm_up_s=1.0, seconds=2.5), work_of(trace, trees)


@pytest.mark.parametrize(
    ("policy", "targets"),
    [
        (Policy.BATCHED, 1),
        (Policy.BATCHED, 12),
        (Policy.BATCHED, 48),
        (Policy.SERIAL, 1),
        (Policy.SERIAL, 4),
        (Policy.SERIAL, 24),
    ],
)
def test_the_model_says_what_the_benchmark_measures(
    recording: tuple[BenchPlan, DraftWork], policy: Policy, targets: int
) -> None:
    plan, work = recording
    measured = measure_virtually(plan, policy.value, [None] * targets, host_factor=0.0)
    # What a short benchmark happens to accept is the recording's business, not the model's.
    work = dataclasses.replace(work, tokens=measured.acceptance_length)
    device = DeviceClass("orin", targets, ORIN.curve.plain_s, ORIN.curve(round(work.nodes)), RTT_S, work)
    fleet = balance(Host(RTX.step_s, policy), [device])
    assert fleet.tokens_per_s == pytest.approx(measured.system_tokens_per_s, rel=0.1)
    if policy is Policy.SERIAL:  # in batches it depends on whether devices are in step, throughput does not
        assert fleet.busy == pytest.approx(measured.engine_busy_fraction, abs=0.1)


WORK = DraftWork(tokens=3.0, nodes=16, steps=6, rows=45, kv_rows=500, bytes_up=25_000)


def orins(count: float, rtt_s: float = RTT_S) -> DeviceClass:
    return DeviceClass("orin", count, ORIN.curve.plain_s, ORIN.curve(16), rtt_s, WORK)


def test_one_device_gets_what_its_round_takes() -> None:
    """T_gamma = S(d) + T_idle with nobody else: link, verification, and the steps of its own tree."""
    fleet = balance(Host(RTX.step_s), [orins(1)])
    round_s = RTT_S + ORIN.curve(16) + 6 * RTX.step_s(45 / 6, 500)
    assert fleet.served[0].tokens_per_s == pytest.approx(3.0 / round_s, rel=0.01)


def test_a_serial_host_is_full_at_the_papers_number_of_devices_and_gives_no_more() -> None:
    """N_full = (RTT + T(n) + S) / S: from there on the host's own speed is all there is."""
    host = Host(RTX.step_s, Policy.SERIAL)
    own_s = 6 * RTX.step_s(45 / 6, 500)
    full = (RTT_S + ORIN.curve(16) + own_s) / own_s
    for count in (2 * full, 8 * full):
        fleet = balance(host, [orins(count)])
        assert fleet.rounds_per_s == pytest.approx(1 / own_s, rel=0.01)
    assert saturation(host, [orins(1)]) <= full


def test_batched_steps_carry_many_times_more_than_serial_ones() -> None:
    assert saturation(Host(RTX.step_s), [orins(1)]) > 5 * saturation(
        Host(RTX.step_s, Policy.SERIAL), [orins(1)]
    )


def test_a_thin_uplink_is_what_limits_and_is_never_overfilled() -> None:
    fleet = balance(Host(RTX.step_s, uplink_bps=1e6), [orins(16)])
    assert fleet.bottleneck.name == "uplink"
    assert fleet.bottleneck.used == pytest.approx(1.0, rel=0.01)
    assert fleet.rounds_per_s * WORK.bytes_up == pytest.approx(1e6, rel=0.01)


def test_a_mixed_fleet_is_slower_for_those_on_the_longer_link_only() -> None:
    fleet = balance(Host(RTX.step_s), [orins(4), dataclasses.replace(orins(4, rtt_s=0.05), name="far")])
    near, far = fleet.served
    assert far.tokens_per_s < 0.8 * near.tokens_per_s
    assert near.draft_s == pytest.approx(far.draft_s, rel=0.05)


SCENARIO = Scenario(parse_groups(["agx-orin-int4=8", "orin-nano-int4=24"]), WORK, RTX.step_s)


@pytest.mark.parametrize(
    ("change", "field", "value"),
    [
        ("hosts=2", "hosts", 2),
        ("rtt_ms=50", "rtt_ms", 50.0),
        ("devices=+32", "devices", parse_groups(["agx-orin-int4=16", "orin-nano-int4=48"])),
        ("devices=16", "devices", parse_groups(["agx-orin-int4=4", "orin-nano-int4=12"])),
        ("uplink_mbps=100", "uplink_mbps", 100.0),
    ],
)
def test_one_thing_is_different(change: str, field: str, value: object) -> None:
    assert value == getattr(changed(SCENARIO, change), field)


@pytest.mark.parametrize("change", ["hosts", "colour=3", "devices=many", "hosts=0", "devices=-32"])
def test_what_cannot_be_is_said_in_one_line(change: str) -> None:
    with pytest.raises(UsageError) as caught:
        changed(SCENARIO, change)
    assert "\n" not in str(caught.value)


def test_a_second_host_doubles_what_is_carried() -> None:
    one, two = examine(SCENARIO), examine(changed(SCENARIO, "hosts=2"))
    assert two.carries == 2 * one.carries
    assert two.tokens_per_s >= one.tokens_per_s


def test_the_command_prints_what_a_script_can_read() -> None:
    result = CliRunner().invoke(
        command, ["--device", "thor-int4=4", "--what-if", "devices=+60", "--json"], catch_exceptions=False
    )
    given, more = json.loads(result.output)
    assert ("as given", "devices=+60") == (given["case"], more["case"])
    assert more["classes"][0]["tokens_per_s"] < given["classes"][0]["tokens_per_s"]
    assert given["bottleneck"] in given["resources"]
    text = CliRunner().invoke(command, [], catch_exceptions=False).output
    assert "carries" in text
    assert text.startswith("by default: 8 devices")
    assert text.endswith("models: agx-orin-int4 Qwen3-8B INT4 AWQ\n")


def test_the_text_says_what_its_figures_are_of() -> None:
    words = [
        "--device",
        "agx-orin-int4=4",
        "--device",
        "orin-nano-int4=8,rtt_ms=1",
        "--what-if",
        "devices=+20",
    ]
    text = CliRunner().invoke(command, words, catch_exceptions=False).output
    assert text.startswith("as given: 12 devices")
    assert "\n   21.3 x orin-nano-int4" in text
    *_, last = text.splitlines()
    models = "agx-orin-int4 Qwen3-8B INT4 AWQ, orin-nano-int4 Qwen3-1.7B INT4 AWQ"
    assert last == f"models: {models}; tokens/s of different models do not compare"


@pytest.mark.parametrize(("rtt_ms", "hinted"), [("2", False), ("500", True)])
def test_a_class_that_would_be_slower_than_plain_is_said_to_decode_plainly(rtt_ms: str, hinted: bool) -> None:
    text = CliRunner().invoke(command, ["--rtt-ms", rtt_ms], catch_exceptions=False).output
    assert ("a device decodes plainly and is no slower" in text) == hinted


def test_measured_steps_take_the_place_of_a_profile() -> None:
    step_s = measured_steps("1:1.0,64:2.0", RTX)
    assert step_s(64, 0) == pytest.approx(0.002)
    assert step_s(1, 0) == pytest.approx(0.001)
    for nonsense in ("1", "2:1.0", "a:b", "1:2,8:1"):
        with pytest.raises(UsageError, match="ROWS:MS"):
            measured_steps(nonsense, RTX)


@pytest.mark.parametrize(
    "text",
    [
        "agx-orin-int4",
        "agx-orin-int4=many",
        "agx-orin-int4=nan",
        "agx-orin-int4=2,rtt_ms",
        "agx-orin-int4=2,colour=3",
        "agx-orin-int4=2,rtt_ms=-1",
        "agx-orin-int4=2,tokens=0.5",
        "no-such-board=2",
        "missing.json=2",
    ],
)
def test_devices_that_cannot_be_are_named(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_groups([text])
    assert text.partition("=")[0] in str(caught.value)
    assert "\n" not in str(caught.value)


def test_far_devices_and_hard_prompts_are_told_apart_in_one_fleet() -> None:
    """All four on one host; those that differ from the fleet get what a fleet of their own kind would."""
    devices = ["agx-orin-int4=1", "agx-orin-int4=1,rtt_ms=50", "agx-orin-int4=1,tokens=1.5"]
    near, far, hard = examine(Scenario(parse_groups(devices), WORK, RTX.step_s)).fleet.served
    assert (near.name, far.name) == ("agx-orin-int4", "agx-orin-int4, 50 ms")
    assert near.tokens_per_s == pytest.approx(2 * hard.tokens_per_s, rel=0.01)
    slower_s = WORK.tokens / far.tokens_per_s - WORK.tokens / near.tokens_per_s
    assert slower_s == pytest.approx(0.048, rel=0.02)


def test_a_board_of_ones_own_is_what_bench_target_measured(tmp_path: Path) -> None:
    file = tmp_path / "board.json"
    one, two = {"1": 0.08, "16": 0.11, "64": 0.3}, {"1": 0.05, "16": 0.06, "64": 0.2}
    file.write_text(json.dumps({"rows": [{"threads": 1, "costs_s": one}, {"threads": 2, "costs_s": two}]}))
    (group,) = parse_groups([f"{file}=3"])
    assert (group.label, group.count, group.model) == ("board", 3.0, "a model of your own")
    assert (group.curve.plain_s, group.curve(16)) == (0.05, 0.06)
    for nonsense in ("{", "[]", '{"rows": []}', '{"rows": [{"costs_s": {"1": "x"}}]}'):
        file.write_text(nonsense)
        with pytest.raises(UsageError, match="not what `starsd bench target --json` writes"):
            parse_groups([f"{file}=3"])


def test_the_work_of_a_foreign_recording_is_refused() -> None:
    with pytest.raises(BundleError, match="do not belong"):
        work_of(random_trace(), RecordedTrees())
