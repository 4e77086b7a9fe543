"""The worker, turn by turn: real engine, real stream to a gateway's end."""

from __future__ import annotations

import os
import select
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from starsd_edge.protocol.telemetry import GatewaySnapshot, decode_snapshot
from starsd_server.config import HeadSource, ServiceConfig
from starsd_server.ipc import GatewayState, pack_state, unpack_in_gateway
from starsd_server.local_stream import GatewayEnd
from starsd_server.worker import Worker

from .heads import save_toy_head

STILL_MS = 10_000
FOR_EVER_S = 1e5


@pytest.fixture
def worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Worker]:
    read, write = os.pipe()
    with os.fdopen(read) as heard, os.fdopen(write, "w"):
        monkeypatch.setattr(sys, "stdin", heard)
        head = tmp_path / "head"
        head.mkdir()
        made = Worker(
            ServiceConfig(heads=(HeadSource(str(save_toy_head(head))),), bind="", folder=str(tmp_path))
        )
        yield made
        made.close()


def test_a_snapshot_leaves_before_the_worker_waits_again(
    worker: Worker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """It stood in line until something else happened: whoever watched a service at rest saw it half a second
    late."""
    monkeypatch.setattr("starsd_server.worker.TICK_S", FOR_EVER_S)
    monkeypatch.setattr("starsd_server.worker.SNAPSHOT_S", 0.0)  # one in every turn
    poller = select.poll()
    gateway = GatewayEnd(tmp_path, poller)
    request.addfinalizer(gateway.close)
    gateway.look(0.0)
    watching = pack_state(GatewayState(GatewaySnapshot(), watched=True))
    gateway.put(watching)
    gateway.flush()
    while not poller.poll(0):  # it takes the gateway in, and hears that somebody watches
        worker.turn(begun=False)
    while poller.poll(0):
        gateway.receive()
    monkeypatch.setattr("starsd_server.worker.SNAPSHOT_S", FOR_EVER_S)  # after one more
    turning = threading.Thread(target=worker.turn, kwargs={"begun": False})
    turning.start()
    try:
        assert poller.poll(STILL_MS)
        (message,) = gateway.receive()
    finally:
        gateway.put(watching)  # or it would wait on
        gateway.flush()
        turning.join()
    payload = unpack_in_gateway(message)
    assert isinstance(payload, bytes)
    assert decode_snapshot(payload).sequence > 0
