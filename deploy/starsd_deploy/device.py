"""Calls of device.sh: one verb a call, arguments quoted, exit codes turned into errors."""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib import resources

from starsd_deploy.ssh import COMMAND_TIMEOUT_S, Completed, Connection, Running
from starsd_edge.errors import DeployError

__all__ = [
    "LEASE_HELD",
    "LEASE_LOST",
    "NOT_RUNNING",
    "UNHEALTHY",
    "DeviceShell",
    "LeaseLostError",
    "UnhealthyError",
]

# Exit codes of device.sh.
UNHEALTHY = 95
NOT_RUNNING = 96
LEASE_LOST = 97
LEASE_HELD = 98


class LeaseLostError(DeployError):
    """Raised when another deployer has taken the device over."""


class UnhealthyError(DeployError):
    """Raised when a release fails its health gate, before or after the switch."""


@dataclass(frozen=True, slots=True)
class DeviceShell:
    """A connection, the folder on the device, and the lease token that every change is made under."""

    connection: Connection
    root: str
    token: str

    def call(self, verb: str, *arguments: str, timeout_s: float = COMMAND_TIMEOUT_S) -> Completed:
        """Run a verb and return whatever it ended with.

        Raises:
            LeaseLostError: the lease is not ours any more; nothing was changed.
            UnreachableError: the connection was lost.
        """
        done = self.connection.run(script(self.root, self.token, verb, *arguments), timeout_s=timeout_s)
        return self._checked(done)

    @contextlib.contextmanager
    def fed(self, verb: str, *arguments: str) -> Iterator[Running]:
        """Start a verb that reads its stdin while it runs; `output_of` is how it ends.

        Raises:
            UnreachableError: the connection was lost.
        """
        text = script(self.root, self.token, verb, *arguments).encode()
        # `sh -s` may read ahead what is meant for the verb, so the script is read by its length
        with self.connection.started(("sh", "-c", f'eval "$(head -c {len(text)})"')) as running:
            running.feed(text)
            yield running

    def output_of(self, verb: str, running: Running, timeout_s: float = COMMAND_TIMEOUT_S) -> str:
        """What a verb that was fed has printed; it has to succeed.

        Raises:
            LeaseLostError, UnhealthyError, DeployError, UnreachableError: as `do`.
        """
        return self._succeeded(verb, self._checked(running.finish(timeout_s)))

    def do(self, verb: str, *arguments: str, timeout_s: float = COMMAND_TIMEOUT_S) -> str:
        """Run a verb that has to succeed; its output.

        Raises:
            UnhealthyError: a health gate said no.
            DeployError: anything else went wrong on the device; the message ends in what it said.
            LeaseLostError, UnreachableError: as `call`.
        """
        return self._succeeded(verb, self.call(verb, *arguments, timeout_s=timeout_s))

    def _checked(self, done: Completed) -> Completed:
        if done.status == LEASE_LOST:
            raise LeaseLostError(
                f"{self.connection.name}: another deployer has taken the device over; "
                "see `starsd deploy status`"
            )
        return done

    def _succeeded(self, verb: str, done: Completed) -> str:
        if done.status == 0:
            return done.stdout
        said = (done.stderr.strip() or done.stdout.strip() or f"exit status {done.status}").replace(
            "\n", "\n    "
        )
        kind = UnhealthyError if done.status == UNHEALTHY else DeployError
        raise kind(f"{self.connection.name}: {verb} failed: {said}")


def script(root: str, token: str, verb: str, *arguments: str) -> str:
    """device.sh with its arguments set."""
    words = " ".join(shlex.quote(word) for word in (root, token, verb, *arguments))
    return f"set -- {words}\n{_library()}"


@cache
def _library() -> str:
    return resources.files("starsd_deploy").joinpath("device.sh").read_text("utf-8")
