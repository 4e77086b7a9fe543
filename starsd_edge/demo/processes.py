"""The demo's child processes: one draft service, and targets that answer on request.

The demo ends them when it ends. All read stdin, so they also end with a demo that was killed.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from types import TracebackType

import msgspec

from starsd_edge.demo.wire import Answered, Ask, Piece, Ready, Reply
from starsd_edge.errors import StarSDError

__all__ = ["DraftService", "TargetProcess"]

STOP_TIMEOUT_S = 60.0  # for a child to end by itself: a service that is killed leaves its own children behind


class _Child:
    """`starsd ARGS` as a child process; what it logs is shown only when it fails."""

    def __init__(self, name: str, args: Sequence[str]) -> None:
        self.name = name
        self._log = tempfile.TemporaryFile("w+", encoding="utf-8")  # noqa: SIM115  # closed in close()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "starsd_edge", *args],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            encoding="utf-8",
        )

    def read_line(self) -> str:
        """Raises StarSDError when the child ended instead, of the kind that it ended with."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise self._ended()
        return line

    def write_line(self, line: str) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()
        except BrokenPipeError as error:
            raise self._ended() from error

    def _ended(self) -> StarSDError:
        code = self._process.wait()
        self._log.seek(0)
        lines = self._log.read().splitlines() or ["without a word"]
        kinds = {kind.exit_code: kind for kind in StarSDError.__subclasses__()}
        kind = kinds.get(code, StarSDError)  # a package that is missing there is missing here
        return kind(f"the {self.name} ended with exit code {code}: {lines[-1]}")

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.terminate()
        try:
            self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdin.close()
        self._process.stdout.close()
        self._log.close()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class DraftService(_Child):
    """`starsd draft serve` on a free port of this machine; `address` once entered."""

    def __init__(self, args: Sequence[str]) -> None:
        super().__init__(
            "draft service",
            ["draft", "serve", "--bind", "tcp://127.0.0.1:0", "--json-status", "--until-eof", *args],
        )
        self.address = ""
        self._pids: list[int] = []

    def __enter__(self) -> DraftService:
        try:
            ready = json.loads(self.read_line())
        except BaseException:
            self.close()
            raise
        self.address, self._pids = ready["address"], list(ready["pids"].values())
        return self

    def kill(self) -> None:
        """End it and its children at once, as a power cut would."""
        for pid in [self._process.pid, *self._pids]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._process.wait()


class TargetProcess(_Child):
    """A target; `ready` once entered."""

    def __init__(self, args: Sequence[str]) -> None:
        super().__init__("target", ["demo-target", *args])
        self.ready: Ready

    def __enter__(self) -> TargetProcess:
        try:
            reply = self._reply()
            assert isinstance(reply, Ready)
            self.ready = reply
        except BaseException:
            self.close()
            raise
        return self

    def ask(self, ask: Ask, on_piece: Callable[[Piece], None] = lambda _piece: None) -> Answered:
        """Blocks until the answer is complete."""
        self.write_line(msgspec.json.encode(ask).decode())
        while True:
            reply = self._reply()
            if isinstance(reply, Answered):
                return reply
            if isinstance(reply, Piece):
                on_piece(reply)

    def _reply(self) -> Reply:
        return msgspec.json.decode(self.read_line(), type=Ready | Piece | Answered)
