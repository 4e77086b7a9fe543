"""The lab's devices: containers with real systemd and sshd. Only `make test-lab` runs this.

What cannot be built on a machine, or not in the time that it has, is said to be NOT RUN, and ends with an
exit status of its own: neither a failure nor a pass.
"""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

from tests.lab.devices import Lab, LabNotRunError

RUN = "STARSD_RUN_LAB"
NOT_RUN_STATUS = 75  # EX_TEMPFAIL of sysexits.h
NOT_RUN: list[str] = []


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """A lab that can boot devices, without any; whatever it started is gone afterwards."""
    if not os.environ.get(RUN):
        pytest.skip("NOT RUN: the device lab; `make test-lab` runs it (root, Debian packages, 30 minutes)")
    made = Lab(tmp_path_factory.mktemp("lab"), Path(os.environ.get("STARSD_LAB", "/var/lib/starsd-lab")))
    try:
        made.build("amd64")
        made.build_meanwhile("arm64")
    except LabNotRunError as error:
        NOT_RUN.append(str(error))
        pytest.skip(f"NOT RUN: the lab cannot be built here: {error}")
    try:
        yield made
    finally:
        made.close()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """A device that cannot be had, and time that is over, are no failure of what is tested."""
    try:
        return (yield)
    except LabNotRunError as error:
        NOT_RUN.append(f"{item.name}: {error}")
        pytest.skip(f"NOT RUN to its end: {error}")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if NOT_RUN:
        terminalreporter.section("NOT RUN: the device lab", sep="!")
        for reason in NOT_RUN:
            terminalreporter.line(reason)
        terminalreporter.line("This is no pass.")


def pytest_sessionfinish(session: pytest.Session) -> None:
    if NOT_RUN and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = NOT_RUN_STATUS
