"""Where a round's processor time goes: head and scores, tree, scheduler, sessions, framing; and the gateway.

The worker's part is sampled in this process, over the real sessions and the real engine: each sample goes to
the innermost file that has a part, and the processor time is parted by their numbers. The gateway's is what
its process took in a measurement with sockets.
"""

from __future__ import annotations

import signal
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType

import torch

from starsd_edge.protocol.codec import Frames, decode
from starsd_server.emulate.bench import BenchPlan, measure
from starsd_server.emulate.devices import Players
from starsd_server.engine import Engine
from starsd_server.rows import Int8Linear, int8_available
from starsd_server.scheduling import Policy
from starsd_server.sessions import Sessions, TreeShape
from starsd_server.worker import open_heads

__all__ = ["RoundProfile", "profile_rounds"]

SAMPLE_S = 0.001  # of processor time; a kernel may tick more slowly
ARITHMETIC = ("head", "scores")  # network, and log-softmax with the likeliest of its vocabulary
LARGE, LARGE_ROWS, LARGE_TIMES = 2048, 256, 10  # a product that a CPU is best at, and tries of it
WARM_UP_ROUNDS = 50  # of each device
OTHER = "sessions"
PARTS = {
    "heads/head.py": "head",
    "rows.py": "head",
    "graph_head.py": "head",
    "engine.py": "head",
    "kv_cache.py": "head",
    "heads/candidates.py": "scores",
    "heads/grow.py": "tree",
    "scheduler.py": "scheduler",
    "scheduling.py": "scheduler",
    "fairness.py": "scheduler",
    "slots.py": "scheduler",
    "protocol/codec.py": "framing",
    "protocol/features.py": "framing",
    "sessions.py": OTHER,
    "session.py": OTHER,
    "emulate/devices.py": "",  # the edges' own work
    "emulate/edge.py": "",
    "emulate/round_profile.py": "",
}


@dataclass(frozen=True, slots=True)
class RoundProfile:
    """Milliseconds of a round by part, and how many rounds were looked at.

    row_us       of the head and its scores, for one row
    roofline_us  what the products of a row would take if all were as large as this machine likes them
    """

    parts_ms: dict[str, float]
    rounds: int
    row_us: float = 0.0
    roofline_us: float = 0.0

    @property
    def beside_head_ms(self) -> float:
        """Everything that is not the head's arithmetic."""
        return sum(ms for part, ms in self.parts_ms.items() if part not in ARITHMETIC)

    def lines(self) -> list[str]:
        ordered = sorted(self.parts_ms.items(), key=lambda item: -item[1])
        return [f"{part:<10} {ms:>7.3f} ms" for part, ms in ordered] + [
            f"{'not head':<10} {self.beside_head_ms:>7.3f} ms",
            f"a row of the head: {self.row_us:.0f} us; its products at this machine's best: "
            f"{self.roofline_us:.0f} us",
        ]


def profile_rounds(plan: BenchPlan, targets: int, rounds: int) -> RoundProfile:
    """Play `rounds` rounds of `targets` devices in this process, then some with sockets for the gateway."""
    table = Table(plan, targets)
    parts = worker_parts(table, targets, rounds)
    rows = table.rows
    gateway_ms = measure(plan, Policy.BATCHED.value, [None] * targets).gateway_cpu_ms
    row_us = sum(parts.get(part, 0.0) for part in ARITHMETIC) * 1e3 * table.rounds / max(1.0, rows)
    return RoundProfile({**parts, "gateway": gateway_ms}, rounds, row_us, table.roofline_us())


def worker_parts(table: Table, targets: int, rounds: int) -> dict[str, float]:
    """Milliseconds a round by part of the worker."""
    table.play(targets * WARM_UP_ROUNDS)
    samples: Counter[str] = Counter()
    before = signal.signal(signal.SIGPROF, lambda number, frame: samples.update([part_of(frame)]))
    signal.setitimer(signal.ITIMER_PROF, SAMPLE_S, SAMPLE_S)
    try:
        started_s = time.process_time()
        played = table.play(rounds)
        used_ms = (time.process_time() - started_s) * 1e3
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
    per_sample_ms = used_ms / max(1, samples.total()) / played
    return {part: count * per_sample_ms for part, count in samples.items() if part}


def part_of(frame: FrameType | None) -> str:
    """Whose time it is: the innermost file with a part of its own."""
    while frame is not None:
        folder, _, name = frame.f_code.co_filename.replace("\\", "/").rpartition("/")
        part = PARTS.get(f"{folder.rpartition('/')[2]}/{name}", PARTS.get(name))
        if part is not None:
            return part
        frame = frame.f_back
    return ""


class Table:
    """Devices and sessions at one table, in real time: no sockets, and nothing is sent but handed on."""

    def __init__(self, plan: BenchPlan, targets: int) -> None:
        torch.set_num_threads(plan.config.threads)  # as the worker does; one that waits takes processor time
        offer, engines = open_heads(plan.config)
        shape = TreeShape(plan.config.top_k, plan.config.max_steps)
        self._heads = [engine.head for engine in engines.values() if isinstance(engine, Engine)]
        self.rounds, self.rows = 0, 0.0  # of the latest play
        self._sessions = Sessions(offer, engines, plan.config.limits, Policy.BATCHED, shape)
        self._inbox: list[tuple[int, Frames]] = []
        self._players = Players(plan.fleet, time.monotonic)
        for number in range(targets):
            self._players.add(self._line(number))
        self._players.hello()

    def play(self, rounds: int) -> int:
        """Go on until as many rounds have been played; how many they were."""
        played, seen = self._players.rounds, self._sessions.recorder.engine.batch_rows
        played.clear()
        rows_before = seen.total
        while len(played) < rounds:
            inbox, self._inbox = self._inbox, []
            for number, frames in inbox:
                message = decode(frames)
                self._sessions.receive(f"device-{number}", str(number).encode(), message, time.monotonic())
            stepped = self._sessions.step(time.monotonic)
            replies, self._sessions.outbox = self._sessions.outbox, []
            for reply in replies:
                self._players.arrived(int(reply.route), reply.frames)
            self._players.timers.run(time.monotonic())
            if not stepped and not self._inbox:
                time.sleep(max(0.0, self._players.timers.next_s - time.monotonic()))
        self.rounds, self.rows = len(played), seen.total - rows_before
        return len(played)

    def roofline_us(self) -> float:
        """Microseconds of a row's products, all heads on average, by the best rate of one large product."""
        layer = Int8Linear(torch.zeros(LARGE, LARGE)) if int8_available() else torch.nn.Linear(LARGE, LARGE)
        x = torch.zeros(LARGE_ROWS, LARGE)
        seconds = []
        with torch.inference_mode():
            for _ in range(LARGE_TIMES):
                started_s = time.perf_counter()
                layer(x)
                seconds.append(time.perf_counter() - started_s)
        per_weight_us = min(seconds) * 1e6 / (LARGE_ROWS * LARGE * LARGE)
        return per_weight_us * sum(head.num_weights for head in self._heads) / max(1, len(self._heads))

    def _line(self, number: int) -> Callable[[Frames], None]:
        return lambda frames: self._inbox.append((number, frames))
