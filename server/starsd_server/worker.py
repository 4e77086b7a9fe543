"""The process that holds the heads and all session state, and runs `step_loop`; no sockets but one.

Whatever arrived while a step ran is received before the next one is chosen, so a session waits for at most
the step under way. Reads its configuration and commands on standard input, where the end of input means that
the service is gone; says on standard output that it is ready, or why not.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import logging
import os
import secrets
import select
import sys
import time
from collections import deque
from pathlib import Path

import torch

from starsd_edge.errors import ResourceError, StarSDError, UsageError
from starsd_edge.protocol.codec import decode
from starsd_edge.protocol.messages import WireError
from starsd_edge.protocol.server_connection import HeadOffer, ServiceOffer
from starsd_edge.protocol.telemetry import MAX_SNAPSHOT_BYTES, GatewaySnapshot, encode_snapshot
from starsd_server import child
from starsd_server.accelerator import CudaQueue, QueuedEngine
from starsd_server.config import REAL_ENGINE, HeadSource, ServiceConfig
from starsd_server.emulate.engines import EmulatedEngine, load_engine_profile
from starsd_server.emulate.trace import RecordedTrees
from starsd_server.engine import Engine
from starsd_server.hardware import chosen_device, memory_for
from starsd_server.heads.checkpoint import HeadManifest, load_head, read_manifest
from starsd_server.ipc import FromEdge, GatewayState, Revoked, pack_snapshot, pack_to_edge, unpack_in_worker
from starsd_server.kv_cache import KvCache
from starsd_server.local_stream import READ, AwayError, FullError, WorkerEnd
from starsd_server.rows import Precision, RowHead, int8_available
from starsd_server.scheduling import Policy
from starsd_server.sessions import Sessions, TreeShape
from starsd_server.step import StepEngine
from starsd_server.step_loop import run_step
from starsd_server.telemetry import Recorder, hardware_name
from starsd_server.transfers import PinnedMemory, SameMemory

__all__ = ["main"]

log = logging.getLogger("starsd.worker")

TICK_S = 1.0  # leases are tens of seconds
SNAPSHOT_S = 0.5
LAST_REPLIES_S = 0.5
FREE_ROWS_CPU = 16  # measured: so many take almost twice as long as one; 6 to 32 serve alike
FREE_ROWS_ACCELERATOR = 128  # by the roofline of an RTX 4090 (emulate/profiles)
SPIN_S = 0.0001  # sleeping is only good to a tenth of a millisecond
REPLIES_AT_ONCE = 64  # then they leave before more is done


class Worker:
    """The loop around `Sessions`."""

    def __init__(self, config: ServiceConfig) -> None:
        self._config = config
        torch.set_num_threads(config.threads)
        offer, engines = open_heads(config)
        policy = Policy(config.scheduler)
        limits = dataclasses.replace(config.limits, free_rows=free_rows(config))
        recorder = Recorder(offer, limits, policy, hardware_name(config.threads), started_s=time.monotonic())
        shape = TreeShape(config.top_k, config.max_steps)
        ahead = config.draft_ahead == "on" or (config.draft_ahead == "auto" and config.device != "cpu")
        self.sessions = Sessions(offer, engines, limits, policy, shape, recorder, ahead=ahead)
        self._gateway = GatewayState(GatewaySnapshot())
        self._poller = select.poll()
        self._line = WorkerEnd(Path(config.folder), self._poller)
        self._received: deque[memoryview] = deque()
        self._poller.register(sys.stdin.fileno(), READ)
        self._next_tick_s = self._next_snapshot_s = time.monotonic()
        self._drain_until_s: float | None = None
        self._gone = False  # the service is

    def run(self) -> None:
        """Serve until drained or until the service is gone."""
        begun = False
        while not self._gone and not self._may_go():
            begun = self.turn(begun=begun)

    def turn(self, *, begun: bool) -> bool:
        """Wait for something to do, unless a step has just `begun`, and do it; whether a step was run. All
        that there is to send leaves before the next one waits."""
        if not self.sessions.hurried:
            self._look(0 if begun else self._idle_ms())
            self._keep_house()
        return run_step(self.sessions, self, time.monotonic)

    @property
    def num_waiting(self) -> int:
        """See Line. None while the gateway does not take what there is for it."""
        return 0 if self._line.crowded else len(self._received)

    def look(self) -> None:
        """See Line."""
        self._keep_house()
        self._look(0)

    def wait(self, seconds: float) -> None:
        """See Line. It looks at the line alone, and wakes a little early: sleeping is not exact."""
        self._line.flush()
        if not self._received and self._line.wait(max(0.0, seconds - SPIN_S)):
            self._received += self._line.receive()

    def hand_on(self, at_most: int) -> None:
        """See Line. Replies to earlier messages leave first: else who asks without end has others' answers
        dropped."""
        while at_most > 0 and self.num_waiting and len(self.sessions.outbox) < REPLIES_AT_ONCE:
            at_most -= 1
            incoming = unpack_in_worker(self._received.popleft())
            match incoming:
                case FromEdge():
                    self._take(incoming)
                case GatewayState():
                    self._gateway = incoming
                case Revoked(device):
                    self.sessions.drop_device(device)

    def reply(self) -> None:
        """See Line."""
        for reply in self.sessions.outbox:
            try:
                self._line.put(pack_to_edge(reply.route, reply.frames))
            except (AwayError, FullError) as error:
                # The gateway comes back within a second, and the edge asks again.
                log.warning("a reply is lost: %s", error)
        self.sessions.outbox.clear()
        self._line.flush()

    def close(self) -> None:
        """Let the last replies leave."""
        self._line.finish(LAST_REPLIES_S)
        self._line.close()

    def _look(self, timeout_ms: int) -> None:
        """Wait so long for anything to do, and take in what has come."""
        ready = dict(self._poller.poll(0 if self.num_waiting else timeout_ms))
        if sys.stdin.fileno() in ready:
            self._obey()
        if self._line.listener in ready:
            self._line.accept()
        if self._line.fileno in ready and not self._received:
            self._received += self._line.receive()

    def _may_go(self) -> bool:
        """Drained: nothing is under way, and either nobody is left or their time is up."""
        if self._drain_until_s is None or not self.sessions.drained:
            return False
        return not self.sessions.facts() or time.monotonic() >= self._drain_until_s

    def _take(self, incoming: FromEdge) -> None:
        try:
            message = decode(incoming.frames)
        except WireError:  # the gateway has let it through, so this is a disagreement of our own
            log.exception("a message that the gateway accepted does not decode here")
            return
        waited_s = time.monotonic() - incoming.arrived_s
        self.sessions.receive(incoming.device, incoming.route, message, incoming.arrived_s, waited_s)

    def _keep_house(self) -> None:
        now_s = time.monotonic()
        if now_s >= self._next_tick_s:
            self._next_tick_s = now_s + TICK_S
            self.sessions.tick(now_s)
        if now_s >= self._next_snapshot_s:
            self._next_snapshot_s = now_s + SNAPSHOT_S
            if not self._gateway.watched:
                return
            snapshot = self.sessions.recorder.snapshot(
                now_s, self.sessions.facts(), self._gateway, self._drain_until_s is not None
            )
            payload = encode_snapshot(snapshot)
            if len(payload) > MAX_SNAPSHOT_BYTES:
                log.warning("a snapshot of %d bytes is not sent: nobody would read it", len(payload))
                return
            with contextlib.suppress(AwayError, FullError):
                self._line.put(pack_snapshot(payload))

    def _idle_ms(self) -> int:
        next_s = min(self._next_tick_s, self._next_snapshot_s)
        if self._drain_until_s is not None:
            next_s = min(next_s, self._drain_until_s)
        return max(1, int((next_s - time.monotonic()) * 1e3))

    def _obey(self) -> None:
        """Read a command, or that the service is gone."""
        line = child.read_command()
        self._gone = line is None
        if line == child.DRAIN:
            now_s = time.monotonic()
            self._drain_until_s = now_s + self._config.drain_s
            self.sessions.drain(now_s, int(self._config.drain_s * 1e3))


def open_heads(config: ServiceConfig) -> tuple[ServiceOffer, dict[str, StepEngine]]:
    """Load every head.

    Raises:
        BundleError: one is missing, damaged or without its target.
        ResourceError: their sessions would take more memory than they may.
    """
    offers: list[HeadOffer] = []
    engines: dict[str, StepEngine] = {}
    manifests = [read_manifest(Path(source.folder)) for source in config.heads]
    names = [manifest.name for manifest in manifests]
    if twice := [name for name in names if names.count(name) > 1]:
        raise UsageError(f"two heads are called {twice[0]}: rename one in its config.json")
    check_kv_budget(config, manifests)
    for source, manifest in zip(config.heads, manifests, strict=True):
        max_len = manifest.max_len(config.max_len)
        engines[manifest.name] = (
            open_real(config, source, max_len)
            if config.engine == REAL_ENGINE
            else open_emulated(config, max_len)
        )
        offers.append(HeadOffer(manifest.name, manifest.identity, max_len, config.max_nodes))
        log.info("head %s for %s, contexts up to %d tokens", manifest.name, manifest.identity.target, max_len)
    offer = ServiceOffer(
        service=config.name,
        software=config.software,
        boot_id=secrets.randbits(64) | 1,  # 0 means "none known"
        heads=tuple(offers),
        idle_lease_s=config.limits.idle_lease_s,
    )
    return offer, engines


def check_kv_budget(config: ServiceConfig, heads: list[HeadManifest]) -> None:
    """Raises ResourceError when the sessions' slots would take more than --kv-mib, saying what fits."""
    if not config.kv_mib:
        return
    precision = choose_precision(config, chosen_device(config.device))
    dtype = torch.float32 if precision in (Precision.INT8, Precision.FLOAT32) else torch.float16
    lengths = [manifest.max_len(config.max_len) for manifest in heads]
    session_bytes = sum(
        KvCache.row_bytes(manifest.head, dtype) * length
        for manifest, length in zip(heads, lengths, strict=True)
    )
    fitting = config.kv_mib * 2**20 // session_bytes
    if fitting < config.limits.max_sessions:
        needed_mib = -(-config.limits.max_sessions * session_bytes // 2**20)
        raise ResourceError(
            f"{config.limits.max_sessions} sessions of {max(lengths)} tokens take {needed_mib} MiB of KV "
            f"for {len(heads)} head{'s' if len(heads) > 1 else ''}, more than --kv-mib {config.kv_mib}, "
            f"which is enough for {fitting}: lower --max-sessions or --max-len"
        )


def open_real(config: ServiceConfig, source: HeadSource, max_len: int) -> StepEngine:
    engine = open_engine(config, source, max_len)
    device = engine.head.device
    return engine if device.type == "cpu" else QueuedEngine(engine, CudaQueue(device))


def open_engine(config: ServiceConfig, source: HeadSource, max_len: int) -> Engine:
    device = chosen_device(config.device)
    head = load_head(Path(source.folder), Path(source.target) if source.target else None, dtype=None)
    with memory_for(f"the weights of {source.folder}", device):
        row_head = RowHead(head.to(device), choose_precision(config, device))
    transfers = SameMemory() if device.type == "cpu" else PinnedMemory(CudaQueue(device))
    slots = config.limits.max_sessions
    with memory_for(f"--max-sessions {slots} sessions of --max-len {max_len} tokens", device):
        engine = Engine(row_head, slots, max_len, transfers)
    log.info(
        "%s in %s: %d slots of %d tokens, %.0f MiB of KV",
        row_head.config.kind.value,
        row_head.precision.value,
        config.limits.max_sessions,
        max_len,
        engine.kv.num_bytes / 2**20,
    )
    return engine


def open_emulated(config: ServiceConfig, max_len: int) -> EmulatedEngine:
    profile = load_engine_profile(config.engine)
    trees = RecordedTrees.load(Path(config.trees))
    return EmulatedEngine(profile, trees, config.limits.max_sessions, max_len)


def free_rows(config: ServiceConfig) -> int:
    """Rows that a step carries for hardly more than one of them costs."""
    if config.engine != REAL_ENGINE:
        return load_engine_profile(config.engine).free_rows
    return FREE_ROWS_CPU if config.device == "cpu" else FREE_ROWS_ACCELERATOR


def choose_precision(config: ServiceConfig, device: torch.device) -> Precision:
    """Raises UsageError for one that only a CPU has the products of."""
    if config.precision != "auto":
        precision = Precision(config.precision)
        if device.type != "cpu" and precision in (Precision.INT8, Precision.FLOAT32):
            raise UsageError(
                f"--precision {precision.value} is for a CPU: on {device} use float16 or bfloat16"
            )
        return precision
    if device.type == "cuda":
        return Precision.BFLOAT16 if torch.cuda.is_bf16_supported() else Precision.FLOAT16
    return Precision.INT8 if int8_available() else Precision.FLOAT32


def main() -> None:
    config = child.read_config(ServiceConfig)
    child.set_log_level(config.log_level)
    try:
        worker = Worker(config)
    except StarSDError as error:
        child.tell_failed(error)
        return
    child.tell_ready(pid=os.getpid())
    gc.freeze()  # what torch brought is for ever: looking through it again and again would pause the steps
    worker.run()
    worker.close()


if __name__ == "__main__":
    main()
