"""A real link that goes bad: the kernel's TCP between two network namespaces, with loss, delay and a cable.

The service has keys and listens on the link; the edge runs in the other namespace with the product's own
timing. The text must be the target's own, and drafting must come back. What came of it is printed.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from starsd_edge.link.keys import KeyPair
from starsd_edge.link.pins import Pin, pin_service
from starsd_edge.link.trust import TrustStore
from starsd_edge.testing import plain_text
from tests.e2e.conftest import head_folder  # noqa: F401  # a fixture
from tests.e2e.drafting import GREEDY, PATIENCE_S, PROMPT, PacedTarget, Running, serving

pytestmark = pytest.mark.lab

NAME, HOST, DEVICE = "starsdlink", "10.77.9.1", "10.77.9.2"
GOOD = "up=1 loss=0 delay_ms=1 rate_mbit=0"
BAD = "up=1 loss=0.02 delay_ms=15 rate_mbit=20"
STOPPED_S = 8.0
STEP_S = 0.05
TREES = 5  # that must come before and after


@dataclass
class Link:
    """What `link.py` is told while it runs."""

    control: Path

    def set(self, words: str) -> None:
        self.control.write_text(words)


@pytest.fixture(scope="module")
def link(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Link]:
    if not os.environ.get("STARSD_RUN_LAB"):
        pytest.skip("NOT RUN: the lab's link; `make test-lab` runs it (root)")
    if os.geteuid() or not shutil.which("ip") or not Path("/dev/net/tun").exists():
        pytest.skip("NOT RUN: the lab's link needs root, `ip` and /dev/net/tun")
    control = tmp_path_factory.mktemp("link") / "control"
    script = Path(__file__).with_name("link.py")
    command = [
        sys.executable,
        str(script),
        NAME,
        "--host",
        HOST,
        "--device",
        DEVICE,
        "--control",
        str(control),
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline(), "link.py did not start"
        made = Link(control)
        made.set(GOOD)
        yield made
        process.terminate()
    subprocess.run(["ip", "netns", "del", NAME], check=False)


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder that is both ends'."""
    folder = tmp_path_factory.mktemp("keys")
    service, device = KeyPair.generate("service"), KeyPair.generate("device")
    service.save(folder / "service.key")
    device.save(folder / "device.key")
    TrustStore(folder / "trusted").trust(device.key)
    pin_service(folder, Pin("desk", service.key.public))
    return folder


@pytest.fixture(scope="module")
def service(link: Link, keys: Path, head_folder: Path) -> Iterator[Running]:  # noqa: F811
    with serving(head_folder, "--keys", str(keys), bind=f"tcp://{HOST}:0") as running:
        yield running


@dataclass
class Device:
    """An edge in the other namespace, and what it has said."""

    process: subprocess.Popen[str]
    text: list[int] = field(default_factory=list)
    trees: int = 0

    def decode_until(self, enough: Callable[[], bool]) -> float:
        """Seconds until it holds."""
        assert self.process.stdout is not None
        started_s = time.monotonic()
        while not enough():
            assert time.monotonic() - started_s < PATIENCE_S, "drafting does not come back"
            said = json.loads(self.process.stdout.readline())
            self.text += said["tokens"]
            self.trees = said["trees"]
        return time.monotonic() - started_s

    def gets_trees(self) -> float:
        wanted = self.trees + TREES
        return self.decode_until(lambda: self.trees >= wanted)

    def decodes_for(self, seconds: float) -> int:
        """Tokens committed meanwhile."""
        until_s, before = time.monotonic() + seconds, len(self.text)
        self.decode_until(lambda: time.monotonic() >= until_s)
        return len(self.text) - before


@pytest.fixture
def device(link: Link, service: Running, keys: Path) -> Iterator[Device]:
    link.set(GOOD)
    inside = ["ip", "netns", "exec", NAME, sys.executable, "-m", "tests.e2e.drafting"]
    command = [*inside, service.address, "4000", str(STEP_S), "patient"]
    environment = {**os.environ, "STARSD_KEYS": str(keys)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        made = Device(process)
        made.gets_trees()
        yield made
        process.kill()
    assert made.text == plain_text(PacedTarget(4096), GREEDY, PROMPT, len(made.text))


@pytest.mark.parametrize(
    ("words", "seconds"),
    [
        ("loss=0.05", 20.0),
        ("delay_ms=150", 20.0),
        ("rate_mbit=8 delay_ms=20", 20.0),
        ("up=0", 8.0),
        ("up=0", 60.0),
    ],
    ids=["5% loss", "300 ms there and back", "1 MB/s", "cable out for 8 s", "cable out for 60 s"],
)
def test_a_bad_link_changes_no_token_and_drafting_comes_back(
    link: Link, device: Device, words: str, seconds: float
) -> None:
    before = device.trees
    link.set(words)
    tokens = device.decodes_for(seconds)
    trees = device.trees - before
    link.set(GOOD)
    back_s = device.gets_trees()
    tell(f"{words}, {seconds:.0f} s: {tokens} tokens, {trees} trees; drafting again after {back_s:.1f} s")


def test_a_flapping_cable_changes_no_token(link: Link, device: Device) -> None:
    """Two seconds out, two seconds in, five times."""
    for _ in range(5):
        link.set("up=0")
        device.decodes_for(2.0)
        link.set(GOOD)
        device.decodes_for(2.0)
    tell(f"flapping: drafting again after {device.gets_trees():.1f} s")


@pytest.mark.parametrize("name", ["gateway", "worker"])
def test_a_killed_process_at_the_end_of_a_bad_link_changes_no_token(
    link: Link, device: Device, service: Running, name: str
) -> None:
    """The keys are asked for again by the one that takes its place, over a link that loses what it can."""
    link.set(BAD)
    device.decodes_for(2.0)
    service.signal(name, signal.SIGKILL)
    service.wait_for_another(name)
    tokens = device.decodes_for(5.0)
    tell(f"{name} killed: {tokens} tokens in 5 s; drafting again after {device.gets_trees():.1f} s more")


@pytest.mark.parametrize("name", ["gateway", "worker"])
def test_a_process_that_stands_still_at_the_end_of_a_bad_link_changes_no_token(
    link: Link, device: Device, service: Running, name: str
) -> None:
    """For longer than the product's edge waits for three answers."""
    link.set(BAD)
    device.decodes_for(2.0)
    service.signal(name, signal.SIGSTOP)
    try:
        tokens = device.decodes_for(STOPPED_S)
    finally:
        service.signal(name, signal.SIGCONT)
    assert tokens > 0
    tell(f"{name} stopped for {STOPPED_S:.0f} s: {tokens} tokens; drafting after {device.gets_trees():.1f} s")


def tell(text: str) -> None:
    sys.stdout.write(f"\n{text}\n")
