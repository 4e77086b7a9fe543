"""Figures as text, and recordings."""

import csv
import gzip
import io
import json
from pathlib import Path

import pytest

from starsd_edge.errors import ConfigError
from starsd_edge.monitor.feed import Arrival
from starsd_edge.monitor.figures import DEVICE_FIGURES, SERVICE_FIGURES
from starsd_edge.monitor.format import Form, bar, fit, shown, sparkline
from starsd_edge.monitor.link_state import Link, LinkState
from starsd_edge.monitor.model import Model
from starsd_edge.monitor.recording import Recorder, ReplayFeed
from starsd_edge.monitor.report import Format, report
from starsd_edge.protocol.telemetry import DeviceSnapshot, ServiceSnapshot

from .fleet import service_after
from .scenes import watched

FOREVER = float("inf")


@pytest.mark.parametrize(
    ("value", "form", "text"),
    [
        (None, Form.SECONDS, "-"),
        (0.0000042, Form.SECONDS, "4us"),
        (0.00123, Form.SECONDS, "1.2ms"),
        (0.25, Form.SECONDS, "250ms"),
        (2.5, Form.SECONDS, "2.50s"),
        (250.0, Form.SECONDS, "250s"),
        (59.4, Form.AGE, "59s"),
        (119.7, Form.AGE, "2m00s"),
        (61.0, Form.AGE, "1m01s"),
        (7200.0, Form.AGE, "2h"),
        (500_000.0, Form.AGE, "6d"),
        (999.0, Form.BYTES, "999B"),
        (31_400.0, Form.BYTES, "31.4kB"),
        (2.5e9, Form.BYTES, "2.5GB"),
        (137.25, Form.RATE, "137.2"),
        (12_500.0, Form.RATE, "12.5k"),
        (0.416, Form.SHARE, "42%"),
        (2.5, Form.FACTOR, "2.50"),
        (1_234_567, Form.COUNT, "1235k"),
        (16.31, Form.WATTS, "16.3W"),
        (57.6, Form.CELSIUS, "58C"),
        ("a\x1b[31mb\n", Form.TEXT, "a [31mb "),
    ],
)
def test_numbers_are_short_and_have_their_unit(value: float | str | None, form: Form, text: str) -> None:
    assert shown(value, form) == text


@pytest.mark.parametrize(
    ("text", "width", "fitted"),
    [
        ("abc", 5, "abc  "),
        ("abcdef", 4, "abc…"),
        ("设备设备", 5, "设备…"),
        ("设备", 4, "设备"),
        ("ab", 1, "…"),
        ("ab", 0, ""),
    ],
)
def test_text_fits_its_cells(text: str, width: int, fitted: str) -> None:
    assert fit(text, width) == fitted


def test_a_sparkline_scales_to_its_highest_value() -> None:
    assert sparkline([0, 1, 2, 4], 6) == "  ▁▃▅█"
    assert sparkline([9, 0, 7], 2) == "▁█"
    assert sparkline([0, 0], 2) == "▁▁"
    assert sparkline([], 3) == "   "
    assert bar(0.5, 4) == "██░░"
    assert bar(7.0, 2, ascii_only=True) == "##"


def test_json_has_every_figure_by_its_key() -> None:
    data = json.loads(report(watched(), FOREVER, Format.JSON))
    (service,) = data["services"]
    assert {figure.key for figure in SERVICE_FIGURES} <= set(service)
    device = next(entry for entry in service["devices"] if entry["device"] == "orin-02")
    assert {figure.key for figure in DEVICE_FIGURES} <= set(device)
    assert (service["link"], device["state"], len(device["depth_rates"])) == ("up", "drafting", 4)
    assert {alarm["what"] for alarm in data["alarms"]} == {"link down", "key refused", "plain decoding"}


def test_csv_has_a_line_for_each_device() -> None:
    rows = list(csv.reader(io.StringIO(report(watched(), FOREVER, Format.CSV))))
    assert rows[0] == ["service", *(figure.key for figure in DEVICE_FIGURES)]
    assert len(rows) == 1 + 12
    assert all(len(row) == len(rows[0]) for row in rows)
    assert report(watched(), FOREVER, Format.CSV, head=False).count("\n") == 11


def test_markdown_shows_what_devices_have_and_what_is_wrong() -> None:
    text = report(watched(), FOREVER, Format.MARKDOWN)
    assert "| orin-05 | plain |" in text
    assert "* **plain decoding** orin-05: waiting costs more than a plain step" in text


def test_a_spreadsheet_takes_no_name_for_a_formula() -> None:
    model = Model.of(["desk"])
    model.take(0, ServiceSnapshot("b", 1, 1.0, devices=[DeviceSnapshot('=HYPERLINK("x")')]), 9)
    assert "'=HYPERLINK" in report(model, FOREVER, Format.CSV)


def test_a_table_cannot_be_broken_by_a_name() -> None:
    model = Model.of(["desk"])
    model.take(0, ServiceSnapshot("b", 1, 1.0, devices=[DeviceSnapshot("a|b\n<c>")]), 9)
    assert "| a\\|b &lt;c> |" in report(model, FOREVER, Format.MARKDOWN)


class Clock:
    """A clock that is set by hand."""

    def __init__(self, now_s: float) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s


class TestRecording:
    def write(self, path: Path) -> None:
        recorder = Recorder(path, ["desk", "lab"], start_s=50.0)
        recorder.links([Link(), Link(LinkState.NO_ROUTE)], 50.0)
        for number in range(8):
            snapshot = service_after(100 + number / 2, 3)
            recorder.snapshot(Arrival(0, 50 + number / 2, 1000, snapshot))
        recorder.links([Link(LinkState.UP), Link(LinkState.NO_ROUTE)], 54.0)
        recorder.links([Link(LinkState.UP), Link(LinkState.NO_ROUTE)], 54.5)  # no change: not written
        recorder.close()

    def played(self, path: Path) -> tuple[ReplayFeed, list[Arrival]]:
        feed, arrivals = ReplayFeed(path, speed=FOREVER), []
        while not feed.ended:
            arrivals += feed.poll(0.0)
        return feed, arrivals

    @pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
    def test_it_shows_again_what_was_seen(self, tmp_path: Path, name: str) -> None:
        self.write(tmp_path / name)
        feed, arrivals = self.played(tmp_path / name)
        assert feed.names == ["desk", "lab"]
        assert [arrival.snapshot for arrival in arrivals] == [service_after(100 + n / 2, 3) for n in range(8)]
        assert all(link.state is LinkState.ENDED for link in feed.links)
        feed.close()

    def test_it_keeps_the_pace_of_what_happened(self, tmp_path: Path) -> None:
        self.write(tmp_path / "a")
        clock = Clock(1000.0)
        feed = ReplayFeed(tmp_path / "a", speed=2.0, now=clock)
        seen = []
        for now_s in (1000.0, 1000.6, 1001.1, 1003.0):
            clock.now_s = now_s
            seen.append(len(feed.poll(0.0)))
        assert seen == [1, 2, 2, 3]
        feed.close()

    def test_links_are_replayed(self, tmp_path: Path) -> None:
        self.write(tmp_path / "a")
        feed = ReplayFeed(tmp_path / "a", now=Clock(0.0))
        feed.poll(0.0)
        assert [link.state for link in feed.links] == [LinkState.CONNECTING, LinkState.NO_ROUTE]
        feed.close()

    @pytest.mark.parametrize("name", ["a", "a.gz"])
    def test_an_interrupted_recording_plays_as_far_as_it_goes(self, tmp_path: Path, name: str) -> None:
        self.write(tmp_path / name)
        whole = (tmp_path / name).read_bytes()
        (tmp_path / name).write_bytes(whole[: len(whole) * 3 // 4])
        feed, arrivals = self.played(tmp_path / name)
        assert len(arrivals) < 8
        feed.close()

    @pytest.mark.parametrize(
        "content",
        [
            b"",
            b"hello\n",
            b'{"format":"other","version":1,"names":[]}\n',
            b'{"format":"starsd monitor recording","version":9,"names":["a"]}\n',
            b'{"format":"starsd monitor recording","version":1,"names":["a"]}\n{"at_s":0,"source":1}\n',
            b'{"format":"starsd monitor recording","version":1,"names":["a"]}\n{"at_s":0,"links":["odd"]}\n',
            b'{"format":"starsd monitor recording","version":1,"names":["a"]}\n{"at_s":0,"snapshot":{}}\n',
        ],
    )
    def test_what_is_no_recording_is_refused_with_its_name(self, tmp_path: Path, content: bytes) -> None:
        (tmp_path / "odd").write_bytes(content)
        with pytest.raises(ConfigError, match="odd"):
            self.played(tmp_path / "odd")

    def test_a_file_that_cannot_be_opened_is_named(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="missing"):
            self.played(tmp_path / "missing")
        with pytest.raises(ConfigError, match="nowhere"):
            Recorder(tmp_path / "nowhere" / "a", [], 0.0)
        (tmp_path / "plain.gz").write_bytes(b"not gzip")
        with pytest.raises(ConfigError, match="plain"):
            self.played(tmp_path / "plain.gz")

    def test_gzip_makes_it_small(self, tmp_path: Path) -> None:
        self.write(tmp_path / "a")
        self.write(tmp_path / "b.gz")
        assert (tmp_path / "b.gz").stat().st_size * 4 < (tmp_path / "a").stat().st_size
        assert gzip.decompress((tmp_path / "b.gz").read_bytes()) == (tmp_path / "a").read_bytes()
