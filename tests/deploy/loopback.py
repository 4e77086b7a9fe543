"""A device on loopback: a real sshd of this machine's OpenSSH, run as the test's own user on a free port.

Its systemctl, loginctl and journalctl are small programs in front of PATH that start and stop real processes
(there is no systemd in a test); everything else, from sftp to sha256sum, is the machine's own.
"""

from __future__ import annotations

import contextlib
import getpass
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from starsd_deploy.inventory import Device, Role, UnitScope
from starsd_deploy.ssh import Connection, connect
from starsd_deploy.ssh_config import Hop, Route
from tests.ports import free_port

SSHD = shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin")
START_LIMIT_S = 20.0
# what a device's login has, and the Python that runs the tests
SYSTEM_PATH = f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"

INTERNAL_SFTP = "Subsystem sftp internal-sftp"
SSHD_CONFIG = """\
Port {port}
ListenAddress 127.0.0.1
HostKey {home}/host_ed25519
AuthorizedKeysFile {home}/authorized_keys
PidFile none
UsePAM no
StrictModes no
PasswordAuthentication no
KbdInteractiveAuthentication no
AllowTcpForwarding yes
MaxSessions {max_sessions}
{subsystem}
SetEnv HOME={home} XDG_CONFIG_HOME={home}/.config XDG_RUNTIME_DIR={home}/run PATH={home}/bin:{path}
"""

# One unit, kept running by a supervisor process as `Restart=always` would.
SYSTEMCTL = """\
#!{python}
import os, signal, subprocess, sys, time
home = {home!r}
args = [a for a in sys.argv[1:] if a not in ("--user", "--quiet")]
verb, unit = args[0], args[-1]
pid_file, enabled = f"{{home}}/run/{{unit}}.pid", f"{{home}}/run/{{unit}}.enabled"

def read(path):
    try:
        return int(open(path).read() or 0)
    except (FileNotFoundError, ValueError):
        return 0

def alive(pid):
    try:
        return pid and open(f"/proc/{{pid}}/stat").read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False

supervisor = read(pid_file + ".supervisor")
main = read(pid_file)
if verb == "is-system-running":
    print("running")
elif verb == "is-active":
    print("active" if alive(main) else "inactive")
elif verb == "is-enabled":
    print("enabled" if os.path.exists(enabled) else "disabled")
elif verb == "show":
    print(main if alive(main) else 0)
elif verb == "enable":
    open(enabled, "w")
elif verb in ("start", "restart", "stop"):
    for pid in (supervisor, main):
        if alive(pid):
            os.kill(pid, signal.SIGKILL)
    if verb != "stop":
        text = open(f"{{home}}/.config/systemd/user/{{unit}}").read()
        command = [l.split("=", 1)[1] for l in text.splitlines() if l.startswith("ExecStart=")][0]
        subprocess.Popen([sys.executable, __file__, "supervise", command, unit], start_new_session=True,
                         stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
elif verb == "supervise":
    open(pid_file + ".supervisor", "w").write(str(os.getpid()))
    while True:
        log = open(f"{{home}}/run/{{unit}}.log", "ab")
        child = subprocess.Popen(args[1].split(), stdout=log, stderr=log, stdin=subprocess.DEVNULL)
        with open(pid_file + ".new", "w") as file:
            file.write(str(child.pid))
        os.rename(pid_file + ".new", pid_file)
        child.wait()
        time.sleep(0.05)
"""

JOURNALCTL = """\
#!/bin/sh
while [ $# -gt 0 ]; do case $1 in --user-unit | -u) unit=$2; shift ;; -n) lines=$2; shift ;; esac; shift; done
tail -n "$lines" {home}/run/"$unit".log
"""


# Counts renames, by which everything that lasts is marked as done, and kills who asks for number `cut_at`.
MV = """\
#!/bin/sh
count=$(($(cat {home}/run/renames 2>/dev/null) + 1))
echo $count >{home}/run/renames
if [ $count = "$(cat {home}/run/cut_at 2>/dev/null)" ]; then kill -KILL $PPID; exit 1; fi
exec /bin/mv "$@"
"""


class LoopbackDevice:
    """One sshd with its own home; `close` ends it and what it started."""

    def __init__(self, home: Path, *, max_sessions: int = 64, subsystem: str = INTERNAL_SFTP) -> None:
        assert SSHD is not None
        self.home = home
        self.root = home / "starsd"
        home.mkdir(parents=True, exist_ok=True)
        (home / "run").mkdir()
        self._programs()
        self._keys()
        self.port = free_port()
        config = home / "sshd_config"
        text = SSHD_CONFIG.format(
            port=self.port, home=home, path=SYSTEM_PATH, max_sessions=max_sessions, subsystem=subsystem
        )
        config.write_text(text)
        if os.geteuid() == 0:
            Path("/run/sshd").mkdir(exist_ok=True)
        self._log = (home / "sshd.log").open("wb")
        self._sshd = subprocess.Popen([SSHD, "-D", "-e", "-f", str(config)], stderr=self._log)
        self._await_port()

    def _programs(self) -> None:
        folder = self.home / "bin"
        folder.mkdir()
        for name, text in {
            "systemctl": SYSTEMCTL.format(python=sys.executable, home=str(self.home)),
            "journalctl": JOURNALCTL.format(home=self.home),
            "loginctl": "#!/bin/sh\necho yes\n",
            "sudo": "#!/bin/sh\nexit 1\n",
            "mv": MV.format(home=self.home),
        }.items():
            (folder / name).write_text(text)
            (folder / name).chmod(0o755)

    def _keys(self) -> None:
        for name in ("host_ed25519", "id_ed25519"):
            command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self.home / name)]
            subprocess.run(command, check=True, stdin=subprocess.DEVNULL)
        shutil.copy(self.home / "id_ed25519.pub", self.home / "authorized_keys")

    def _await_port(self) -> None:
        until = time.monotonic() + START_LIMIT_S
        while time.monotonic() < until:
            try:
                socket.create_connection(("127.0.0.1", self.port), 1).close()
            except OSError:
                assert self._sshd.poll() is None, (self.home / "sshd.log").read_text()
                time.sleep(0.02)
            else:
                return
        raise AssertionError("sshd did not start: " + (self.home / "sshd.log").read_text())

    def hop(self, **changes: object) -> Hop:
        """How to log in."""
        values: dict[str, object] = {
            "alias": "board",
            "host": "127.0.0.1",
            "port": self.port,
            "user": getpass.getuser(),
            "identities": (str(self.home / "id_ed25519"),),
            "identities_only": True,
            "agent_socket": "",
            "known_hosts": (str(self.home / "known_hosts"),),
            "host_key_name": "127.0.0.1",
        }
        return Hop(**(values | changes))  # type: ignore[arg-type]  # a dict cannot be typed per key

    def connect(self) -> Connection:
        """Log in."""
        return connect(Route(hops=(self.hop(),)))

    def device(self, name: str = "board", **changes: object) -> Device:
        """Its inventory entry, a target unless told otherwise."""
        values: dict[str, object] = {
            "name": name,
            "address": "127.0.0.1",
            "port": self.port,
            "user": getpass.getuser(),
            "identity_file": str(self.home / "id_ed25519"),
            "roles": (Role.TARGET,),
            "bundle": "/nowhere",
            "root": str(self.root),
            "unit": UnitScope.USER,
        }
        return Device(**(values | changes))  # type: ignore[arg-type]  # a dict cannot be typed per key

    def lose_power(self) -> None:
        """End every process of the device at once, sshd's sessions included; disk and sshd's port stay."""
        self.stop_service()
        for pid in _children(self._sshd.pid):
            _kill_tree(pid)

    def cut_at_rename(self, number: int | None) -> int:
        """Let what runs on the device die just before its rename `number` from now; those that there were."""
        renames, cut_at = self.home / "run" / "renames", self.home / "run" / "cut_at"
        before = int(renames.read_text()) if renames.exists() else 0
        renames.write_text("0")
        cut_at.write_text("" if number is None else str(number))
        return before

    def cut_connections(self) -> None:
        """End sshd's sessions and nothing else, as a pulled cable does."""
        for pid in _children(self._sshd.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def stop_service(self) -> None:
        """End supervisor and service as a power cut does."""
        for kind in ("*.supervisor", "*.pid"):
            for file in (self.home / "run").glob(kind):
                text = file.read_text().strip()
                if text.isdigit():
                    _kill_tree(int(text))

    def boot(self) -> None:
        """Start enabled units, as after a power cut."""
        for file in (self.home / "run").glob("*.enabled"):
            unit = file.name.removesuffix(".enabled")
            subprocess.run([str(self.home / "bin" / "systemctl"), "--user", "start", unit], check=True)

    def close(self) -> None:
        """End all of it."""
        self.lose_power()
        self._sshd.terminate()
        self._sshd.wait()
        self._log.close()


def _children(pid: int) -> list[int]:
    try:
        text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    except OSError:
        return []
    return [int(word) for word in text.split()]


def _kill_tree(pid: int) -> None:
    for child in _children(pid):
        _kill_tree(child)
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


__all__ = ["SSHD", "LoopbackDevice"]
