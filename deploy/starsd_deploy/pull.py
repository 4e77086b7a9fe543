"""A file from a device, on from where an earlier pull was cut."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from starsd_deploy.sftp_lane import Mode
from starsd_deploy.ssh import CLOSING_S, Connection
from starsd_deploy.throttle import Pacer

__all__ = ["pull"]

READ_BYTES = 32 * 1024  # what every server gives at once
AHEAD_BYTES = 64 * READ_BYTES  # a server that was asked for more has been seen to stop for good


def pull(connection: Connection, path: str, size: int, part: Path, pacer: Pacer) -> None:
    """Append to `part` what it lacks of the file; it is written in order, so its size says what is there.

    Raises:
        UnreachableError: the connection was lost. DeployError: the file is not there, or shorter.
    """
    with connection.sftp_lane(CLOSING_S) as lane, part.open("ab") as here:
        lane.open(path, Mode.READ)
        come: dict[int, bytes] = {}
        written = asked = here.tell()
        while written < size:
            while asked < min(size, written + AHEAD_BYTES):
                count = min(READ_BYTES, size - asked)
                pacer.take(count)
                lane.read(path, asked, count, partial(come.__setitem__, asked))
                asked += count
            lane.wait()
            while data := come.pop(written, b""):
                here.write(data)
                written += len(data)
