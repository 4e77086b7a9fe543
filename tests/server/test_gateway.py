"""The gateway, turn by turn and by a clock of its own: what it does when, and that no peer can put it off."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

import pytest
import zmq

from starsd_edge.link.keys import KeyPair
from starsd_edge.link.sockets import ROUTER_SEND_MESSAGES, EdgeKeys, SyncSocket, edge_socket, make_context
from starsd_edge.link.trust import TrustStore
from starsd_edge.protocol.codec import decode, encode
from starsd_edge.protocol.messages import Busy, BusyReason, Error, ErrorCode, Head, Open, Ping
from starsd_server.config import ServiceConfig
from starsd_server.gateway import MESSAGES_AT_ONCE, WORKER_PATIENCE_S, Gateway
from starsd_server.ipc import (
    FromEdge,
    GatewayState,
    Revoked,
    pack_snapshot,
    pack_to_edge,
    unpack_in_worker,
)
from starsd_server.local_stream import QUEUE_MESSAGES, WorkerEnd
from starsd_server.peers import REFRESH_S

SERVICE, JET, LAPTOP = (KeyPair.generate(name) for name in ("service", "jet1", "laptop"))
PATIENCE_MS = 60_000
UNDER_WAY = 8  # of each device: together more than a turn takes
AT_ONCE = ROUTER_SEND_MESSAGES // 4  # replies that are not read one by one
STILL_S = 10.0  # so long nothing moves that is not to move any more
PING = encode(Ping(Head(1), 5))


@dataclass
class House:
    """A gateway with keys, a worker that only listens, and devices; nothing moves but by `turn`."""

    folder: Path
    commands: TextIO  # of the service to the gateway
    now_s: float = 100.0
    context: zmq.Context[SyncSocket] = field(default_factory=make_context)
    arrived: list[FromEdge | GatewayState | Revoked] = field(default_factory=list)  # at the worker
    devices: list[SyncSocket] = field(default_factory=list)

    def __post_init__(self) -> None:
        SERVICE.save(self.folder / "service.key")
        self.trusted = TrustStore(self.folder / "trusted")
        for pair in (JET, LAPTOP):
            self.trusted.trust(pair.key)
        self.poller = select.poll()
        self.worker = WorkerEnd(self.folder, self.poller)
        config = ServiceConfig(
            heads=(),
            bind="tcp://127.0.0.1:0",
            monitor="tcp://127.0.0.1:0",
            folder=str(self.folder),
            keys=str(self.folder),
        )
        self.gateway = Gateway(config, lambda: self.now_s)
        self.turn_until(lambda: self.worker.connected)

    def device(self, pair: KeyPair) -> SyncSocket:
        """One that is let in and has been heard."""
        socket = edge_socket(self.context, EdgeKeys(pair, SERVICE.key.public))
        self.devices.append(socket)
        socket.connect(self.gateway.address)
        assert socket.poll(PATIENCE_MS, zmq.POLLOUT)
        heard = len(self.heard_of(pair))
        socket.send_multipart(PING)
        self.turn_until(lambda: len(self.heard_of(pair)) > heard)
        return socket

    def turn(self) -> None:
        assert self.gateway.turn()
        self.worker_turn()

    def worker_turn(self) -> None:
        ready = dict(self.poller.poll(0))
        if self.worker.listener in ready:
            self.worker.accept()
        if self.worker.fileno in ready:
            self.arrived += map(unpack_in_worker, self.worker.receive())

    def turn_until(self, met: Callable[[], bool]) -> None:
        """Without the gateway's time going on."""
        deadline_s = time.monotonic() + PATIENCE_MS / 1e3
        while not met():
            assert time.monotonic() < deadline_s, "it does not come"
            self.turn()

    def heard_of(self, pair: KeyPair) -> list[FromEdge]:
        return [each for each in self.arrived if isinstance(each, FromEdge) and each.device == pair.key.name]

    def revoked(self) -> list[str]:
        return [each.device for each in self.arrived if isinstance(each, Revoked)]


@pytest.fixture
def house(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[House]:
    read, write = os.pipe()
    with os.fdopen(read) as heard, os.fdopen(write, "w") as commands:
        monkeypatch.setattr(sys, "stdin", heard)
        made = House(tmp_path, commands)
        yield made
        made.gateway.close()
        if made.worker.listener >= 0:  # the test has not ended it
            made.worker.close()
        for socket in made.devices:
            socket.close(0)
        made.context.term()


def test_a_device_is_revoked_at_the_first_look_after_its_key_is_gone(house: House) -> None:
    """It is told, though it says nothing; the worker ends its sessions; the other one is none the wiser."""
    silent, other = house.device(JET), house.device(LAPTOP)
    house.turn()
    house.trusted.revoke("jet1")
    house.now_s += REFRESH_S
    house.turn()
    house.turn_until(lambda: bool(silent.poll(0)))
    told = decode(silent.recv_multipart())
    assert isinstance(told, Error)
    assert ErrorCode.REVOKED is told.code
    house.turn_until(lambda: house.revoked() == ["jet1"])
    assert not other.poll(0)
    heard = len(house.heard_of(JET))
    silent.send_multipart(PING)
    house.turn_until(lambda: bool(silent.poll(0)))
    assert heard == len(house.heard_of(JET))


def test_it_looks_in_time_whether_anybody_speaks_or_all_do(house: House) -> None:
    """A turn waits no longer than until the next look, and handles no more than so many messages: neither
    silence nor a crowd puts a revocation off. Several looks fit into the second that is promised."""
    assert 4 * REFRESH_S <= 1.0
    chatty = [house.device(LAPTOP) for _ in range(30)]
    house.device(JET)
    assert 0 < house.gateway.idle_ms() <= REFRESH_S * 1e3 + 1
    house.now_s += REFRESH_S
    assert house.gateway.idle_ms() <= 1
    house.turn()
    for socket in chatty:
        for _ in range(10):
            socket.send_multipart(PING)
    house.trusted.revoke("jet1")
    house.now_s += REFRESH_S
    before = len(house.arrived)
    house.turn_until(lambda: house.revoked() == ["jet1"])
    arrived = house.arrived[before:]
    passed_up = [each for each in arrived[: arrived.index(Revoked("jet1"))] if isinstance(each, FromEdge)]
    assert len(passed_up) <= MESSAGES_AT_ONCE


def test_a_worker_that_does_not_read_is_not_waited_for_and_hears_of_a_revocation_all_the_same(
    house: House,
) -> None:
    """What is in line for it has an end; beyond it the devices are told, and nothing is kept."""
    asking, other = house.device(LAPTOP), house.device(JET)
    opening = encode(Open(Head(1, base_len=1), 0))
    refused: list[Busy] = []
    asked = 0

    def all_answered() -> bool:
        while asking.poll(0):
            message = decode(asking.recv_multipart())
            assert isinstance(message, Busy)
            refused.append(message)
        return len(house.heard_of(LAPTOP)) + len(refused) == 1 + asked

    while not refused:
        asking.send_multipart([*opening[:1]])
        asked += 1
        house.now_s += WORKER_PATIENCE_S / 10
        assert house.gateway.turn()
        all_answered()
    assert asked > QUEUE_MESSAGES
    assert BusyReason.LOAD is refused[0].reason
    house.trusted.revoke("jet1")
    house.now_s += REFRESH_S
    assert house.gateway.turn()
    house.turn_until(lambda: house.revoked() == ["jet1"])
    house.turn_until(all_answered)
    assert not other.closed


def test_one_who_floods_has_no_message_of_others_refused_and_none_kept_back_behind_all_its_own(
    house: House,
) -> None:
    """A worker slower than one device asks: another that asks once comes in between, nothing is dropped."""
    flooding, other = house.device(LAPTOP), house.device(JET)
    before = len(house.arrived)
    house.now_s += REFRESH_S - 0.001  # the next look is near: no turn waits for long
    asked = 20 * QUEUE_MESSAGES
    for number in range(asked):
        assert flooding.poll(PATIENCE_MS, zmq.POLLOUT)
        flooding.send_multipart(PING)
        if number % MESSAGES_AT_ONCE == 0:
            assert house.gateway.turn()  # and the worker does not
    other.send_multipart(PING)
    house.turn_until(lambda: len(house.heard_of(JET)) == 2)
    house.turn_until(lambda: len(house.heard_of(LAPTOP)) == 1 + asked)
    order = [each.device for each in house.arrived[before:] if isinstance(each, FromEdge)]
    assert order.index("jet1") < asked / 2


def test_no_message_waits_for_the_next_one(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """ZeroMQ tells once of all that has come, and a reply that is sent meanwhile takes that word away. Here
    nothing else wakes the gateway: time stands still, and what is overlooked is overlooked for ever."""
    monkeypatch.setattr("starsd_server.gateway.REFRESH_S", 1e5)
    monkeypatch.setattr("starsd_server.gateway.STATE_S", 1e5)
    devices = [house.device(JET) for _ in range(MESSAGES_AT_ONCE // 2)]
    asking, listening = devices[0], house.device(LAPTOP)
    (heard,) = house.heard_of(LAPTOP)
    reply = pack_to_edge(heard.route, heard.frames)
    house.now_s += 1e3
    house.turn()
    house.arrived.clear()
    for socket in devices * UNDER_WAY:
        socket.send_multipart(PING)
    gateway = threading.Thread(target=house.gateway.run)
    gateway.start()

    def all_heard(count: int) -> None:
        while len(house.heard_of(JET)) < count:
            assert house.worker.wait(STILL_S), f"{len(house.arrived)} messages, and no more"
            house.worker_turn()
        house.arrived.clear()

    try:
        all_heard(UNDER_WAY * len(devices))
        for _ in range(1000):
            for _ in range(AT_ONCE):
                house.worker.put(reply)
            house.worker.flush()
            asking.send_multipart(PING)
            all_heard(1)
            for _ in range(AT_ONCE):
                assert listening.poll(STILL_S * 1e3)
                listening.recv_multipart()
    finally:
        house.commands.close()
        gateway.join()


def test_a_snapshot_that_nobody_could_read_is_dropped(house: House) -> None:
    """It ended the gateway, and the next one twice a second: after ten of them the service gave up."""
    device = house.device(JET)
    house.worker.put(pack_snapshot(b"{}"))
    (heard,) = house.heard_of(JET)
    house.worker.put(pack_to_edge(heard.route, heard.frames))
    house.worker.flush()
    house.turn_until(lambda: bool(device.poll(0)))


def test_a_worker_that_is_away_is_told_of_as_starting(house: House) -> None:
    device = house.device(JET)
    house.worker.close()
    house.turn_until(lambda: not house.gateway.has_worker)
    device.send_multipart(encode(Open(Head(1, base_len=1), 0)))
    while not device.poll(0):
        assert house.gateway.turn()
    message = decode(device.recv_multipart())
    assert isinstance(message, Busy)
    assert BusyReason.STARTING is message.reason


def test_it_starts_without_what_takes_long_to_load() -> None:
    """A gateway that died is back before anybody's patience ends: it loads nothing that computes."""
    script = "import sys, starsd_server.gateway; print(*{name.partition('.')[0] for name in sys.modules})"
    loaded = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    heavy = {"torch", "onnxruntime", "onnx", "asyncio", "ssl", "scipy", "safetensors", "tokenizers"}
    assert set() == heavy & set(loaded.stdout.split())
