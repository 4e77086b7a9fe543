"""Joules from an emulated board to everything that shows them; where a board reports no power, to nothing."""

from __future__ import annotations

import contextlib
import io
import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from starsd_edge.bench.e2e import Question, summarise
from starsd_edge.bench.e2e import compare as compare_ways
from starsd_edge.chat.answer import AnswerEnd
from starsd_edge.chat.commands import run_command
from starsd_edge.chat.conversation import Conversation
from starsd_edge.chat.once import answer_once
from starsd_edge.chat.remote import RemoteBackend
from starsd_edge.chat.reporter import EdgeReporter
from starsd_edge.chat.settings import ChatSettings
from starsd_edge.cli.bench_e2e import converse, greedy, table_of
from starsd_edge.decoding.decoder import Decoder
from starsd_edge.decoding.policy import FixedPolicy, PlainPolicy
from starsd_edge.link.client import RemoteDrafter
from starsd_edge.monitor.figures import device_figure
from starsd_edge.monitor.views import DeviceView
from starsd_edge.protocol.telemetry import DeviceSnapshot
from starsd_jetson.board.telemetry import BoardTelemetry
from tests.core.chat.toys import CountingTarget, toy_speaker
from tests.core.endpoint.serving import serving
from tests.core.protocol.pair import hello

WATTS = 10.0
PATIENCE_S = 60.0
RAIL = {"name": "ina3221", "in1_label": "VDD_IN", "in1_input": "5000", "curr1_input": "2000"}
SCRIPT = "the quick fox. " * 20
ANSWER = ChatSettings(max_tokens=30)


@contextlib.contextmanager
def board_with(folder: Path, rail: dict[str, str]) -> Iterator[BoardTelemetry]:
    """A board whose /sys is in `folder`, read for the first time."""
    chip = folder / "sys/class/hwmon/hwmon3"
    chip.mkdir(parents=True)
    for name, text in rail.items():
        (chip / name).write_text(f"{text}\n")
    board = BoardTelemetry(root=folder, tegrastats=["/no/such/tegrastats"], interval_s=0.02)
    assert board.wait(lambda reading: True, PATIENCE_S) is not None
    yield board
    board.close()


@pytest.fixture
def board(tmp_path: Path) -> Iterator[BoardTelemetry]:
    """Draws 10 W at its input, for ever."""
    with board_with(tmp_path, RAIL) as board:
        yield board


@pytest.fixture
def silent(tmp_path: Path) -> Iterator[BoardTelemetry]:
    """A machine that measures no power."""
    with board_with(tmp_path, {"name": "nvme"}) as board:
        yield board


def chat_on(board: BoardTelemetry) -> Conversation:
    return Conversation(toy_speaker(script=SCRIPT, round_s=0.005, joules=board.joules), ANSWER)


def test_an_answer_takes_power_times_time_and_stats_says_so(board: BoardTelemetry) -> None:
    conversation = chat_on(board)
    started_s = time.monotonic()
    *_, end = conversation.ask("Go")
    wall_s = time.monotonic() - started_s
    assert isinstance(end, AnswerEnd)
    figures = end.figures
    assert figures.joules is not None
    assert (
        0.9 * WATTS * (figures.first_token_s + figures.generation_s) <= figures.joules <= 1.1 * WATTS * wall_s
    )
    assert figures.joules_per_token == figures.joules / 30
    said = "\n".join(run_command(conversation, "/stats").lines)
    assert f"{figures.joules:.1f} J, {figures.joules / 30:.2f} J a token" in said


def test_a_chat_on_a_running_server_and_a_script_read_the_same(board: BoardTelemetry) -> None:
    with serving(toy_speaker(script=SCRIPT, joules=board.joules)) as served:
        conversation = Conversation(RemoteBackend(served.url), ANSWER)
        out = io.StringIO()
        answer_once(conversation, "Go", out, as_json=True)
        report = json.loads(out.getvalue())
        assert report["joules"] > 0
        assert any("J a token" in line for line in run_command(conversation, "/stats").lines)


def test_the_monitor_gets_them_by_way_of_decoding(board: BoardTelemetry) -> None:
    drafter = RemoteDrafter("tcp://127.0.0.1:9", hello())
    speaker = toy_speaker(script=SCRIPT, round_s=0.005, drafter=lambda: drafter)
    reporter = EdgeReporter(lambda: speaker.contexts, software="test", board=board)
    reporter.look()
    for _ in Conversation(speaker, ANSWER).ask("Go"):
        pass
    reporter.look()
    report = reporter.report(drafter)
    reporter.close()
    speaker.close()
    assert report.energy is not None
    assert report.energy.plain_tokens == 30
    view = DeviceView("desk", DeviceSnapshot("jet1", energy=report.energy, board=report.board), None, 1.0, [])
    assert device_figure("power_w").value(view) == WATTS
    assert device_figure("plain_joules_per_token").value(view) == report.energy.plain_j / 30
    assert device_figure("drafting_joules_per_token").value(view) is None


@pytest.mark.parametrize("measured", [True, False], ids=["a board with power", "a board without"])
def test_the_benchmark_compares_plain_and_drafted_where_there_is_power(
    measured: bool, request: pytest.FixtureRequest
) -> None:
    board: BoardTelemetry = request.getfixturevalue("board" if measured else "silent")
    speaker = toy_speaker()
    ways = {}
    for name, policy in (("plain", PlainPolicy()), ("StarSD", FixedPolicy(4, wants_lookup=True))):
        decoder = Decoder(CountingTarget(script=SCRIPT, round_s=0.01), None, policy, time.monotonic)
        ways[name] = converse(
            speaker.writer, greedy(decoder, frozenset()), 40, 400, frozenset(), board.joules
        )
    report = summarise(list(compare_ways([Question(1, "x", ("Go",))], ways)), "plain")
    plain, drafted = (row for row in report.rows if row.category == "overall")
    titles = [str(column.header) for column in table_of(report).columns]
    assert measured == ("J/token" in titles)
    if measured:
        assert all(row.joules_per_token and row.joules_per_token > 0 for row in (plain, drafted))
    else:
        assert (plain.joules_per_token, drafted.joules_per_token) == (None, None)


def test_without_power_nothing_is_made_up(silent: BoardTelemetry) -> None:
    conversation = chat_on(silent)
    *_, end = conversation.ask("Go")
    assert isinstance(end, AnswerEnd)
    assert end.figures.joules is None
    assert not [line for line in run_command(conversation, "/stats").lines if "J" in line.split()]
