"""RemoteDrafter over real sockets: what the decode loop sees when the link works, and when it does not."""

from __future__ import annotations

import signal
import socket
import threading
from collections.abc import Callable, Iterator

import pytest
import zmq

from starsd_edge.decoding.roles import RoundHints
from starsd_edge.decoding.tree import DraftTree
from starsd_edge.errors import ConfigError
from starsd_edge.link import edge_loop, watch
from starsd_edge.link.client import RemoteDrafter
from starsd_edge.link.keys import KeyPair
from starsd_edge.link.sockets import EdgeKeys, SyncSocket, receive_now, send_now
from starsd_edge.link.watch import Watch, poller_of
from starsd_edge.protocol.codec import Frames
from starsd_edge.protocol.head import peek
from starsd_edge.protocol.limits import EdgeTiming
from starsd_edge.protocol.messages import ErrorCode, MessageKind
from starsd_edge.protocol.states import EdgeState
from starsd_edge.protocol.telemetry import EdgeReport
from tests.core.link.loopback import LoopbackService
from tests.core.protocol.pair import committed, hello, token_at, tokens
from tests.ports import free_port

WAIT_S = 10.0
FAST = EdgeTiming(answer_s=0.2, chunk_s=1.0, ping_s=0.2, probe_first_s=0.05, probe_max_s=0.2)
SERVER, JET = KeyPair.generate("service"), KeyPair.generate("jet1")


@pytest.fixture
def closing() -> Iterator[Callable]:
    """Registers things to be closed, last first."""
    opened: list = []

    def register(thing):
        opened.append(thing)
        return thing

    yield register
    for thing in reversed(opened):
        thing.close() if isinstance(thing, RemoteDrafter) else thing.stop()


def next_tree(drafter: RemoteDrafter, base_len: int) -> DraftTree:
    """The tree on `base_len` tokens; older ones are passed over."""
    while True:
        tree = drafter.poll(WAIT_S)
        assert tree is not None, drafter.state()
        if tree.base_len == base_len:
            return tree


def until(drafter: RemoteDrafter, condition: Callable[[], bool]) -> None:
    with drafter._changed:
        assert drafter._changed.wait_for(condition, WAIT_S), drafter._connection.drafter_state()


def asking(service: LoopbackService, timing: EdgeTiming) -> RemoteDrafter:
    """Has had a tree on 9 tokens, and has asked for one on 13 of a service that hangs now."""
    drafter = RemoteDrafter(service.address, hello(), timing=timing)
    drafter.start(token_at(0))
    drafter.update(committed(0, 8))
    next_tree(drafter, 9)
    service.hang.set()
    drafter.update(committed(8, 12))
    return drafter


def test_rounds_over_a_plain_loopback_link(closing: Callable) -> None:
    service = closing(LoopbackService())
    drafter = closing(RemoteDrafter(service.address, hello()))
    drafter.start(token_at(0))
    drafter.update(committed(0, 200))
    assert next_tree(drafter, 201).tokens.tolist() == tokens(200, 204).tolist()
    for start in range(200, 260, 4):
        drafter.update(committed(start, start + 4))
        assert next_tree(drafter, start + 5).base_len == start + 5
    assert service.core.rows_received == 260
    assert drafter.stats().link_s > 0


def test_an_update_leaves_from_the_thread_that_brings_it(
    closing: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Waking the link's thread first would take longer than sending. What is late is that thread's business,
    as ever: the service hangs, and the same round is sent again while nobody polls."""
    senders: list[str] = []

    def noted(socket: SyncSocket, frames: Frames) -> None:
        if MessageKind.UPDATE == peek(frames[0]).kind:
            senders.append(threading.current_thread().name)
        send_now(socket, frames)

    monkeypatch.setattr(edge_loop, "send_now", noted)
    service = closing(LoopbackService())
    drafter = closing(RemoteDrafter(service.address, hello(), timing=FAST))
    drafter.wait_until_ready(WAIT_S)
    drafter.start(token_at(0))
    drafter.update(committed(0, 8))
    next_tree(drafter, 9)
    senders.clear()
    drafter.update(committed(8, 12))
    next_tree(drafter, 13)
    service.hang.set()
    drafter.update(committed(12, 16))
    until(drafter, lambda: drafter._connection.counters.misses > 0)
    service.hang.clear()
    next_tree(drafter, 17)
    assert [threading.current_thread().name] * 2 == senders[:2]
    assert "starsd-link" in senders


def test_a_tree_is_received_by_the_thread_that_waits_for_it(
    closing: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While nobody waits, by the link's. One tree of a round that has two is left to that thread, too."""
    receivers: list[tuple[MessageKind, str]] = []

    def noted(socket: SyncSocket) -> list[zmq.Frame]:
        frames = receive_now(socket)
        receivers.append((MessageKind(peek(frames[0].bytes).kind), threading.current_thread().name))
        return frames

    monkeypatch.setattr(edge_loop, "receive_now", noted)
    service = closing(LoopbackService())
    drafter = closing(RemoteDrafter(service.address, hello()))
    drafter.wait_until_ready(WAIT_S)
    drafter.start(token_at(0))
    drafter.update(committed(0, 8))
    until(drafter, lambda: bool(drafter._trees))
    assert receivers[-1] == (MessageKind.DRAFT, "starsd-link")
    service.hang.set()  # until somebody waits
    drafter.update(committed(8, 12, RoundHints(60, ahead_nodes=60)))
    next_tree(drafter, 9)
    receivers.clear()
    once_lent(drafter, service.hang.clear)
    assert [len(next_tree(drafter, 13)), len(next_tree(drafter, 13))] == [4, 6]
    assert receivers[0] == (MessageKind.DRAFT, threading.current_thread().name)
    drafter.update(committed(12, 16))
    assert next_tree(drafter, 17).base_len == 17


def test_one_poll_outlasts_a_service_that_is_killed_and_started_again(closing: Callable) -> None:
    """The dealer it waits on is closed meanwhile, and the tree comes through the next one."""
    service = LoopbackService()
    drafter = closing(asking(service, FAST))

    def restart() -> None:
        service.stop()
        until(drafter, lambda: not drafter._connection.drafter_state().ready)
        closing(LoopbackService(port=service.port, boot_id=2))

    once_lent(drafter, restart)
    assert next_tree(drafter, 13).base_len == 13
    assert drafter.stats().counters.outages == 1


def test_what_is_late_is_asked_for_again_while_somebody_waits_for_it(closing: Callable) -> None:
    """Time stays with the link's thread, whoever receives."""
    service = closing(LoopbackService())
    drafter = closing(asking(service, FAST))

    def serve_again() -> None:
        until(drafter, lambda: drafter._connection.counters.misses > 0)
        service.hang.clear()

    once_lent(drafter, serve_again)
    assert next_tree(drafter, 13).base_len == 13


def test_a_service_that_says_no_to_one_who_waits_is_left(closing: Callable) -> None:
    """What follows from a message beside a tree is the link's thread's, and done at once, however long that
    one would have slept."""
    longer = 1.5 * WAIT_S
    patient = EdgeTiming(answer_s=longer, chunk_s=longer, ping_s=longer)
    service = closing(LoopbackService())
    drafter = closing(asking(service, patient))
    service.refuse = ErrorCode.VERSION, "too old"
    once_lent(drafter, service.hang.clear)
    threading.Thread(target=drafter.poll, args=(WAIT_S,), daemon=True).start()
    until(drafter, lambda: drafter._connection.reason == "too old" and drafter._loop._dealer is None)


def test_a_tree_that_the_links_thread_was_quicker_to_take_ends_the_wait(
    closing: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may have touched the dealer, and so taken the notice, for a reason of its own."""
    monkeypatch.setattr(watch, "poller_of", lambda bell, dealer: poller_of(bell))
    monkeypatch.setattr(Watch, "_set_lent", lambda watch, lent: setattr(watch, "lent", lent))
    service = closing(LoopbackService())
    drafter = closing(RemoteDrafter(service.address, hello()))
    drafter.start(token_at(0))
    trees: list[DraftTree | None] = []
    polling = threading.Thread(target=lambda: trees.append(drafter.poll(600.0)), daemon=True)
    once_lent(drafter, lambda: drafter.update(committed(0, 8)))
    polling.start()
    polling.join(WAIT_S)
    assert [tree.base_len for tree in trees if tree is not None] == [9]


def test_two_threads_that_poll_both_get_a_tree(closing: Callable) -> None:
    service = closing(LoopbackService())
    drafter = closing(RemoteDrafter(service.address, hello()))
    drafter.wait_until_ready(WAIT_S)
    service.hang.set()
    drafter.start(token_at(0))
    drafter.update(committed(0, 8, RoundHints(60, ahead_nodes=60)))
    trees: list[DraftTree | None] = []
    polling = [threading.Thread(target=lambda: trees.append(drafter.poll(WAIT_S))) for _ in range(2)]
    for thread in polling:
        thread.start()
    once_lent(drafter, service.hang.clear).join(WAIT_S)
    for thread in polling:
        thread.join(WAIT_S)
    assert sorted(len(tree) for tree in trees if tree is not None) == [4, 6]


@pytest.mark.parametrize("connected", [True, False], ids=["connected", "not connected"])
def test_closing_ends_a_poll_that_waits(closing: Callable, *, connected: bool) -> None:
    address = closing(LoopbackService()).address if connected else "tcp://127.0.0.1:1"
    drafter = closing(RemoteDrafter(address, hello(), timing=EdgeTiming(probe_first_s=600.0)))
    until(drafter, lambda: drafter._connection.state is (EdgeState.IDLE if connected else EdgeState.DOWN))
    closed = once_lent(drafter, drafter.close)
    assert drafter.poll(600.0) is None
    closed.join(WAIT_S)
    assert drafter._loop._context.closed
    assert drafter.poll(600.0) is None


def test_an_interrupt_ends_a_poll_and_nothing_else(closing: Callable) -> None:
    service = closing(LoopbackService())
    drafter = closing(RemoteDrafter(service.address, hello()))
    drafter.start(token_at(0))
    drafter.update(committed(0, 8))
    next_tree(drafter, 9)
    once_lent(drafter, lambda: signal.pthread_kill(threading.main_thread().ident, signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        drafter.poll(WAIT_S)
    drafter.update(committed(8, 12))
    until(drafter, lambda: bool(drafter._trees))  # received by the link's thread again
    assert next_tree(drafter, 13).base_len == 13


def once_lent(drafter: RemoteDrafter, act: Callable[[], object]) -> threading.Thread:
    """Does `act` on a thread as soon as some other one waits in `poll`."""

    def wait_and_act() -> None:
        while not drafter._loop._watch.lent:
            threading.Event().wait(0.001)
        act()

    thread = threading.Thread(target=wait_and_act, daemon=True)
    thread.start()
    return thread


def test_rounds_over_an_encrypted_link(closing: Callable) -> None:
    service = closing(LoopbackService(SERVER, {JET.key.public: "jet1"}.get))
    drafter = closing(RemoteDrafter(service.address, hello(), EdgeKeys(JET, SERVER.key.public)))
    drafter.start(token_at(0))
    drafter.update(committed(0, 3))
    assert next_tree(drafter, 4).tokens.tolist() == tokens(3, 7).tolist()


def test_a_poll_without_time_does_not_wait_and_one_with_time_gives_up(closing: Callable) -> None:
    drafter = closing(RemoteDrafter("tcp://127.0.0.1:1", hello()))
    assert drafter.poll(0.0) is None
    assert drafter.poll(0.01) is None


@pytest.mark.parametrize(
    ("edge_keys", "trusted", "told"),
    [
        (EdgeKeys(JET, SERVER.key.public), {}, "does not know this device's key " + JET.key.fingerprint),
        (
            EdgeKeys(JET, KeyPair.generate("x").key.public),
            {JET.key.public: "jet1"},
            "does not hold the draft",
        ),
        (None, {}, "wants keys"),
    ],
    ids=["unknown key", "wrong key of the service", "no key"],
)
def test_a_refused_handshake_tells_which_key_is_wrong(
    closing: Callable, edge_keys: EdgeKeys | None, trusted: dict[str, str], told: str
) -> None:
    service = closing(LoopbackService(SERVER, trusted.get))
    drafter = closing(RemoteDrafter(service.address, hello(), edge_keys))
    until(drafter, lambda: told in drafter._connection.reason)
    assert not drafter.state().ready


def test_a_service_that_is_not_there_is_told_and_found_when_it_comes(closing: Callable) -> None:
    port = free_port()
    drafter = closing(RemoteDrafter(f"tcp://127.0.0.1:{port}", hello(), timing=FAST))
    drafter.start(token_at(0))
    drafter.update(committed(0, 5))
    until(drafter, lambda: "nothing listens" in drafter._connection.reason)
    closing(LoopbackService(port=port))
    assert next_tree(drafter, 6).tokens.tolist() == tokens(5, 9).tolist()


@pytest.mark.parametrize(
    ("address", "told"),
    [
        ("tcp://127.0.0.1:x", "tcp://127.0.0.1:x"),
        ("tcp://no-such-host.invalid:7700", "is not known to this network"),
    ],
)
def test_an_address_that_leads_nowhere_is_told(closing: Callable, address: str, told: str) -> None:
    drafter = closing(RemoteDrafter(address, hello(), EdgeKeys(JET, SERVER.key.public), timing=FAST))
    until(drafter, lambda: told in drafter._connection.reason)


def test_off_this_machine_there_is_no_plain_text() -> None:
    with pytest.raises(ConfigError, match="without keys"):
        RemoteDrafter("tcp://192.0.2.7:7700", hello())


def test_a_killed_and_restarted_service_gets_the_context_again(closing: Callable) -> None:
    service = LoopbackService()
    drafter = closing(RemoteDrafter(service.address, hello(), timing=FAST))
    drafter.start(token_at(0))
    drafter.update(committed(0, 200))
    next_tree(drafter, 201)
    service.stop()
    until(drafter, lambda: not drafter._connection.drafter_state().ready)
    drafter.update(committed(200, 203))
    again = closing(LoopbackService(port=service.port, boot_id=2))
    assert next_tree(drafter, 204).base_len == 204
    assert again.core.rows_received == 203
    assert drafter.stats().counters.outages == 1


def test_a_gateway_that_restarts_keeps_the_sessions(closing: Callable) -> None:
    """Another socket process, the same engine: the session goes on and not a row is sent twice."""
    service = LoopbackService()
    drafter = closing(RemoteDrafter(service.address, hello(), timing=FAST))
    drafter.start(token_at(0))
    drafter.update(committed(0, 200))
    next_tree(drafter, 201)
    service.stop()
    again = LoopbackService(port=service.port, table=service.core.table)
    closing(again)
    again.core.rows = service.core.rows
    drafter.update(committed(200, 203))
    next_tree(drafter, 204)
    assert again.core.rows_received == 3


def test_a_hung_service_is_noticed_and_left(closing: Callable) -> None:
    """Its sockets still answer heartbeats; its scheduling loop does not answer PING."""
    service = closing(LoopbackService())
    drafter = closing(RemoteDrafter(service.address, hello(), timing=FAST))
    assert drafter.wait_until_ready(WAIT_S).ready
    service.hang.set()
    until(drafter, lambda: drafter._connection.last_outage == "the draft service stopped answering")
    service.hang.clear()
    assert drafter.wait_until_ready(WAIT_S).ready


def test_a_listener_that_never_speaks_does_not_pass_for_a_service(closing: Callable) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"tcp://127.0.0.1:{silent.getsockname()[1]}"
        drafter = closing(RemoteDrafter(address, hello(), timing=FAST))
        drafter.start(1)
        assert drafter.poll(0.3) is None
        assert not drafter.state().ready


def test_a_services_monitor_port_is_told_not_to_be_its_service(closing: Callable) -> None:
    """Its socket ends the connection before the handshake: ZeroMQ tries no more, and calls it no failure."""
    with zmq.Context() as context, context.socket(zmq.XPUB) as publisher:
        port = publisher.bind_to_random_port("tcp://127.0.0.1")
        drafter = closing(RemoteDrafter(f"tcp://127.0.0.1:{port}", hello(), timing=FAST))
        until(drafter, lambda: "does not answer like a draft service" in drafter._connection.reason)
        assert not drafter.state().ready


def test_closing_ends_the_thread_and_tells_the_service(closing: Callable) -> None:
    service = closing(LoopbackService())
    before = threading.active_count()
    drafter = RemoteDrafter(service.address, hello())
    assert drafter.wait_until_ready(WAIT_S).ready
    drafter.close()
    drafter.close()
    assert threading.active_count() == before
    assert drafter.state().reason == "closed"
    for _ in range(500):
        if len(service.core.table) == 0:
            break
        threading.Event().wait(0.01)
    assert len(service.core.table) == 0


def test_a_drafter_that_is_closed_takes_whatever_comes_and_drafts_nothing(closing: Callable) -> None:
    """A decode loop under way may be a round behind whoever closed it."""
    service = closing(LoopbackService())
    drafter = RemoteDrafter(service.address, hello())
    drafter.start(token_at(0))
    drafter.update(committed(0, 20))
    next_tree(drafter, 21)
    drafter.close()
    drafter.update(committed(20, 24))
    assert drafter.poll(0.5) is None
    drafter.rollback(10)
    drafter.report(EdgeReport(edge_boot="boot"))
    drafter.start(token_at(0))
    drafter.update(committed(0, 20))
    assert drafter.poll(0.0) is None
