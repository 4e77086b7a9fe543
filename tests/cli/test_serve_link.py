"""What `starsd serve` says of the draft service while it runs: each change once."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from starsd_edge.chat.status import LinkState, LinkStatus
from starsd_edge.cli.serve import _tell_link

SERVICE = "tcp://desk:7731"


class Ends(threading.Event):
    """Set after so many looks, none of which is waited for."""

    def __init__(self, looks: int) -> None:
        super().__init__()
        self._left = looks

    def wait(self, timeout: float | None = None) -> bool:
        self._left -= 1
        return self._left < 0


class Linked:
    """A speaker, as far as it is asked: one status a look."""

    def __init__(self, states: list[LinkState]) -> None:
        self._states: Iterator[LinkState] = iter(states)

    def link(self) -> LinkStatus:
        state = next(self._states)
        lost = state in (LinkState.LOST, LinkState.BLOCKED)
        return LinkStatus(state, SERVICE, state.value if lost else "", 0.012)


@pytest.mark.parametrize(
    ("said", "states"),
    [
        (["connected to"], [LinkState.CONNECTED, LinkState.READY, LinkState.UNUSED]),
        (
            ["drafting via", "context not drafted", "drafting via"],
            [LinkState.READY, LinkState.BLOCKED, LinkState.BLOCKED, LinkState.READY],
        ),
        (
            ["drafting via", "draft service lost", "connected to"],
            [LinkState.READY, LinkState.LOST, LinkState.LOST, LinkState.CONNECTED],
        ),
    ],
)
def test_a_change_of_the_link_is_said_once(
    said: list[str], states: list[LinkState], capsys: pytest.CaptureFixture[str]
) -> None:
    _tell_link(Linked(states), Ends(len(states)))
    lines = capsys.readouterr().err.splitlines()
    assert len(said) == len(lines)
    for words, line in zip(said, lines, strict=True):
        assert words in line
