"""Root on a device, for the one thing that needs it: systemd's folder.

The password is asked once for all devices, at the first device that wants one, and goes to sudo on stdin; it
is in no argument list, environment or log.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from starsd_deploy.facts import Facts
from starsd_deploy.ssh import Completed, Connection
from starsd_edge.errors import DeployError

__all__ = ["SudoPassword", "run_as_root", "sudo_argv"]

REFUSALS = ("incorrect password", "Sorry, try again", "no password was provided")


class SudoPassword:
    """A password that is asked for at most once; threads of other devices wait for the answer."""

    def __init__(self, ask: Callable[[str], str]) -> None:
        self._ask = ask
        self._lock = threading.Lock()
        self._answer: str | None = None

    def get(self, user: str) -> str:
        """The password."""
        with self._lock:
            if self._answer is None:
                self._answer = self._ask(f"sudo password of {user}: ")
            return self._answer


def run_as_root(connection: Connection, facts: Facts, script: str, password: SudoPassword) -> Completed:
    """Feed a script to root's `sh -s`.

    Raises:
        DeployError: the user may not use sudo, the password is wrong, or the script failed.
    """
    name = connection.name
    argv, stdin = sudo_argv(facts, ("sh", "-s"), password)
    stdin += script.encode()
    done = connection.run_command(argv, stdin)
    if done.status == 0:
        return done
    if any(words in done.stderr for words in REFUSALS):
        raise DeployError(f"{name}: sudo does not accept the password of {facts.user}")
    raise DeployError(f"{name}: as root: {done.stderr.strip() or f'exit status {done.status}'}")


def sudo_argv(facts: Facts, words: tuple[str, ...], password: SudoPassword) -> tuple[tuple[str, ...], bytes]:
    """The argument list that runs `words` as root, and what its stdin has to begin with.

    Raises:
        DeployError: the user may not use sudo.
    """
    if facts.sudo == "root":
        return words, b""
    if facts.sudo == "free":
        return ("sudo", "-n", *words), b""
    if facts.sudo == "password":
        # -k: ask even if sudo remembers the user, or the command would read the password as its input
        return ("sudo", "-k", "-S", "-p", "", *words), f"{password.get(facts.user)}\n".encode()
    raise DeployError(
        f'{facts.hostname}: {facts.user} may not use sudo; let it, or set unit = "user" in the inventory'
    )
