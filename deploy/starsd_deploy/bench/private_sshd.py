"""An OpenSSH server of one's own: no root, a free port on loopback, keys in a temporary folder."""

from __future__ import annotations

import getpass
import os
import shutil
import socket
import subprocess
import time
from pathlib import Path
from types import TracebackType

from starsd_edge.errors import MissingDependencyError, ResourceError

__all__ = ["PrivateSshd"]

START_LIMIT_S = 20.0
CONFIG = """\
Port {port}
ListenAddress 127.0.0.1
HostKey {folder}/host_ed25519
AuthorizedKeysFile {folder}/id_ed25519.pub
PidFile none
UsePAM no
StrictModes no
PasswordAuthentication no
KbdInteractiveAuthentication no
Subsystem sftp internal-sftp
"""


class PrivateSshd:
    """Runs while its context is open.

    Raises:
        MissingDependencyError: no OpenSSH server is installed. ResourceError: it does not start.
    """

    def __init__(self, folder: Path) -> None:
        program = shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin")
        if program is None:
            raise MissingDependencyError("no sshd here: sudo apt install openssh-server")
        self.folder = folder
        self.user = getpass.getuser()
        for name in ("host_ed25519", "id_ed25519"):
            command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)]
            subprocess.run(command, check=True, stdin=subprocess.DEVNULL)
        self.port = free_port()
        (folder / "sshd_config").write_text(CONFIG.format(port=self.port, folder=folder))
        if os.geteuid() == 0:
            Path("/run/sshd").mkdir(exist_ok=True)  # sshd as root insists on it
        self._log = (folder / "sshd.log").open("wb")
        command = [program, "-D", "-e", "-f", str(folder / "sshd_config")]
        # Ctrl-C is for who measures, who then ends this
        self._process = subprocess.Popen(command, stderr=self._log, start_new_session=True)

    def __enter__(self) -> PrivateSshd:
        until_s = time.monotonic() + START_LIMIT_S
        while time.monotonic() < until_s and self._process.poll() is None:
            try:
                socket.create_connection(("127.0.0.1", self.port), 1).close()
            except OSError:
                time.sleep(0.02)
            else:
                return self
        self.__exit__(None, None, None)
        raise ResourceError(f"sshd does not start: {(self.folder / 'sshd.log').read_text().strip()}")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.terminate()
        self._process.wait()
        self._log.close()


def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])
