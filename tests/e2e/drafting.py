"""A real service with a small random head, and a decode loop with a real link to it, for tests of everything
that goes wrong between the two.

`python -m tests.e2e.drafting ADDRESS COUNT STEP_S [patient]` is the same edge in a process of its own: it
prints the tokens of a text as they are committed, how many trees came, and why no more do. "patient": with
the timing of the product.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from starsd_edge.decoding.decoder import Decoder
from starsd_edge.decoding.policy import FixedPolicy
from starsd_edge.decoding.sampling import SamplingParams
from starsd_edge.link.client import RemoteDrafter
from starsd_edge.link.pins import edge_keys
from starsd_edge.link.placement import Place
from starsd_edge.link.sockets import EdgeKeys
from starsd_edge.protocol.greeting import HelloBody, Identity
from starsd_edge.protocol.limits import DEFAULT_TIMING, EdgeTiming
from starsd_edge.testing import ToyTarget, plain_text
from starsd_edge.types import TokenArray

__all__ = ["HIDDEN", "IDENTITY", "PATIENCE_S", "QUICK", "Edge", "Running", "serving"]

HIDDEN, VOCAB = 64, 512  # of the small random heads
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
LEAVES_WITHIN_S = 180.0  # likewise, for a service to leave
MAX_WAIT_S = 0.2  # what the decode loop grants a tree
STEP_S = 0.01
GREEDY = SamplingParams()
PROMPT = [1, 2, 3]
LONG_TEXT = 400  # tokens


class PacedTarget(ToyTarget):
    """A forward takes `step_s`; features are as wide as the head wants them."""

    def __init__(self, max_len: int = 512, step_s: float = STEP_S) -> None:
        super().__init__(vocab_size=VOCAB, max_len=max_len, levels=200)
        self._step_s = step_s

    def forward(self, tree):
        time.sleep(self._step_s)
        return super().forward(tree)

    def _features(self, tokens: TokenArray, positions: np.ndarray) -> np.ndarray:
        phase = np.outer(np.asarray(tokens) + 0.1 * np.asarray(positions), np.arange(1, HIDDEN + 1))
        return np.sin(phase).astype(np.float16)


class Edge:
    """A decode loop with a draft service at the other end of `address`."""

    def __init__(
        self,
        address: str,
        keys: EdgeKeys | None = None,
        max_len: int = 512,
        timing: EdgeTiming = QUICK,
        identity: Identity = IDENTITY,
        device: str = "jet1",
        step_s: float = STEP_S,
        others: Sequence[Place] = (),
    ) -> None:
        self.target = PacedTarget(max_len, step_s)
        hello = HelloBody(
            identity=identity,
            digest=identity.digest(),
            device=device,
            software="0",
            dtypes=["fp16"],
            max_len=max_len,
            max_nodes=16,
        )
        self.drafter = RemoteDrafter(address, hello, keys, timing, others)
        self.decoder = Decoder(self.target, self.drafter, FixedPolicy(8, MAX_WAIT_S), time.monotonic)

    def joined(self) -> Edge:
        """Wait for the link to be usable."""
        state = self.drafter.wait_until_ready(PATIENCE_S)
        assert state.ready, state.reason
        return self

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
        """Within PATIENCE_S the service is back, and a context gets trees.

        Long texts: on a machine so slow that a tree takes as long as a short answer, each tree would come for
        the answer before.
        """
        self.joined()
        before = self.drafter.stats().counters.trees
        deadline_s = time.monotonic() + PATIENCE_S
        while self.drafter.stats().counters.trees == before:
            assert time.monotonic() < deadline_s, (self.drafter.state(), self.drafter.stats())
            text: list[int] = []
            for committed in self.decoder.generate(PROMPT, GREEDY, LONG_TEXT):
                text += committed.tokens
                if self.drafter.stats().counters.trees > before:
                    break
            assert text == plain_text(self.target, GREEDY, PROMPT, len(text))

    def waits_for_reason(self, words: str) -> str:
        """Until the link says `words` about itself; the whole reason."""
        deadline_s = time.monotonic() + PATIENCE_S
        while words not in (reason := self.drafter.state().reason):
            assert time.monotonic() < deadline_s, reason
            time.sleep(0.01)
        return reason

    def close(self) -> None:
        self.drafter.close()


class Running:
    """A service's processes, and where it can be reached."""

    def __init__(self, process: subprocess.Popen[str], log: Path) -> None:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, log.read_text()
        self.process = process
        self._log = log
        self._hit: dict[str, int] = {}  # processes that were sent a signal
        status = json.loads(line)
        self.address: str = status["address"]
        self.monitor: str = status["monitor"]
        self.port = int(self.address.rpartition(":")[2])

    def signal(self, name: str, number: int) -> None:
        """To the `worker` or the `gateway`."""
        self._hit[name] = self.pid(name)
        os.kill(self._hit[name], number)

    def wait_for_another(self, name: str) -> None:
        """Until the service has started one in place of the process that was hit."""
        deadline_s = time.monotonic() + PATIENCE_S
        while self.pid(name) == self._hit[name]:
            assert time.monotonic() < deadline_s, self.log
            time.sleep(0.02)

    def pid(self, name: str) -> int:
        deadline_s = time.monotonic() + PATIENCE_S
        while (pid := self._child(name)) is None:
            assert time.monotonic() < deadline_s, self.log
            time.sleep(0.02)
        return pid

    def leave(self) -> int:
        """SIGTERM; the exit code."""
        self.process.terminate()
        return self.process.wait(LEAVES_WITHIN_S)

    @property
    def log(self) -> str:
        return self._log.read_text()

    def resident_bytes(self, name: str) -> int:
        """What one of the processes holds in memory, of its own: without the files it has mapped."""
        status = Path(f"/proc/{self.pid(name)}/status").read_text()
        return int(status.split("RssAnon:")[1].split()[0]) * 1024

    def _child(self, name: str) -> int | None:
        for pid in Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split():
            try:
                if f"starsd_server.{name}" in Path(f"/proc/{pid}/cmdline").read_text():
                    return int(pid)
            except FileNotFoundError:
                continue
        return None


@contextmanager
def serving(head: Path, *options: str, bind: str = "tcp://127.0.0.1:0") -> Iterator[Running]:
    """`starsd draft serve`. Its log goes to a file: nobody reads a pipe while the edge decodes."""
    command = [sys.executable, "-m", "starsd_edge", "draft", "serve", "--head", str(head), "--json-status"]
    command += ["--max-len", "4096", "--bind", bind, *options]
    log = head / f"service-{time.monotonic_ns()}.log"
    with (
        log.open("w") as errors,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True) as process,
    ):
        try:
            yield Running(process, log)
        finally:
            if process.poll() is None:
                process.terminate()
            process.communicate(timeout=LEAVES_WITHIN_S)


def main() -> None:
    address, count, step_s = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
    timing = QUICK if len(sys.argv) == 4 else DEFAULT_TIMING
    edge = Edge(address, edge_keys(address), max_len=4096, timing=timing, step_s=step_s).joined()
    for committed in edge.decoder.generate(PROMPT, GREEDY, count):
        line = {"tokens": committed.tokens, "trees": edge.drafter.stats().counters.trees}
        print(json.dumps({**line, "reason": edge.drafter.state().reason}), flush=True)  # noqa: T201
    edge.close()


if __name__ == "__main__":
    main()
