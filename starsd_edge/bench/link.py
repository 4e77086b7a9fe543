"""What the link costs: messages in microseconds of CPU, round trips against a bare encrypted echo.

The echo moves frames of the same sizes over CURVE sockets with the same options and does nothing with them.
It and the service run in one other process and are measured in turns, so that whatever else the machine does
hits both. Times are those of the best tenth: on a shared machine the rest measures the neighbours.
"""

from __future__ import annotations

import multiprocessing
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection

import numpy as np
import zmq

from starsd_edge.decoding.roles import RoundHints, Update
from starsd_edge.link.client import RemoteDrafter
from starsd_edge.link.keys import KeyPair
from starsd_edge.link.sockets import (
    EdgeKeys,
    SyncSocket,
    edge_socket,
    make_context,
    receive_now,
    send_now,
    service_socket,
)
from starsd_edge.link.zap import Authenticator
from starsd_edge.protocol.codec import Frames, decode, encode
from starsd_edge.protocol.edge_connection import EdgeConnection
from starsd_edge.protocol.edge_events import TreeArrived
from starsd_edge.protocol.features import FeatureDtype, encode_rows
from starsd_edge.protocol.greeting import HelloBody, Identity
from starsd_edge.protocol.messages import Draft, Head, Hints
from starsd_edge.protocol.messages import Update as UpdateMessage
from starsd_edge.protocol.server_connection import HeadOffer, Opened, Pinged, Reply, RowsArrived, ServiceOffer
from starsd_edge.protocol.session_table import SessionTable

__all__ = ["LinkBench", "bench_link"]

WIDTH, ROWS, NODES, VOCAB = 4096, 4, 60, 49_152  # 32 KiB of float16 features up, a full tree down
MAX_LEN = 1 << 19
WARM_UP = 50
TURN = 25  # round trips of one kind before it is the other's turn
PATIENCE_MS = 10_000
WAIT = 0  # no flag: in the call, for as long as the socket's patience
BEST_PERCENT = 10
REPEATS, CALLS = 15, 400  # the best of so many repeats of so many calls


@dataclass(frozen=True, slots=True)
class LinkBench:
    """Microseconds: CPU time of the codec, wall time of round trips.

    echo      bare pyzmq over CURVE, frames of the same sizes
    messages  the same, encoded and decoded on both ends
    protocol  the same through both state machines, trees built and checked on both ends
    drafter   the same through RemoteDrafter, whose socket is on another thread
    """

    draft_codec_us: float  # encode and decode of a draft of 60 nodes
    update_codec_us: float  # encode and decode of an update of 5 rows, features included
    draft_bytes: int
    echo_us: float
    messages_us: float
    protocol_us: float
    drafter_us: float


def bench_link(rounds: int = 1000) -> LinkBench:
    """Run everything; `rounds` round trips of each kind."""
    draft_us, update_us, draft_bytes = codec_times()
    server_key, edge_key = KeyPair.generate("service"), KeyPair.generate("edge")
    near, far = multiprocessing.Pipe()
    spawn = multiprocessing.get_context("spawn")
    server = spawn.Process(target=serve, args=(far, server_key, edge_key.key.public), daemon=True)
    server.start()
    try:
        echo_port, codec_port, service_port = near.recv()
        keys = EdgeKeys(edge_key, server_key.key.public)
        with make_context(io_threads=1) as context:
            echo = Echo(context, keys, echo_port)
            messages = Messages(context, keys, codec_port)
            edge = SocketEdge(context, keys, service_port)
            drafter = DrafterEdge(keys, service_port)
            kinds = (echo.round_trip, messages.round_trip, edge.round_trip, drafter.round_trip)
            trips: list[list[float]] = [[] for _ in kinds]
            for kind in kinds:
                timed(kind, WARM_UP)
            for _ in range(max(1, rounds // TURN)):
                for kind, times in zip(kinds, trips, strict=True):
                    times += timed(kind, TURN)
            drafter.drafter.close()
            for socket in (echo.socket, messages.socket, edge.socket):
                socket.close(0)
    finally:
        near.send("stop")
        server.join(5)
    best = [float(np.percentile(times, BEST_PERCENT)) * 1e6 for times in trips]
    return LinkBench(draft_us, update_us, draft_bytes, *best)


def timed(act: Callable[[], None], count: int) -> list[float]:
    """Seconds of `count` calls, each."""
    times = []
    for _ in range(count):
        started_s = time.perf_counter()
        act()
        times.append(time.perf_counter() - started_s)
    return times


def codec_times() -> tuple[float, float, int]:
    head = Head(1, 2, 3, 4, 50, 6)
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, VOCAB, NODES - 1).astype(np.int32)
    draft = Draft(head, tokens, np.arange(NODES - 1, dtype=np.int32), 100, 4000)
    features = rng.standard_normal((5, WIDTH)).astype(np.float16)

    def one_draft() -> None:
        decode(encode(draft))

    def one_update() -> None:
        rows = encode_rows(features, FeatureDtype.FP16)
        message = decode(encode(UpdateMessage(head, tokens[:5], rows, Hints())))
        assert isinstance(message, UpdateMessage)
        message.features.decode()

    return cpu_us(one_draft), cpu_us(one_update), sum(map(len, encode(draft)))


def cpu_us(act: Callable[[], None]) -> float:
    best_s = float("inf")
    for _ in range(REPEATS):
        started_s = time.process_time()
        for _ in range(CALLS):
            act()
        best_s = min(best_s, time.process_time() - started_s)
    return best_s / CALLS * 1e6


# ------------------------------------------------------------------------------------------- the other end


def serve(pipe: Connection, key: KeyPair, edge_public: str) -> None:
    """A process with a bare echo and a service that drafts one tree, each on a port of its own."""
    context = make_context()
    authenticator = Authenticator(context, {edge_public: "edge"}.get)
    authenticator.start()
    echo, codec, service = (service_socket(context, key) for _ in range(3))
    pipe.send(tuple(socket.bind_to_random_port("tcp://127.0.0.1") for socket in (echo, codec, service)))
    answer = encode(DRAFT)
    offer = ServiceOffer("bench", "0", 1, (HeadOffer("bench-head", IDENTITY, MAX_LEN, NODES),))
    table = SessionTable(offer)
    poller = zmq.Poller()
    for socket in (echo, codec, service, pipe):
        poller.register(socket, zmq.POLLIN)
    while True:
        ready = dict(poller.poll())
        if echo in ready:
            route, *_ = echo.recv_multipart()
            echo.send_multipart([route, *answer], zmq.NOBLOCK)
        if codec in ready:
            route, *frames = received(codec)
            update = decode(frames)
            assert isinstance(update, UpdateMessage)
            update.features.decode()
            send_now(codec, [route, *encode(DRAFT)])
        if service in ready:
            route, *frames = received(service)
            for reply in answers(table, frames):
                send_now(service, [route, *reply])
        if pipe.fileno() in ready:
            break
    authenticator.stop()
    context.destroy(linger=0)


def answers(table: SessionTable, frames: Frames) -> list[Frames]:
    connection, events = table.receive("edge", decode(frames), time.monotonic())
    replies = []
    for event in events:
        match event:
            case Reply(frames):
                replies.append(frames)
            case Opened():
                replies.append(connection.send_ack(event.round_id))
            case Pinged():
                replies.append(connection.send_pong(event.nonce, 0))
            case RowsArrived() if event.hints is None:
                replies.append(connection.send_ack(event.round_id))
            case RowsArrived():
                replies.append(
                    connection.send_draft(
                        event.round_id, event.base_len, CHAIN, CHAIN, queue_us=0, draft_us=0
                    )
                )
    return replies


# The tree is ready: to grow one is a head's work and no part of the link.
CHAIN = np.arange(NODES - 1, dtype=np.int32)
DRAFT = Draft(Head(1, base_len=1), CHAIN, CHAIN)
IDENTITY = Identity(
    target="bench",
    target_hash="00",
    vocab_size=VOCAB,
    tokenizer_hash="00",
    hidden_size=WIDTH,
    feature_size=WIDTH,
)


# ------------------------------------------------------------------------------------------------ this end


class Echo:
    """Frames of an update's sizes out, of a draft's back."""

    def __init__(self, context: zmq.Context[SyncSocket], keys: EdgeKeys, port: int) -> None:
        self.socket = connected(context, keys, port)
        rows = encode_rows(np.ones((ROWS, WIDTH), np.float16), FeatureDtype.FP16)
        head = Head(1, 2, 3, 4, 50, 6)
        self._frames = encode(UpdateMessage(head, np.zeros(ROWS, np.int32), rows, Hints()))

    def round_trip(self) -> None:
        self.socket.send_multipart(self._frames)
        self.socket.recv_multipart()


class Messages:
    """An update encoded, its answer decoded; the other end does the reverse."""

    def __init__(self, context: zmq.Context[SyncSocket], keys: EdgeKeys, port: int) -> None:
        self.socket = connected(context, keys, port)
        self._features = np.ones((ROWS, WIDTH), np.float16)
        self._tokens = np.arange(ROWS, dtype=np.int32)
        self._head = Head(1, 2, 3, 4, 50, 6)

    def round_trip(self) -> None:
        rows = encode_rows(self._features, FeatureDtype.FP16)
        send_now(self.socket, encode(UpdateMessage(self._head, self._tokens, rows, Hints())))
        decode(received(self.socket))


class Rounds:
    """Updates of a context that grows, and starts anew before the history is full."""

    LONGEST = 2_000  # tokens: 16 MiB of history

    def __init__(self) -> None:
        self._features = np.ones((ROWS, WIDTH), np.float16)
        self.position = 0

    def next(self) -> Update:
        start, self.position = self.position, self.position + ROWS
        tokens = np.arange(ROWS, dtype=np.int32)
        return Update(start, tokens, self._features, RoundHints(NODES))


class SocketEdge:
    """EdgeConnection over a socket in this thread: the protocol and nothing else."""

    def __init__(self, context: zmq.Context[SyncSocket], keys: EdgeKeys, port: int) -> None:
        self.socket = connected(context, keys, port)
        self._edge = EdgeConnection(random.getrandbits(64), hello(), random.random)
        self._rounds = Rounds()
        self._edge.tick(1e9)  # the first probe is due
        self._edge.connected(time.monotonic())
        self._send()
        self._edge.receive(received(self.socket), time.monotonic())
        self._edge.start(0, time.monotonic())

    def round_trip(self) -> None:
        if self._rounds.position > Rounds.LONGEST:
            self._rounds.position = 0
            self._edge.start(0, time.monotonic())
        self._edge.update(self._rounds.next(), time.monotonic())
        self._send()
        while not any(
            isinstance(event, TreeArrived)
            for event in self._edge.receive(received(self.socket), time.monotonic())
        ):
            self._send()

    def _send(self) -> None:
        for frames in self._edge.take_frames():
            send_now(self.socket, frames)


class DrafterEdge:
    """What the decode loop has: a thread that owns the socket."""

    def __init__(self, keys: EdgeKeys, port: int) -> None:
        self.drafter = RemoteDrafter(f"tcp://127.0.0.1:{port}", hello(), keys)
        self.drafter.wait_until_ready(PATIENCE_MS / 1e3)
        self.drafter.start(0)
        self._rounds = Rounds()

    def round_trip(self) -> None:
        if self._rounds.position > Rounds.LONGEST:
            self._rounds.position = 0
            self.drafter.start(0)
        self.drafter.update(self._rounds.next())
        while self.drafter.poll(PATIENCE_MS / 1e3) is None:
            pass


def connected(context: zmq.Context[SyncSocket], keys: EdgeKeys, port: int) -> SyncSocket:
    socket = edge_socket(context, keys)
    socket.rcvtimeo = socket.sndtimeo = PATIENCE_MS
    socket.connect(f"tcp://127.0.0.1:{port}")
    socket.poll(PATIENCE_MS, zmq.POLLOUT)
    return socket


def received(socket: SyncSocket) -> list[bytes]:
    """The next message, waited for as the echo's is: in the receive."""
    return [frame.bytes for frame in receive_now(socket, WAIT)]


def hello() -> HelloBody:
    return HelloBody(
        identity=IDENTITY,
        digest=IDENTITY.digest(),
        device="bench",
        software="0",
        dtypes=["fp16"],
        max_len=MAX_LEN,
        max_nodes=NODES,
    )
