"""Fixtures of the deployer's tests. Where there is no sshd, what could not run is said at the end, loudly."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.deploy.loopback import SSHD, LoopbackDevice

NOT_RUN: list[str] = []


@pytest.fixture
def board(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[LoopbackDevice]:
    """A device on loopback behind a real sshd."""
    if SSHD is None:
        NOT_RUN.append(request.node.nodeid)
        pytest.skip("NOT RUN: no sshd here; install openssh-server")
    device = LoopbackDevice(tmp_path / "board")
    try:
        yield device
    finally:
        device.close()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if NOT_RUN:
        terminalreporter.section("NOT TESTED: the deployer over SSH", sep="!")
        terminalreporter.line(f"{len(NOT_RUN)} tests did not run because this machine has no sshd.")
        terminalreporter.line("They are no pass. Install openssh-server and run them again.")
