"""Real processes, real sockets, and everything that goes wrong between them: the text stays the target's own.

The service is `starsd draft serve` with a small random head; the edge is the real decode loop over a
RemoteDrafter, on a target that takes its time as a device would.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from starsd_edge.decoding.decoder import Decoder
from starsd_edge.decoding.policy import FixedPolicy
from starsd_edge.decoding.sampling import SamplingParams
from starsd_edge.link.client import RemoteDrafter
from starsd_edge.link.sockets import EdgeKeys
from starsd_edge.protocol.greeting import HelloBody, Identity
from starsd_edge.protocol.limits import EdgeTiming
from starsd_edge.testing import ToyTarget, plain_text
from starsd_edge.types import TokenArray
from starsd_server.heads.checkpoint import HeadManifest, save_head
from starsd_server.heads.head import HeadKind
from tests.e2e.bad_line import BadLine
from tests.server.heads import HIDDEN, VOCAB, random_head, small_config

pytestmark = pytest.mark.slow

IDENTITY = Identity(
    target="toy",
    target_hash="00",
    vocab_size=VOCAB,
    tokenizer_hash="11",
    hidden_size=HIDDEN,
    feature_size=HIDDEN,
)
# Impatient, so that a test of minutes takes seconds; the ratios are those of the product.
QUICK = EdgeTiming(answer_s=0.5, chunk_s=3.0, ping_s=0.5, probe_first_s=0.05, probe_max_s=0.5)
PATIENCE_S = 120.0  # far above anything measured: a test that waits this long has failed
MAX_WAIT_S = 0.2  # what the decode loop grants a tree
STEP_S = 0.01
GREEDY = SamplingParams()


class PacedTarget(ToyTarget):
    """A forward takes STEP_S; features are as wide as the head wants them."""

    def __init__(self, max_len: int = 512) -> None:
        super().__init__(vocab_size=VOCAB, max_len=max_len, levels=200)

    def forward(self, tree):
        time.sleep(STEP_S)
        return super().forward(tree)

    def _features(self, tokens: TokenArray, positions: np.ndarray) -> np.ndarray:
        phase = np.outer(np.asarray(tokens) + 0.1 * np.asarray(positions), np.arange(1, HIDDEN + 1))
        return np.sin(phase).astype(np.float16)


class Edge:
    """A decode loop with a draft service at the other end of `address`."""

    def __init__(
        self, address: str, keys: EdgeKeys | None = None, max_len: int = 512, timing: EdgeTiming = QUICK
    ) -> None:
        self.target = PacedTarget(max_len)
        hello = HelloBody(
            identity=IDENTITY,
            digest=IDENTITY.digest(),
            device="jet1",
            software="0",
            dtypes=["fp16"],
            max_len=max_len,
            max_nodes=16,
        )
        self.drafter = RemoteDrafter(address, hello, keys, timing)
        self.decoder = Decoder(self.target, self.drafter, FixedPolicy(8, MAX_WAIT_S), time.monotonic)

    def generate(
        self, prompt: list[int], count: int, at: dict[int, Callable[[], object]] | None = None
    ) -> None:
        """Decode `count` tokens, doing `at[n]` once n are there; the text must be the target's own."""
        waiting = dict(at or {})
        text: list[int] = []
        for committed in self.decoder.generate(prompt, GREEDY, count):
            text += committed.tokens
            for number in [number for number in waiting if number <= len(text)]:
                waiting.pop(number)()
        assert text == plain_text(self.target, GREEDY, prompt, count)

    def drafts_again(self) -> None:
        """Within PATIENCE_S the service is back, and a new prompt gets trees."""
        state = self.drafter.wait_until_ready(PATIENCE_S)
        assert state.ready, state.reason
        before = self.drafter.stats().counters.trees
        deadline_s = time.monotonic() + PATIENCE_S
        prompt = [3, 1, 4]
        while self.drafter.stats().counters.trees == before:
            assert time.monotonic() < deadline_s, self.drafter.state()
            prompt = [*prompt, len(prompt)]
            self.generate(prompt, 6)

    def close(self) -> None:
        self.drafter.close()


@pytest.fixture(scope="module")
def head_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("head")
    manifest = HeadManifest(name="toy-head", head=small_config(HeadKind.EAGLE1), identity=IDENTITY)
    save_head(random_head(HeadKind.EAGLE1), manifest, folder)
    return folder


class Running:
    def __init__(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, process.stderr.read() if process.stderr else ""
        self.status = json.loads(line)
        self.address: str = self.status["address"]
        self.port = int(self.address.rpartition(":")[2])

    def signal(self, name: str, number: int) -> None:
        os.kill(self.status["pids"][name], number)


@contextmanager
def serving(head: Path, *options: str) -> Iterator[Running]:
    command = [sys.executable, "-m", "starsd_edge", "draft", "serve", "--head", str(head), "--json-status"]
    command += ["--max-len", "4096", "--bind", "tcp://127.0.0.1:0", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield Running(process)
        finally:
            process.terminate()
            process.communicate(timeout=180)


@pytest.fixture(scope="module")
def service(head_folder: Path) -> Iterator[Running]:
    with serving(head_folder) as running:
        yield running


@pytest.fixture
def line(service: Running) -> Iterator[BadLine]:
    line = BadLine(service.port)
    yield line
    line.close()


@pytest.fixture
def edge(line: BadLine) -> Iterator[Edge]:
    edge = Edge(line.address)
    assert edge.drafter.wait_until_ready(PATIENCE_S).ready
    yield edge
    edge.close()


def test_a_line_that_flaps_costs_no_token(edge: Edge, line: BadLine) -> None:
    edge.generate([1, 2, 3], 60, at=dict.fromkeys(range(5, 60, 9), line.cut))
    edge.drafts_again()
    assert edge.drafter.stats().counters.outages >= 1


def test_a_cable_that_is_out_is_not_waited_for(edge: Edge, line: BadLine) -> None:
    """Half-open: nobody is told, and heartbeats are not due yet."""
    edge.generate([1, 2, 3], 120, at={20: lambda: setattr(line, "silent", True)})
    line.silent = False
    line.cut()
    edge.drafts_again()


def test_a_far_away_service_drafts_late_and_changes_nothing(edge: Edge, line: BadLine) -> None:
    line.delay_s = 0.15
    edge.generate([1, 2, 3], 30)
    line.delay_s = 0.0
    edge.drafts_again()


def test_a_slow_uplink_takes_a_long_prompt_in_chunks_and_is_not_cut(line: BadLine) -> None:
    """2,000 rows of 128 bytes at 100 kB/s: over two seconds, while the answer is decoded already.

    Each chunk takes several `answer_s`: it has its own patience, or it would be sent again and again.
    """
    line.bytes_per_s = 100_000
    edge = Edge(line.address, max_len=4096, timing=replace(QUICK, chunk_s=PATIENCE_S))
    try:
        assert edge.drafter.wait_until_ready(PATIENCE_S).ready
        prompt = (np.arange(2000) * 7 % VOCAB).tolist()
        edge.generate(prompt, 20)
        assert edge.drafter.wait_until_ready(PATIENCE_S).ready
        assert edge.drafter.stats().counters.outages == 0
        assert 2000 * HIDDEN * 2 < line.bytes_up < 1.5 * 2000 * HIDDEN * 2
    finally:
        edge.close()


def test_a_killed_gateway_costs_no_token_and_comes_back(head_folder: Path) -> None:
    with serving(head_folder) as running:
        edge = Edge(running.address)
        try:
            assert edge.drafter.wait_until_ready(PATIENCE_S).ready
            edge.generate([1, 2, 3], 60, at={20: lambda: running.signal("gateway", signal.SIGKILL)})
            edge.drafts_again()
        finally:
            edge.close()
