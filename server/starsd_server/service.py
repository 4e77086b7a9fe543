"""`starsd draft serve`: starts the two processes, watches them, and lets them go in order.

The worker holds heads and sessions, the gateway the socket. A gateway that dies is back within a second and
no session is lost; a worker that dies is started again, and the edges prefill again.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import msgspec

from starsd_edge import errors
from starsd_edge.errors import ResourceError, StarSDError
from starsd_server.child import DRAIN, GROUP_SIGNALS, Report
from starsd_server.config import ServiceConfig
from starsd_server.ipc import private_folder

__all__ = ["Ready", "Service"]

log = logging.getLogger("starsd.service")

WORKER, GATEWAY = "starsd_server.worker", "starsd_server.gateway"
RESTARTS_ALLOWED = 10  # of one process within a minute; beyond it something is broken for good
RESTART_WINDOW_S = 60.0
EXIT_GRACE_S = 3.0  # for a child to leave after its input ended
DRAIN_GRACE_S = 3.0  # for the worker to say that it has drained; one that hangs is not waited for
LONGEST_LOOK_S = 1.0


@dataclass(frozen=True, slots=True)
class Ready:
    """Where the service can be reached."""

    address: str
    monitor: str


@dataclass(frozen=True, slots=True)
class Exited:
    """A child's process is over."""

    process: Child
    code: int


@dataclass(frozen=True, slots=True)
class Said:
    process: Child
    report: Report


# Not queue.Queue: a signal that arrives while its lock is held would wait for that lock for ever.
Events: TypeAlias = "queue.SimpleQueue[Exited | Said | int]"


class Child:
    """One process and the thread that reads what it says."""

    def __init__(self, module: str, config: ServiceConfig, events: Events) -> None:
        self.module = module
        self.started_s = time.monotonic()
        self.ready = False
        self._events = events
        self._process = subprocess.Popen(
            [sys.executable, "-m", module], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        self.tell(msgspec.json.encode(config).decode())
        threading.Thread(target=self._read, daemon=True, name=f"{module} output").start()

    @property
    def name(self) -> str:
        """`worker` or `gateway`."""
        return self.module.rpartition(".")[2]

    @property
    def pid(self) -> int:
        return self._process.pid

    def tell(self, line: str) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it is gone: the thread reports its exit
            self._process.stdin.write(line.encode() + b"\n")
            self._process.stdin.flush()

    def end(self) -> None:
        """Close its input and see it leave; one that still loads has nothing to finish."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(EXIT_GRACE_S if self.ready else 0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as output:
            for line in output:
                self._events.put(Said(self, msgspec.json.decode(line, type=Report)))
        self._events.put(Exited(self, self._process.wait()))


@contextlib.contextmanager
def deaf() -> Iterator[None]:
    """Signals to this process are heeded when this is over, and processes that are started meanwhile are deaf
    to those to a whole group (a terminal's, a supervisor's) from their first instruction, until they ignore
    them."""
    came: list[int] = []
    heeded: dict[signal.Signals, Any] = {}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, GROUP_SIGNALS)
    try:
        if threading.current_thread() is threading.main_thread():
            # The mask is not enough here: another thread may be given the signal, and this one handles it.
            for number in GROUP_SIGNALS:
                heeded[number] = signal.signal(number, lambda number, _frame: came.append(number))
        yield
    finally:
        for number, handler in heeded.items():
            signal.signal(number, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        for late in came:
            signal.raise_signal(late)


class Service:
    """Both processes. `run` returns when it was told to stop and they have drained."""

    def __init__(self, config: ServiceConfig) -> None:
        self._events: Events = queue.SimpleQueue()
        self._config = config
        self._children: dict[str, Child] = {}
        self._restarts: dict[str, list[float]] = {WORKER: [], GATEWAY: []}
        self._leave_by_s: float | None = None  # set once it drains

    def heed_signals(self) -> None:
        """SIGTERM, SIGINT and SIGHUP of this process do what `stop` does. From the main thread."""
        for number in GROUP_SIGNALS:
            signal.signal(number, lambda number, _frame: self.stop(number))

    def start(self) -> Ready:
        """Start both and wait until they serve.

        Raises:
            BundleError, ResourceError, UsageError: as the process that could not start said it.
        """
        with deaf():  # a folder that was made is known to `close`
            self._config = msgspec.structs.replace(self._config, folder=str(private_folder()))
        # The worker binds the socket between the two, the gateway the one outside: neither waits.
        for module in (WORKER, GATEWAY):
            self._start(module)
        ready: dict[str, Report] = {}
        while len(ready) < len(self._children):
            event = self._events.get()
            if isinstance(event, int):
                sys.exit(0)  # told to leave before it served anybody
            if isinstance(event, Said) and event.report.event == "ready":
                event.process.ready = True
                ready[event.process.module] = event.report
            elif isinstance(event, Said):
                raise _error_of(event.report)
            elif isinstance(event, Exited):
                raise ResourceError(
                    f"{event.process.module} ended with code {event.code} before it was ready"
                )
        facts = ready[GATEWAY].facts
        # Whoever restarts the gateway must give the same port again.
        self._config = msgspec.structs.replace(self._config, bind=facts["address"], monitor=facts["monitor"])
        return Ready(facts["address"], facts["monitor"])

    def run(self) -> None:
        """Serve until told to stop, then drain. Raises ResourceError when a process will not stay."""
        while (left_s := self._left_s()) > 0:
            try:
                event = self._events.get(timeout=min(left_s, LONGEST_LOOK_S))
            except queue.Empty:
                continue
            if isinstance(event, int):
                if self._leave_by_s is not None or not self._children[WORKER].ready:
                    return  # a second signal does not wait, and a worker that loads has nothing to drain
                self._drain()
            elif isinstance(event, Exited):
                if self._leave_by_s is not None and event.process.module == WORKER:
                    return
                self._restart(event)
            elif event.report.event == "failed":
                raise _error_of(event.report)
            else:
                event.process.ready = True
                log.warning(
                    "the %s process serves again after %.2f s",
                    event.process.name,
                    time.monotonic() - event.process.started_s,
                )
        log.warning("the worker process did not drain in time: it is ended")

    def stop(self, signal_number: int = signal.SIGTERM) -> None:
        """Drain and leave, at once the second time. From any thread."""
        self._events.put(int(signal_number))

    def close(self) -> None:
        """End both processes and remove what they left."""
        for child in self._children.values():
            child.end()
        if self._config.folder:
            shutil.rmtree(self._config.folder, ignore_errors=True)

    @property
    def pids(self) -> dict[str, int]:
        """Process ids of "worker" and "gateway"."""
        return {child.name: child.pid for child in self._children.values()}

    def _start(self, module: str) -> None:
        with deaf():  # a process that was started is known to `close`
            self._children[module] = Child(module, self._config, self._events)

    def _left_s(self) -> float:
        return float("inf") if self._leave_by_s is None else self._leave_by_s - time.monotonic()

    def _drain(self) -> None:
        log.info("draining: no new sessions, rounds under way are finished")
        self._leave_by_s = time.monotonic() + self._config.drain_s + DRAIN_GRACE_S
        for child in self._children.values():
            child.tell(DRAIN)

    def _restart(self, event: Exited) -> None:
        module = event.process.module
        if self._children[module] is not event.process:
            return
        now_s = time.monotonic()
        recent = [at for at in self._restarts[module] if now_s - at < RESTART_WINDOW_S]
        self._restarts[module] = [*recent, now_s]
        name = event.process.name
        if len(recent) >= RESTARTS_ALLOWED:
            raise ResourceError(
                f"the {name} process ended {RESTARTS_ALLOWED} times within a minute: giving up"
            )
        log.warning("the %s process ended with code %d: starting it again", name, event.code)
        self._start(module)
        if self._leave_by_s is not None:
            self._children[module].tell(DRAIN)


def _error_of(report: Report) -> StarSDError:
    """The error that a child could not go on from."""
    kind = getattr(errors, report.error, StarSDError)
    assert issubclass(kind, StarSDError)
    return kind(report.text)
