"""How far an export is, where there is no terminal."""

from __future__ import annotations

from starsd_edge.cli.export_progress import duration, lines
from starsd_edge.testing import FakeClock


def test_a_line_every_twentieth_with_the_time_left() -> None:
    said: list[str] = []
    clock = FakeClock(100.0)
    tell = lines(said.append, clock)
    for layer in range(1, 101):
        clock.advance(6.0)
        tell(layer, 100)
    assert 20 < len(said) <= 21
    assert said[0] == "exporting: 1%, 1 of 100 layers, about 10 min left"
    assert said[10] == "exporting: 50%, 50 of 100 layers, about 5 min left"
    assert said[-2] == "exporting: 95%, 95 of 100 layers, about 30 s left"
    assert said[-1] == "exporting: all layers written, trying out"


def test_few_layers_make_few_lines() -> None:
    said: list[str] = []
    tell = lines(said.append, FakeClock())
    tell(1, 2)
    tell(2, 2)
    assert len(said) == 2


def test_long_times_are_told_in_minutes() -> None:
    assert (duration(119.0), duration(120.0), duration(3600.0)) == ("119 s", "2 min", "60 min")
