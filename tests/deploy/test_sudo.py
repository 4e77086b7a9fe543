"""Root is asked for with a password that is on stdin and nowhere else."""

from __future__ import annotations

import msgspec
import pytest

from starsd_deploy.sudo import SudoPassword, run_as_root
from starsd_edge.errors import DeployError
from tests.deploy.loopback import LoopbackDevice
from tests.deploy.samples import facts_with

PASSWORD = "open sesame, 3 times"
# Answers as sudo does, and notes what anybody on the device could see meanwhile.
SUDO = """\
#!/bin/sh
[ "$1 $2 $3" = "-k -S -p" ] || exit 9
shift 4
IFS= read -r password
cat /proc/[0-9]*/cmdline /proc/[0-9]*/environ 2>/dev/null | tr '\\0' '\\n' >{home}/seen
[ "$password" = "{password}" ] || {{ echo 'Sorry, try again.' >&2; exit 1; }}
exec "$@"
"""
FACTS = msgspec.structs.replace(facts_with(), sudo="password")


@pytest.fixture
def guarded(board: LoopbackDevice) -> LoopbackDevice:
    (board.home / "bin" / "sudo").write_text(SUDO.format(home=board.home, password=PASSWORD))
    return board


def test_password_is_asked_once_and_seen_by_nobody(guarded: LoopbackDevice) -> None:
    asked: list[str] = []

    def ask(question: str) -> str:
        asked.append(question)
        return PASSWORD

    sudo = SudoPassword(ask)
    with guarded.connect() as connection:
        for _ in range(2):
            assert run_as_root(connection, FACTS, "echo as root\n", sudo).stdout == "as root\n"
    assert asked == [f"sudo password of {FACTS.user}: "]
    seen = (guarded.home / "seen").read_text(errors="replace")
    assert "sh" in seen
    assert PASSWORD not in seen


def test_wrong_password_is_said_to_be_wrong(guarded: LoopbackDevice) -> None:
    with guarded.connect() as connection, pytest.raises(DeployError, match="does not accept the password"):
        run_as_root(connection, FACTS, "true\n", SudoPassword(lambda question: "wrong"))


def test_who_may_not_use_sudo_is_told_of_user_units(board: LoopbackDevice) -> None:
    facts = msgspec.structs.replace(FACTS, sudo="none")
    with board.connect() as connection, pytest.raises(DeployError, match='unit = "user"'):
        run_as_root(connection, facts, "true\n", SudoPassword(lambda question: PASSWORD))
