"""Publisher and feed over real sockets, and each way a link can be down."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zmq
import zmq.auth
from zmq.auth.thread import ThreadAuthenticator

from starsd_edge.errors import ResourceError, UsageError
from starsd_edge.link.keys import KeyPair
from starsd_edge.link.sockets import ZAP_DOMAIN, monitor_event
from starsd_edge.link.zap import Authenticator
from starsd_edge.monitor.endpoints import tcp_address
from starsd_edge.monitor.feed import Arrival, Source, WatchKeys, ZmqFeed
from starsd_edge.monitor.link_state import LinkState
from starsd_edge.monitor.publish import SnapshotPublisher
from starsd_edge.protocol.telemetry import ServiceSnapshot
from tests.ports import free_port

PATIENCE_S = 60.0
SNAPSHOT = ServiceSnapshot("boot", 1, 2.0, service="desk")


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    with zmq.Context() as context:
        yield context


@pytest.fixture
def publisher(context: zmq.Context[zmq.Socket[bytes]]) -> Iterator[SnapshotPublisher]:
    publisher = SnapshotPublisher(context, "tcp://127.0.0.1:*")
    yield publisher
    publisher.close()


def watch_keys(own: KeyPair, service: KeyPair) -> WatchKeys:
    return WatchKeys(own.key.public.encode(), own.secret.encode(), service.key.public.encode())


def until(
    feed: ZmqFeed, met: Callable[[list[Arrival]], bool], each: Callable[[], object] = int
) -> list[Arrival]:
    """Poll until `met` holds for all arrivals so far, doing `each` before every poll."""
    deadline, arrivals = time.monotonic() + PATIENCE_S, []
    while not met(arrivals):
        assert time.monotonic() < deadline, f"still {feed.links} after {len(arrivals)} arrivals"
        each()
        arrivals += feed.poll(0.05)
    return arrivals


def test_a_published_snapshot_arrives(publisher: SnapshotPublisher) -> None:
    feed = ZmqFeed([Source("desk", publisher.endpoint)])
    arrival = until(feed, bool, lambda: publisher.publish(SNAPSHOT))[0]
    feed.close()
    assert (arrival.source, arrival.snapshot) == (0, SNAPSHOT)
    assert arrival.num_bytes > 40


def test_nothing_is_encoded_while_nobody_listens(publisher: SnapshotPublisher) -> None:
    assert (publisher.wanted, publisher.publish(SNAPSHOT)) == (False, 0)


def test_the_publisher_notices_that_the_last_watcher_left(publisher: SnapshotPublisher) -> None:
    feed = ZmqFeed([Source("desk", publisher.endpoint)])
    until(feed, bool, lambda: publisher.publish(SNAPSHOT))
    feed.close()
    deadline = time.monotonic() + PATIENCE_S
    while publisher.wanted:
        assert time.monotonic() < deadline


def test_two_services_are_told_apart(context: zmq.Context[zmq.Socket[bytes]]) -> None:
    publishers = [SnapshotPublisher(context, "tcp://127.0.0.1:*") for _ in range(2)]
    feed = ZmqFeed([Source(str(index), one.endpoint) for index, one in enumerate(publishers)])

    def publish() -> None:
        for index, one in enumerate(publishers):
            one.publish(ServiceSnapshot(f"boot {index}", 1, 1.0))

    arrivals = until(feed, lambda arrivals: {a.source for a in arrivals} == {0, 1}, publish)
    feed.close()
    for one in publishers:
        one.close()
    assert {(a.source, a.snapshot.boot_id) for a in arrivals} == {(0, "boot 0"), (1, "boot 1")}


def test_what_is_no_snapshot_is_skipped(context: zmq.Context[zmq.Socket[bytes]]) -> None:
    with context.socket(zmq.XPUB) as socket_:
        port = socket_.bind_to_random_port("tcp://127.0.0.1")
        feed = ZmqFeed([Source("desk", f"tcp://127.0.0.1:{port}")])

        def publish() -> None:
            socket_.send_multipart([b"starsd.telemetry.1", b"not json"])
            socket_.send_multipart([b"starsd.telemetry.1"])
            socket_.send_multipart([b"starsd.telemetry.1", b'{"boot_id":"b","sequence":1,"uptime_s":2}'])

        assert until(feed, bool, publish)[0].snapshot.boot_id == "b"
        feed.close()


class TestLinkIsDown:
    def test_nothing_listens(self) -> None:
        feed = ZmqFeed([Source("desk", f"tcp://127.0.0.1:{free_port()}")])
        until(feed, lambda _: feed.links[0].state is LinkState.SERVER_DOWN)
        assert feed.probes == 1
        feed.close()

    def test_no_such_host(self) -> None:
        public, secret = zmq.curve_keypair()
        feed = ZmqFeed([Source("desk", "tcp://no-such-host.invalid:7731", WatchKeys(public, secret, public))])
        until(feed, lambda _: feed.links[0].state is LinkState.NO_ROUTE)
        feed.close()

    def test_the_draft_service_s_own_port_is_named_instead_of_the_monitor_s(
        self, context: zmq.Context[zmq.Socket[bytes]]
    ) -> None:
        """And once the right program answers there, it is watched."""
        other = context.socket(zmq.ROUTER)
        port = other.bind_to_random_port("tcp://127.0.0.1")
        feed = ZmqFeed([Source("desk", f"tcp://127.0.0.1:{port}")])
        until(feed, lambda _: feed.links[0].state is LinkState.OTHER_PROGRAM)
        other.close(0)
        publishers: list[SnapshotPublisher] = []

        def publish() -> None:
            with contextlib.suppress(ResourceError):  # the port is free a moment after it was closed
                publishers[:] = publishers or [SnapshotPublisher(context, f"tcp://127.0.0.1:{port}")]
                publishers[0].publish(SNAPSHOT)

        until(feed, bool, publish)
        feed.close()
        publishers[0].close()

    def test_another_program_that_greets_is_no_service_without_encryption(self) -> None:
        """As an SSH server does; to a watcher without keys and to one with them."""
        public, secret = zmq.curve_keypair()
        with socket.create_server(("127.0.0.1", 0)) as server:
            server.settimeout(0.0)
            endpoint = f"tcp://127.0.0.1:{server.getsockname()[1]}"
            feed = ZmqFeed([Source("a", endpoint), Source("b", endpoint, WatchKeys(public, secret, public))])

            def greet() -> None:
                with contextlib.suppress(BlockingIOError):
                    connection, _ = server.accept()
                    with connection:
                        connection.sendall(b"SSH-2.0-OpenSSH_9.2p1\r\nInvalid SSH identification string.\r\n")

            until(feed, lambda _: {link.state for link in feed.links} == {LinkState.OTHER_PROGRAM}, greet)
            feed.close()

    def test_packets_vanish(self) -> None:
        """As behind a firewall that drops: a listener whose queue is full answers no further connection."""
        with contextlib.ExitStack() as stack:
            full = stack.enter_context(socket.socket())
            full.bind(("127.0.0.1", 0))
            full.listen(0)
            for _ in range(4):
                waiting = stack.enter_context(socket.socket())
                waiting.setblocking(False)
                waiting.connect_ex(full.getsockname())
            feed = ZmqFeed([Source("desk", f"tcp://127.0.0.1:{full.getsockname()[1]}")])
            until(feed, lambda _: feed.links[0].state is LinkState.NO_ROUTE)
            feed.close()

    def test_the_service_stops_and_comes_back(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        endpoint = f"tcp://127.0.0.1:{free_port()}"
        first = SnapshotPublisher(context, endpoint)
        feed = ZmqFeed([Source("desk", endpoint)])
        until(feed, bool, lambda: first.publish(SNAPSHOT))
        first.close()
        until(feed, lambda _: feed.links[0].state is LinkState.SERVER_DOWN)
        second = SnapshotPublisher(context, endpoint)
        until(feed, bool, lambda: second.publish(SNAPSHOT))
        assert feed.links[0].state is LinkState.UP
        feed.close()
        second.close()

    def test_it_publishes_nothing(self, publisher: SnapshotPublisher) -> None:
        feed = ZmqFeed([Source("desk", publisher.endpoint)])
        until(feed, lambda _: feed.links[0].state is LinkState.HUNG)
        feed.close()

    def test_its_process_is_stopped_while_we_connect(self) -> None:
        """The kernel accepts, the program never answers: not to be taken for a wrong key."""
        program = (
            "import zmq, time\nsocket = zmq.Context().socket(zmq.XPUB)\n"
            "print(socket.bind_to_random_port('tcp://127.0.0.1'), flush=True)\ntime.sleep(60)"
        )
        child = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
        assert child.stdout is not None
        port = int(child.stdout.readline())
        os.kill(child.pid, signal.SIGSTOP)
        feed = ZmqFeed([Source("desk", f"tcp://127.0.0.1:{port}")])
        until(feed, lambda _: feed.links[0].state is LinkState.HUNG)
        feed.close()
        child.kill()
        child.wait()
        child.stdout.close()


class TestKeys:
    """CURVE with a real authenticator: a service that trusts one watcher."""

    @pytest.fixture
    def service(
        self, context: zmq.Context[zmq.Socket[bytes]], tmp_path: Path
    ) -> Iterator[tuple[SnapshotPublisher, bytes, WatchKeys]]:
        public, secret = zmq.curve_keypair()
        zmq.auth.create_certificates(tmp_path, "watcher")
        mine_public, mine_secret = zmq.auth.load_certificate(tmp_path / "watcher.key_secret")
        assert mine_secret is not None
        authenticator = ThreadAuthenticator(context)
        authenticator.start()
        authenticator.configure_curve(domain="monitor", location=str(tmp_path))
        publisher = SnapshotPublisher(context, "tcp://127.0.0.1:*", secret_key=secret, zap_domain=b"monitor")
        yield publisher, public, WatchKeys(mine_public, mine_secret, public)
        publisher.close()
        authenticator.stop()

    def test_a_trusted_watcher_sees_snapshots(
        self, service: tuple[SnapshotPublisher, bytes, WatchKeys]
    ) -> None:
        publisher, _, keys = service
        feed = ZmqFeed([Source("desk", publisher.endpoint, keys)])
        assert until(feed, bool, lambda: publisher.publish(SNAPSHOT))[0].snapshot == SNAPSHOT
        feed.close()

    def test_an_unknown_key_is_refused_and_named(
        self, service: tuple[SnapshotPublisher, bytes, WatchKeys]
    ) -> None:
        publisher, public, _ = service
        feed = ZmqFeed([Source("desk", publisher.endpoint, WatchKeys(*zmq.curve_keypair(), public))])
        arrivals = until(
            feed, lambda _: feed.links[0].state is LinkState.UNKNOWN_KEY, lambda: publisher.publish(SNAPSHOT)
        )
        feed.close()
        assert arrivals == []

    def test_one_that_is_trusted_no_more_is_cut_off_and_no_other(
        self, context: zmq.Context[zmq.Socket[bytes]]
    ) -> None:
        """ZeroMQ asks about a key once, in the handshake: a connection outlives the trust in it."""
        service, jet, laptop = (KeyPair.generate(name) for name in ("service", "jet1", "laptop"))
        trusted = {pair.key.public: pair.key.name for pair in (jet, laptop)}
        door = Authenticator(context, trusted.get)
        door.start()
        publisher = SnapshotPublisher(
            context, "tcp://127.0.0.1:*", secret_key=service.secret.encode(), zap_domain=ZAP_DOMAIN
        )
        gone, stays = (
            ZmqFeed([Source("desk", publisher.endpoint, watch_keys(pair, service))]) for pair in (jet, laptop)
        )
        for feed in (stays, gone):
            until(feed, bool, lambda: publisher.publish(SNAPSHOT))
        del trusted[jet.key.public]
        assert publisher.cut({jet.key.public}) == 1
        until(gone, lambda _: gone.links[0].state is LinkState.UNKNOWN_KEY)
        assert publisher.cut({jet.key.public}) == 0
        until(stays, bool, lambda: publisher.publish(SNAPSHOT))
        assert gone.poll(0) == []
        assert stays.links[0].state is LinkState.UP
        for each in (gone, stays, publisher):
            each.close()
        door.stop()

    def test_without_anybody_to_ask_nobody_watches(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        """By default a missing handler lets every key in."""
        public, secret = zmq.curve_keypair()
        publisher = SnapshotPublisher(context, "tcp://127.0.0.1:*", secret_key=secret, zap_domain=b"monitor")
        with context.socket(zmq.SUB) as watcher:
            watcher.linger = 0
            watcher.curve_publickey, watcher.curve_secretkey = zmq.curve_keypair()
            watcher.curve_serverkey = public
            ends = watcher.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
            watcher.connect(publisher.endpoint)
            assert ends.poll(PATIENCE_S * 1e3)
            assert monitor_event(ends.recv_multipart())[0] == zmq.EVENT_DISCONNECTED
            watcher.disable_monitor()
            ends.close(0)
        publisher.close()

    def test_another_service_at_the_address_is_told_apart(
        self, service: tuple[SnapshotPublisher, bytes, WatchKeys]
    ) -> None:
        publisher, _, keys = service
        other = WatchKeys(keys.public, keys.secret, zmq.curve_keypair()[0])
        feed = ZmqFeed([Source("desk", publisher.endpoint, other)])
        until(feed, lambda _: feed.links[0].state is LinkState.OTHER_SERVICE)
        feed.close()

    def test_the_draft_service_s_own_port_is_told_from_a_wrong_key(
        self, context: zmq.Context[zmq.Socket[bytes]], service: tuple[SnapshotPublisher, bytes, WatchKeys]
    ) -> None:
        """Of both the handshake of a watcher ends without a word."""
        _, _, trusted = service
        public, secret = zmq.curve_keypair()
        keys = WatchKeys(trusted.public, trusted.secret, public)
        other = WatchKeys(trusted.public, trusted.secret, zmq.curve_keypair()[0])
        with context.socket(zmq.ROUTER) as drafts:
            drafts.setsockopt(zmq.ZAP_DOMAIN, b"monitor")
            drafts.setsockopt(zmq.CURVE_SERVER, 1)
            drafts.setsockopt(zmq.CURVE_SECRETKEY, secret)
            endpoint = f"tcp://127.0.0.1:{drafts.bind_to_random_port('tcp://127.0.0.1')}"
            feed = ZmqFeed([Source("desk", endpoint, keys), Source("other", endpoint, other)])
            seen: list[set[LinkState]] = [set(), set()]

            def note() -> None:
                for states, link in zip(seen, feed.links, strict=True):
                    states.add(link.state)

            expected = [LinkState.OTHER_PROGRAM, LinkState.OTHER_SERVICE]
            until(feed, lambda _: [link.state for link in feed.links] == expected, note)
            feed.close()
        for states, state in zip(seen, expected, strict=True):
            assert states <= {LinkState.CONNECTING, state}

    def test_a_watcher_without_keys_gets_nothing(
        self, service: tuple[SnapshotPublisher, bytes, WatchKeys]
    ) -> None:
        publisher, _, _ = service
        feed = ZmqFeed([Source("desk", publisher.endpoint)])
        until(feed, lambda _: feed.links[0].state is LinkState.NOT_ENCRYPTED)
        feed.close()


def test_plaintext_off_this_machine_is_refused_on_both_ends(context: zmq.Context[zmq.Socket[bytes]]) -> None:
    with pytest.raises(UsageError, match="only encrypted"):
        SnapshotPublisher(context, "tcp://0.0.0.0:*")
    with pytest.raises(UsageError, match="encrypted link only"):
        Source("desk", "tcp://10.0.0.1:7731")


def test_a_port_that_is_taken_is_named(
    context: zmq.Context[zmq.Socket[bytes]], publisher: SnapshotPublisher
) -> None:
    with pytest.raises(ResourceError, match=publisher.endpoint):
        SnapshotPublisher(context, publisher.endpoint)


@pytest.mark.parametrize(
    "endpoint", ["tcp://desk", "tcp://:1", "tcp://desk:x", "tcp://desk:70000", "tcp://desk:0"]
)
def test_an_address_without_host_and_port_is_refused(endpoint: str) -> None:
    with pytest.raises(UsageError, match="names no host and port"):
        tcp_address(endpoint)
