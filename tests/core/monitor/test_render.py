"""Golden screens at three sizes, and what must hold for every screen."""

import os
import re
from pathlib import Path

import pytest
from rich.cells import cell_len

from starsd_edge.monitor.figures import DEVICE_FIGURES, SERVICE_FIGURES, device_figure
from starsd_edge.monitor.link_state import Link, LinkState
from starsd_edge.monitor.model import Model
from starsd_edge.monitor.render import render
from starsd_edge.monitor.render_overview import COLUMNS, HEAD_FIGURES, SPARK
from starsd_edge.monitor.screen import State
from starsd_edge.monitor.session_figures import SESSION_COLUMNS, SESSION_FIGURES
from starsd_edge.monitor.terminal import ansi
from starsd_edge.monitor.ui import Page, Ui
from starsd_edge.protocol.telemetry import (
    DeviceSnapshot,
    Mode,
    ServiceSnapshot,
    SessionSnapshot,
    Stage,
    Work,
    added,
)

from .fleet import durations
from .scenes import SCENES, SIZES, Scene, drawn, golden_file, state, watched

COLOUR = re.compile(r"\x1b\[(?:[0-9]+;)*(?:3[0-7]|9[0-7])(?:;[0-9]+)*m")


@pytest.mark.parametrize("size", SIZES, ids=lambda size: f"{size[0]}x{size[1]}")
@pytest.mark.parametrize("scene", SCENES, ids=lambda scene: scene.name)
def test_the_screen_looks_as_it_did(scene: Scene, size: tuple[int, int]) -> None:
    path, screen = golden_file(scene, *size), drawn(scene, *size)
    if os.environ.get("STARSD_GOLDEN") == "write":
        path.write_text(screen)
    assert path.read_text() == screen


@pytest.mark.parametrize("width", [1, 20, 79, 80, 81, 137, 400])
@pytest.mark.parametrize("height", [1, 2, 3, 24, 100])
@pytest.mark.parametrize("page", Page)
def test_every_size_gives_as_many_lines_none_too_long(page: Page, width: int, height: int) -> None:
    lines = render(state(watched(5, 3), Ui(page=page)), width, height).lines
    assert len(lines) == height
    assert max(text.cell_len for text in lines) <= width


@pytest.mark.parametrize("scene", SCENES, ids=lambda scene: scene.name)
def test_without_colour_the_screen_says_the_same(scene: Scene) -> None:
    lines = render(scene.make(), 120, 40).lines
    plain = [ansi(text, colour=False) for text in lines]
    assert not any(COLOUR.search(text) for text in plain)
    assert [re.sub(r"\x1b\[[0-9;]*m", "", text) for text in plain] == [text.plain for text in lines]


def test_colour_marks_what_is_wrong() -> None:
    text = "".join(ansi(line, colour=True) for line in render(state(watched(), Ui()), 80, 24).lines)
    assert COLOUR.search(text)


def test_a_scrolled_page_ends_at_its_end() -> None:
    frame = render(state(watched(), Ui(page=Page.HELP)), 80, 24)
    last = render(state(watched(), Ui(page=Page.HELP, scroll=frame.max_scroll)), 80, 24)
    beyond = render(state(watched(), Ui(page=Page.HELP, scroll=frame.max_scroll + 50)), 80, 24)
    assert [text.plain for text in last.lines] == [text.plain for text in beyond.lines]
    assert frame.max_scroll > 20


def test_the_selected_device_is_always_on_the_screen() -> None:
    model = watched(60, 3)
    for device in ("orin-00", "orin-31", "orin-59"):
        frame = render(state(model, Ui(sort="device", selected=f"desk/{device}")), 80, 24)
        assert any(text.plain.startswith(f">{device}") for text in frame.lines)


def test_names_from_elsewhere_cannot_steer_the_terminal() -> None:
    """A device's name, reason and address come from the network."""
    evil = "\x1b[2J\x07\r\nx\u202e\x9b31m"
    session = SessionSnapshot(evil, reason=evil, head=evil)
    device = DeviceSnapshot(evil, address=evil, reason=evil, fingerprint=evil, sessions=[session])
    model = Model.of([evil])
    model.take(0, ServiceSnapshot("b", 1, 1.0, service=evil, devices=[device]), 10)
    model.note_links([Link(LinkState.UP)])
    for page in Page:
        for text in render(State(model, Ui(page=page)), 100, 30).lines:
            assert text.plain.isprintable(), (page, text.plain)


def test_wide_characters_keep_the_columns() -> None:
    device = DeviceSnapshot("设备一号设备一号设备", connected=True, quiet_s=0.0)
    model = Model.of(["desk"])
    model.take(0, ServiceSnapshot("b", 1, 1.0, devices=[device]), 10)
    row = next(t.plain for t in render(State(model, Ui()), 80, 24).lines if "设备" in t.plain)
    assert cell_len(row[: row.index("idle")]) == 15


def test_a_terminal_without_blocks_gets_none() -> None:
    for page in Page:
        shown = State(watched(), Ui(page=page), ascii_only=True)
        for text in render(shown, 120, 40).lines:
            assert text.plain.replace("…", "").isascii()


def test_every_number_on_a_screen_is_defined_on_the_help_page_and_in_the_docs() -> None:
    """Columns of the tables, figures of the head and of the device page, stages, columns of sessions."""
    page = "\n".join(text.plain for text in render(state(watched(2, 1), Ui(page=Page.HELP)), 300, 400).lines)
    docs = (Path(__file__).parents[3] / "docs" / "metrics.md").read_text(encoding="utf-8")
    numbers = [device_figure(column.key) for column in COLUMNS if column.key != SPARK]
    numbers += [*DEVICE_FIGURES, *SERVICE_FIGURES, *SESSION_FIGURES]
    assert {column.key for column in SESSION_COLUMNS} <= {figure.key for figure in SESSION_FIGURES}
    assert set(HEAD_FIGURES) <= {figure.key for figure in SERVICE_FIGURES}
    for figure in numbers:
        assert re.search(rf"^  {re.escape(figure.title)} +{figure.key}: ", page, re.MULTILINE), figure.key
        assert f"| {figure.title} | `{figure.key}` | {figure.definition} |" in docs
    for stage in Stage:
        assert re.search(rf"^  {stage.value} +\S", page, re.MULTILINE)
        assert f"| {stage.value} | " in docs


def test_a_session_has_its_own_figures() -> None:
    """Of two sessions of a device one drafts and the other decodes plainly."""

    def snapshot(sequence: int) -> ServiceSnapshot:
        done = 10 * sequence
        drafting = Work(
            num_drafts=done, accepted_tokens=2 * done, tokens=3 * done, tree_nodes=durations(8.0, done)
        )
        plain = Work(tokens=done, plain_tokens=done, fallbacks={"late": sequence})
        sessions = [
            SessionSnapshot("aaaaaaaaffff", mode=Mode.DRAFTING, work=drafting, committed_len=77),
            SessionSnapshot("bbbbbbbbffff", mode=Mode.PLAIN, work=plain, reason="it is late"),
        ]
        device = DeviceSnapshot("jet1", connected=True, sessions=sessions, work=added([drafting, plain]))
        return ServiceSnapshot("b", sequence, float(sequence), devices=[device])

    model = Model.of(["desk"])
    for sequence in (1, 2, 3):
        model.take(0, snapshot(sequence), 10)
    lines = [text.plain for text in render(state(model, Ui(page=Page.DEVICE)), 160, 80).lines]
    (first,) = (line.split() for line in lines if line.startswith("  aaaaaaaa"))
    (second,) = (line.split() for line in lines if line.startswith("  bbbbbbbb"))
    assert first[:7] == ["aaaaaaaa", "idle", "drafting", "30.0", "3.00", "10.4", "0"]
    assert second[:9] == ["bbbbbbbb", "idle", "plain", "10.0", "-", "-", "0", "0", "2"]
    assert "      it is late" in lines


def test_an_address_is_written_as_people_write_it() -> None:
    model = Model.of(["desk"])
    device = DeviceSnapshot("jet1", address="::ffff:192.168.1.7", connected=True)
    model.take(0, ServiceSnapshot("b", 1, 1.0, devices=[device]), 10)
    first, second, *_ = render(state(model, Ui(page=Page.DEVICE)), 80, 24).lines
    assert "jet1 idle  192.168.1.7" in second.plain
    assert "device" in first.plain
