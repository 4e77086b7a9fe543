"""What the Kubernetes manifests start in a pod, as real processes with keys: service, figures, probe."""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from starsd_edge.link.keys import KeyPair
from tests.e2e.drafting import LEAVES_WITHIN_S, PATIENCE_S, Running, serving
from tests.ports import free_port

MANIFEST = Path(__file__).parents[2] / "deploy" / "kubernetes" / "base" / "statefulset.yaml"
POD: dict[str, Any] = yaml.safe_load(MANIFEST.read_text())["spec"]["template"]["spec"]
DRAFT, FIGURES, _COLLECTOR = POD["containers"]
PROBE: list[str] = DRAFT["startupProbe"]["exec"]["command"][1:]
GIVEN = ("--head", "--bind")  # by `serving`


class Pod:
    """The manifest's command lines with a folder of this test for /keys and ports that are free."""

    def __init__(self, keys: Path) -> None:
        self.figures_port = free_port()
        self._in_place = {
            "/keys": str(keys),
            "127.0.0.1:7732": f"127.0.0.1:{free_port()}",
            "127.0.0.1:9464": f"127.0.0.1:{self.figures_port}",
            "$(POD_NAME)": "starsd-draft-0",
        }

    def line(self, arguments: list[str]) -> list[str]:
        line = list(arguments)
        for shown, used in self._in_place.items():
            line = [part.replace(shown, used) for part in line]
        return line

    def probe(self) -> int:
        command = [sys.executable, "-m", "starsd_edge", *self.line(PROBE)]
        return subprocess.run(command, stdout=subprocess.DEVNULL, timeout=PATIENCE_S).returncode

    @contextmanager
    def figures(self) -> Iterator[subprocess.Popen[bytes]]:
        command = [sys.executable, "-m", "starsd_edge", *self.line(FIGURES["args"])]
        with subprocess.Popen(command) as process:
            try:
                yield process
            finally:
                process.terminate()
                process.wait(LEAVES_WITHIN_S)


@pytest.fixture
def pod(tmp_path: Path) -> Pod:
    """Keys as the init container lays them; the map of trusted devices is mounted among them."""
    for part in ("secret", "keys"):
        (tmp_path / part).mkdir()
    pair = KeyPair.generate("service")
    pair.save(tmp_path / "secret" / "service.key")
    (tmp_path / "secret" / "service.pub").write_text(pair.key.public)
    (tmp_path / "secret" / "service.key").chmod(0o644)  # as a secret's volume shows it
    (script,) = POD["initContainers"][0]["args"]
    script = script.replace("/secret", str(tmp_path / "secret")).replace("/keys", str(tmp_path / "keys"))
    subprocess.run([shutil.which("sh") or "sh", "-ec", script], check=True)
    return Pod(tmp_path / "keys")


@pytest.fixture
def service(pod: Pod, head_folder: Path) -> Iterator[Running]:
    options = [part for part in pod.line(DRAFT["args"])[2:] if not part.startswith(GIVEN)]
    with serving(head_folder, *options) as running:
        yield running


def test_the_probe_tells_a_service_that_drafts_from_one_that_hangs(pod: Pod, service: Running) -> None:
    assert pod.probe() == 0
    service.signal("worker", signal.SIGSTOP)
    try:
        assert pod.probe() != 0
    finally:
        service.signal("worker", signal.SIGCONT)


def test_the_probe_fails_where_nothing_drafts_yet(pod: Pod) -> None:
    assert pod.probe() != 0


def test_the_figures_of_a_service_with_keys_are_exported(pod: Pod, service: Running) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    text = ""
    with pod.figures() as process:
        while not re.search(r"^starsd_service_up.* 1$", text, re.MULTILINE):
            assert process.poll() is None, "the exporter left"
            assert time.monotonic() < deadline_s, text
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{pod.figures_port}/metrics") as answer:
                    text = answer.read().decode()
            except (urllib.error.URLError, ConnectionError):
                time.sleep(0.05)
