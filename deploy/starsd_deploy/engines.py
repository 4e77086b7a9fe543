"""TensorRT engines: built in the background of a device, or taken from an identical one and kept here.

Building may take an hour on a small board, pushing takes minutes. Which devices are identical is decided by
the plan (engine_key.py); what is taken passes the health gate like what was built.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from starsd_deploy.blobs import Blob, hash_file
from starsd_deploy.device import DeviceShell
from starsd_deploy.pull import pull
from starsd_deploy.steps import Engine
from starsd_deploy.throttle import NO_LIMIT, Pacer
from starsd_edge.errors import DeployError

__all__ = ["EngineShelf", "build_engine", "put_engine"]

POLL_S = 3.0


@dataclass(frozen=True, slots=True)
class EngineFile:
    """An engine on this machine, and its name on devices."""

    name: str
    blob: Blob


def build_engine(shell: DeviceShell, step: Engine, *, poll_s: float = POLL_S) -> None:
    """Start the build, or find it under way or done, and wait for its end.

    Raises:
        DeployError: the build failed, with what it said last; or it takes longer than it may, and goes on.
    """
    shell.do("engine_start", step.key, step.release, step.script)
    until_s = time.monotonic() + step.timeout_s
    while not _finished(shell, step.key):
        if time.monotonic() > until_s:
            raise DeployError(
                f"{shell.connection.name}: the engine is still being built after {step.timeout_s:.0f} s, and "
                "will be: apply again later, or raise engine_timeout_s"
            )
        threading.Event().wait(poll_s)


def put_engine(shell: DeviceShell, key: str, engine: EngineFile, send: Callable[[Blob], None]) -> None:
    """Bring an engine from this machine to a device."""
    send(engine.blob)
    shell.do("engine_put", key, engine.name, engine.blob.sha256, str(engine.blob.size))


class EngineShelf:
    """Engines that were pulled, kept in a folder by their keys. Threads that want the same one wait for it.

    shell_of    a shell on a device, for the time of a context
    has_ended   whether a device's own plan is over, or it has none: what it lacks then, it will not get
    pacer       how fast they may be pulled
    """

    def __init__(
        self,
        folder: Path,
        shell_of: Callable[[str], contextlib.AbstractContextManager[DeviceShell]],
        has_ended: Callable[[str], bool],
        pacer: Pacer = NO_LIMIT,
        *,
        poll_s: float = POLL_S,
    ) -> None:
        self._folder, self._shell_of, self._has_ended, self._poll_s = folder, shell_of, has_ended, poll_s
        self._pacer = pacer
        self._lock = threading.Lock()
        self._locks: dict[str, threading.Lock] = {}

    def take(self, key: str, source: str) -> EngineFile:
        """The engine of a key; pulled from `source` once that has it.

        Raises:
            DeployError: `source` does not get it, or what came is not what it has.
        """
        with self._lock:
            lock = self._locks.setdefault(key, threading.Lock())
        with lock, self._shell_of(source) as shell:
            while not (found := _finished(shell, key)):
                # asked in this order: it may end between the two
                if self._has_ended(source) and not _finished(shell, key):
                    raise DeployError(f"{source} has not built the engine {key}: apply again once it has")
                threading.Event().wait(self._poll_s)
            name, sha256, size = found.split()
            path = self._folder / f"{key}-{sha256[:16]}"
            blob = Blob(sha256, int(size), str(path))
            if not path.exists():
                self._pull(shell, name, blob)
            return EngineFile(name, blob)

    def _pull(self, shell: DeviceShell, name: str, blob: Blob) -> None:
        """Bring it here, on from where an earlier pull was cut."""
        path = Path(blob.source)
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(".part")
        remote = f"{shell.root}/cache/engines/{name}"
        resumed = part.exists()
        pull(shell.connection, remote, blob.size, part, self._pacer)
        if resumed and hash_file(part) != blob.sha256:  # this machine lost pages of it
            part.unlink()
            pull(shell.connection, remote, blob.size, part, self._pacer)
        if hash_file(part) != blob.sha256:
            part.unlink()
            raise DeployError(f"{shell.connection.name}: the engine {name} changed while it was pulled")
        part.replace(path)


def _finished(shell: DeviceShell, key: str) -> str:
    """`FILE SHA256 SIZE` of an engine that is there, "" while there is none.

    Raises:
        DeployError: its build failed; ends in what it said.
    """
    state, _, rest = shell.do("engine_state", key).strip().partition("\n")
    word, _, found = state.partition(" ")
    if word == "failed":
        said = rest.replace("\n", "\n    ")
        raise DeployError(f"{shell.connection.name}: the engine cannot be built: {said}")
    return found if word == "done" else ""
