"""The states that golden screens are drawn from. STARSD_GOLDEN=write makes the tests write them anew."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from starsd_edge.monitor.link_state import Link, LinkState
from starsd_edge.monitor.model import Model
from starsd_edge.monitor.render import render
from starsd_edge.monitor.screen import State
from starsd_edge.monitor.ui import Page, Ui

from .fleet import service_after

GOLDEN = Path(__file__).parent / "golden"
SIZES = ((80, 24), (120, 40), (200, 60))


@cache
def watched(devices: int = 12, seconds: int = 20, demand: float = 0.7) -> Model:
    """A service seen for `seconds`, two snapshots a second. Not to be changed: it is made once."""
    model = Model.of(["desk"])
    for number in range(2 * seconds):
        model.take(0, service_after(100 + number / 2, devices, demand=demand), 1000)
    model.note_links([Link(LinkState.UP)])
    return model


def state(model: Model, ui: Ui) -> State:
    return State(model, ui, clock="12:34:56", watch="watching takes 28.9kB/s")


def unreachable() -> State:
    model = copy.deepcopy(watched())
    model.note_links([Link(LinkState.UNKNOWN_KEY)])
    return state(model, Ui())


@dataclass(frozen=True)
class Scene:
    name: str
    make: Callable[[], State]


SCENES = [
    Scene("overview", lambda: state(watched(), Ui())),
    Scene("crowded", lambda: state(watched(60), Ui(sort="tokens_per_s", window=1))),
    Scene("saturated", lambda: state(watched(4, demand=1.0), Ui())),
    Scene("unreachable", unreachable),
    Scene("nothing-yet", lambda: state(Model.of(["desk"]), Ui())),
    Scene("filtered", lambda: state(watched(), Ui(filter="plain", frozen=True))),
    Scene("typing", lambda: state(watched(), Ui(filter="orin-1", typing=True))),
    Scene("device", lambda: state(watched(), Ui(page=Page.DEVICE, selected="desk/orin-02"))),
    Scene("plain-device", lambda: state(watched(), Ui(page=Page.DEVICE, selected="desk/orin-05"))),
    Scene("board", lambda: state(watched(), Ui(page=Page.BOARD, selected="desk/orin-02"))),
    Scene("no-board", lambda: state(watched(), Ui(page=Page.BOARD, selected="desk/orin-01"))),
    Scene("help", lambda: state(watched(), Ui(page=Page.HELP))),
]


def drawn(scene: Scene, width: int, height: int) -> str:
    """A screen as text, blanks at the ends of lines cut off."""
    return "\n".join(text.plain.rstrip() for text in render(scene.make(), width, height).lines) + "\n"


def golden_file(scene: Scene, width: int, height: int) -> Path:
    return GOLDEN / f"{scene.name}-{width}x{height}.txt"
