"""The log of a draft service: a few lines of a kind at a time, whatever a device does."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from starsd_edge.protocol.messages import ErrorCode
from starsd_edge.protocol.server_connection import ServiceOffer
from starsd_edge.protocol.session_table import SessionKey
from starsd_server.scheduling import Limits, Policy
from starsd_server.sparing import MAX_LINES, WINDOW_S, Sparing
from starsd_server.telemetry import Recorder


class Log(logging.Handler):
    """What a service writes; its clock stands until it is moved."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self.lines: list[str] = []
        self.addFilter(Sparing(lambda: self.now_s))

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> Iterator[Log]:
    log, logger = Log(), logging.getLogger("starsd.service")
    logger.addHandler(log)
    with caplog.at_level(logging.INFO, logger.name):
        yield log
    logger.removeHandler(log)


def test_a_device_that_does_wrong_again_and_again_fills_no_disk(log: Log) -> None:
    """Each of its messages was a line."""
    recorder = Recorder(ServiceOffer("test", "0", 1, ()), Limits(), Policy.BATCHED)
    for number in range(1000):
        recorder.violated(SessionKey("jet1", number), ErrorCode.MALFORMED, f"token {number}")
    recorder.lease_over(SessionKey("jet2", 7))
    assert MAX_LINES + 1 == len(log.lines)
    assert "session 0000000000000007 of jet2: lease over" == log.lines[-1]
    log.now_s += WINDOW_S
    recorder.violated(SessionKey("jet1", 1), ErrorCode.MALFORMED, "100 %s")
    assert log.lines[-1].endswith(f"of jet1: MALFORMED: 100 %s (and {1000 - MAX_LINES} more before)")
    recorder.violated(SessionKey("jet1", 2), ErrorCode.MALFORMED, "token 2")
    assert log.lines[-1].endswith("MALFORMED: token 2")
