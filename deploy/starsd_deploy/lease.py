"""One deployer at a time per device: a lease kept on the device, renewed by a heartbeat.

It ends by itself: when the deployer crashed, its cable was cut or the device rebooted, the next deployer
takes over after `LEASE_LIFE_S` of device.sh, counted by the device's uptime (boards without a battery have no
idea of the date). Every change is made under the lease's token, so a deployer that was given up cannot go on.
"""

from __future__ import annotations

import getpass
import secrets
import socket
import threading
from types import TracebackType

import msgspec

from starsd_deploy.device import LEASE_HELD, DeviceShell, LeaseLostError
from starsd_deploy.ssh import Connection
from starsd_edge.errors import DeployError, StarSDError

__all__ = ["Holder", "Lease", "this_holder"]

BEAT_S = 10.0


class Holder(msgspec.Struct, frozen=True):
    """Who holds a lease and for what; people read it."""

    who: str
    doing: str


def this_holder(doing: str) -> Holder:
    """The user and host of this process."""
    return Holder(who=f"{getpass.getuser()}@{socket.gethostname()}", doing=doing)


class Lease:
    """A held lease as a context: `with Lease(connection, root, holder) as shell`.

    Leaving drops it, Ctrl-C included. A lost heartbeat is no error by itself: the next change will say so.
    """

    def __init__(self, connection: Connection, root: str, holder: Holder, *, beat_s: float = BEAT_S) -> None:
        self._shell = DeviceShell(connection, root, secrets.token_hex(8))
        self._holder = holder
        self._beat_s = beat_s
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="lease-heartbeat", daemon=True)

    def __enter__(self) -> DeviceShell:
        """Take the lease.

        Raises:
            DeployError: another deployer holds it; the message names who and why.
        """
        done = self._shell.call("lease_take", msgspec.json.encode(self._holder).decode())
        name = self._shell.connection.name
        if done.status == LEASE_HELD:
            raise DeployError(
                f"{name}: {_describe(done.stdout)}; wait, or take it away: starsd deploy unlock {name}"
            )
        if done.status != 0:
            raise DeployError(f"{name}: cannot write the lease in {self._shell.root}: {done.stderr.strip()}")
        self._thread.start()
        return self._shell

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()
        try:
            self._shell.call("lease_drop")
        except StarSDError:
            if kind is None:
                raise

    def _beat(self) -> None:
        while not self._ended.wait(self._beat_s):
            try:
                self._shell.call("lease_beat")
            except LeaseLostError:
                return
            except StarSDError:  # no channel was free, or the answer came late: the next one may get through
                if not self._shell.connection.alive:
                    return


def _describe(text: str) -> str:
    try:
        holder = msgspec.json.decode(text.strip(), type=Holder)
    except msgspec.MsgspecError:
        return "another deployer is at work"
    return f"{holder.who} is at work ({holder.doing})"
