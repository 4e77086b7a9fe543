"""The service's side of a session: at most once, and never on a prefix the edge does not have."""

from __future__ import annotations

import numpy as np
import pytest
from msgspec.structs import replace

from starsd_edge.decoding.prefix import prefix_crc
from starsd_edge.decoding.tree import DraftTree
from starsd_edge.errors import LocalProtocolError
from starsd_edge.protocol.codec import decode, encode
from starsd_edge.protocol.features import EncodedRows, FeatureDtype, encode_rows
from starsd_edge.protocol.greeting import HelloBody, Identity
from starsd_edge.protocol.messages import (
    Busy,
    BusyReason,
    Close,
    Draft,
    Error,
    ErrorCode,
    Head,
    Hello,
    Hints,
    Message,
    NeedPrefill,
    Open,
    Ping,
    Pong,
    Prefill,
    PrefillAck,
    Report,
    Update,
    Welcome,
)
from starsd_edge.protocol.server_connection import (
    Closed,
    Dropped,
    Greeted,
    HeadOffer,
    Opened,
    Pinged,
    Reply,
    Reported,
    RowsArrived,
    ServerConnection,
    ServerEvent,
    ServiceOffer,
    Violated,
)
from starsd_edge.protocol.session_table import SessionKey, SessionTable
from starsd_edge.protocol.states import ServerState
from starsd_edge.protocol.telemetry import EdgeReport
from tests.core.protocol.pair import drafted

WIDTH, VOCAB, BOOT = 8, 100, 77
IDENTITY = Identity(
    target="tiny",
    target_hash="aa",
    vocab_size=VOCAB,
    tokenizer_hash="bb",
    hidden_size=WIDTH,
    feature_size=WIDTH,
)
OFFER = ServiceOffer("bench", "0.1.0", BOOT, (HeadOffer("tiny-head", IDENTITY, max_len=200, max_nodes=60),))
TEXT = np.arange(1, 100, dtype=np.int32)  # the tokens of every context here


def hello(identity: Identity = IDENTITY, **changes: object) -> Hello:
    fields: dict[str, object] = {
        "identity": identity,
        "digest": identity.digest(),
        "device": "jet1",
        "software": "0.1.0",
        "dtypes": ["fp16"],
        "max_len": 200,
        "max_nodes": 60,
    }
    return Hello(Head(5), HelloBody(**{**fields, **changes}))  # type: ignore[arg-type]  # fields by name


def head(round_id: int, base_len: int, epoch: int = 1, boot_id: int = BOOT) -> Head:
    return Head(5, boot_id, epoch, round_id, base_len, prefix_crc(TEXT[:base_len]))


def rows(n: int, width: int = WIDTH) -> EncodedRows:
    return encode_rows(np.ones((n, width), np.float32), FeatureDtype.FP16)


def open_context(round_id: int = 1, epoch: int = 1) -> Open:
    return Open(head(round_id, 1, epoch), int(TEXT[0]))


def prefill(round_id: int, start: int, n: int) -> Prefill:
    return Prefill(head(round_id, start + n + 1), TEXT[start + 1 : start + n + 1], rows(n))


def update(round_id: int, start: int, n: int, **kwargs: int) -> Update:
    return Update(head(round_id, start + n + 1, **kwargs), TEXT[start + 1 : start + n + 1], rows(n), Hints())


def replies(events: list[ServerEvent]) -> list[Message]:
    return [decode(event.frames) for event in events if isinstance(event, Reply)]


def kinds(events: list[ServerEvent]) -> list[type]:
    return [type(event) for event in events]


@pytest.fixture
def opened() -> ServerConnection:
    """A session that holds 11 tokens of TEXT, in two messages."""
    connection = ServerConnection(5, OFFER)
    connection.receive(hello())
    connection.receive(open_context(1))
    connection.send_ack(1)
    connection.receive(prefill(2, 0, 10))
    connection.send_ack(2)
    return connection


def test_a_fitting_edge_is_welcomed_and_told_what_was_agreed() -> None:
    connection = ServerConnection(5, OFFER)
    events = connection.receive(hello(dtypes=["int4", "int8", "fp16"], max_nodes=24))
    (welcome,) = replies(events)
    assert isinstance(welcome, Welcome)
    assert (welcome.body.head, welcome.body.dtype, welcome.body.max_nodes) == ("tiny-head", "int8", 24)
    assert (welcome.head.boot_id, welcome.head.base_len) == (BOOT, 0)
    assert kinds(events) == [Reply, Greeted]


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"vocab_size": 101}, "vocab_size is 100 here and 101 there"),
        ({"target_hash": "cc"}, "target_hash is aa here and cc there"),
        ({"feature_layers": (2, 9, 15)}, "feature_layers"),
        ({"projection": "dd"}, "projection is none here and dd there"),
    ],
)
def test_an_edge_that_does_not_fit_is_refused_with_the_field(changes: dict[str, object], named: str) -> None:
    connection = ServerConnection(5, OFFER)
    identity = Identity(**{f: getattr(IDENTITY, f) for f in IDENTITY.__struct_fields__} | changes)
    (refused,) = replies(connection.receive(hello(identity)))
    assert isinstance(refused, Error)
    assert refused.code is ErrorCode.INCOMPATIBLE
    assert named in refused.text
    assert connection.state is ServerState.NEW


def test_a_head_or_dtype_that_is_not_there_is_named() -> None:
    (no_head,) = replies(ServerConnection(5, OFFER).receive(hello(head="other")))
    (no_dtype,) = replies(ServerConnection(5, OFFER).receive(hello(dtypes=["fp8"])))
    assert isinstance(no_head, Error)
    assert isinstance(no_dtype, Error)
    assert "no draft head 'other' is loaded; there is tiny-head" in no_head.text
    assert "fp8" in no_dtype.text


def test_rows_reach_the_scheduler_with_their_positions(opened: ServerConnection) -> None:
    (event,) = opened.receive(update(3, 10, 4))
    assert isinstance(event, RowsArrived)
    assert (event.start, event.base_len, event.tokens.tolist()) == (10, 15, TEXT[11:15].tolist())
    assert event.features.shape == (4, WIDTH)
    assert event.hints == Hints()


def test_a_draft_carries_the_round_the_prefix_and_the_dwell(opened: ServerConnection) -> None:
    opened.receive(update(3, 10, 1))
    tree = DraftTree(np.array([12, 40, 41], np.int32), np.array([-1, 0, 0], np.int32), 12)
    draft = decode(drafted(opened, 3, tree, 7, 8))
    assert isinstance(draft, Draft)
    assert (draft.tokens.tolist(), draft.parents.tolist()) == ([40, 41], [0, 0])
    assert (draft.queue_us, draft.draft_us, draft.head) == (7, 8, head(3, 12))


def test_the_same_round_again_gets_the_same_bytes_and_does_no_work(opened: ServerConnection) -> None:
    opened.receive(update(3, 10, 1))
    sent = drafted(opened, 3, DraftTree.root_only(12, 12), 0, 0)
    assert opened.receive(update(3, 10, 1)) == [Reply(sent), Dropped(event_kind(update(3, 10, 1)))]


def event_kind(message: Message) -> object:
    from starsd_edge.protocol.codec import kind_of

    return kind_of(message)


def test_the_same_round_while_its_tree_is_being_made_is_dropped(opened: ServerConnection) -> None:
    opened.receive(update(3, 10, 1))
    assert kinds(opened.receive(update(3, 10, 1))) == [Dropped]
    assert opened.wants(3)


def test_an_older_round_is_dropped_and_cuts_nothing(opened: ServerConnection) -> None:
    """A chunk drained from an old connection must not throw away what came after it."""
    opened.receive(update(3, 10, 4))
    assert kinds(opened.receive(prefill(2, 0, 10))) == [Dropped]
    assert opened.held_len == 15


def test_rows_behind_a_gap_are_answered_with_what_is_held(opened: ServerConnection) -> None:
    (need,) = replies(opened.receive(update(3, 14, 2)))
    assert isinstance(need, NeedPrefill)
    assert (need.head.base_len, need.head.prefix_crc, need.head.round_id) == (11, prefix_crc(TEXT[:11]), 3)
    assert isinstance(opened.receive(update(4, 10, 6))[0], RowsArrived)


def test_rows_that_begin_before_the_end_replace_what_was_there(opened: ServerConnection) -> None:
    """An edited or regenerated conversation sends only from where it differs."""
    (event,) = opened.receive(update(3, 4, 2))
    assert isinstance(event, RowsArrived)
    assert (event.start, opened.held_len) == (4, 7)


def test_another_prefix_is_not_drafted_on(opened: ServerConnection) -> None:
    wrong = update(3, 10, 2)
    (need,) = replies(opened.receive(replace(wrong, head=wrong.head._replace(prefix_crc=1))))
    assert isinstance(need, NeedPrefill)
    assert need.head.base_len == 0
    assert opened.state is ServerState.GREETED


@pytest.mark.parametrize("message", [open_context(9), update(9, 10, 1), prefill(9, 0, 3)])
def test_a_message_for_another_boot_learns_of_this_one(opened: ServerConnection, message: Message) -> None:
    old = replace(message, head=message.head._replace(boot_id=1))  # type: ignore[type-var]  # all have a head
    (need,) = replies(opened.receive(old))
    assert isinstance(need, NeedPrefill)
    assert need.head.boot_id == BOOT


def test_a_context_that_was_never_opened_here_is_asked_for_from_its_first_token(
    opened: ServerConnection,
) -> None:
    (need,) = replies(opened.receive(update(9, 10, 1, epoch=2)))
    assert isinstance(need, NeedPrefill)
    assert (need.head.base_len, need.head.epoch) == (0, 2)


def test_an_evicted_session_asks_for_everything_again(opened: ServerConnection) -> None:
    opened.evicted()
    (need,) = replies(opened.receive(update(3, 10, 1)))
    assert isinstance(need, NeedPrefill)
    assert need.head.base_len == 0


def test_a_new_connection_goes_on_where_the_old_one_broke(opened: ServerConnection) -> None:
    (welcome,) = replies(opened.receive(hello()))
    assert isinstance(welcome, Welcome)
    assert (welcome.head.epoch, welcome.head.base_len) == (1, 11)
    assert welcome.head.prefix_crc == prefix_crc(TEXT[:11])


def test_busy_takes_back_the_rows_it_refuses(opened: ServerConnection) -> None:
    opened.receive(update(3, 10, 4))
    busy = decode(opened.send_busy(3, 250, BusyReason.RATE))
    assert isinstance(busy, Busy)
    assert (busy.retry_after_ms, busy.reason, busy.head.base_len) == (250, BusyReason.RATE, 11)
    assert isinstance(opened.receive(update(4, 10, 4))[0], RowsArrived)


def test_busy_for_an_open_leaves_no_context(opened: ServerConnection) -> None:
    opened.receive(open_context(3, epoch=2))
    opened.send_busy(3, 250, BusyReason.MEMORY)
    assert (opened.state, opened.held_len) == (ServerState.GREETED, 0)


def test_a_newer_request_overtakes_the_tree_before_it(opened: ServerConnection) -> None:
    opened.receive(update(3, 10, 1))
    opened.receive(update(4, 11, 1))
    assert (opened.wants(3), opened.wants(4)) == (False, True)


def test_rows_that_replace_others_overtake_them(opened: ServerConnection) -> None:
    """An engine hangs, the edge plans its chunks anew again and again; all arrive when it goes on."""
    for number in range(3, 23, 2):
        assert isinstance(opened.receive(prefill(number, 10, 4))[0], RowsArrived)
        assert isinstance(opened.receive(prefill(number + 1, 14, 4))[0], RowsArrived)
    assert [number for number in range(3, 23) if opened.wants(number)] == [21, 22]


def test_more_requests_at_a_time_than_may_be_are_refused(opened: ServerConnection) -> None:
    for number in range(4):
        assert isinstance(opened.receive(prefill(3 + number, 10 + number, 1))[0], RowsArrived)
    (refused,) = replies(opened.receive(prefill(7, 14, 1)))
    assert isinstance(refused, Error)
    assert refused.code is ErrorCode.LIMIT
    assert opened.held_len == 15


def test_a_service_that_drains_takes_no_new_context_but_finishes_rounds(opened: ServerConnection) -> None:
    opened.send_goaway(5000)
    assert isinstance(opened.receive(update(3, 10, 1))[0], RowsArrived)
    (busy,) = replies(opened.receive(open_context(4, epoch=2)))
    assert isinstance(busy, Busy)
    assert busy.reason is BusyReason.DRAINING


@pytest.mark.parametrize(
    ("message", "why"),
    [
        (replace(update(3, 10, 1), tokens=np.array([VOCAB], np.int32)), "token 100; the vocabulary has 100"),
        (replace(update(3, 10, 2), features=rows(2, width=9)), "fp16 rows of 8 were agreed"),
        (
            replace(update(3, 10, 1), features=EncodedRows(FeatureDtype.FP16, 1, WIDTH, b"\x00\x7c" * WIDTH)),
            "NaN or infinite",
        ),
        (Pong(Head(5), 1), "PONG at the service in state opened"),
        (Update(head(3, 201), np.zeros(0, np.int32), rows(0), Hints()), "at most 200"),
    ],
)
def test_a_broken_rule_is_told_and_changes_nothing(
    opened: ServerConnection, message: Message, why: str
) -> None:
    events = opened.receive(message)
    (refused,) = replies(events)
    assert kinds(events) == [Reply, Violated]
    assert isinstance(refused, Error)
    assert why in refused.text
    assert (opened.state, opened.held_len) == (ServerState.OPENED, 11)


def test_a_report_is_passed_on_and_not_answered(opened: ServerConnection) -> None:
    report = EdgeReport(edge_boot="x")
    assert opened.receive(Report(Head(5), report)) == [Reported(report)]
    assert opened.state is ServerState.OPENED


def test_requests_without_end_are_bounded() -> None:
    connection = ServerConnection(5, OFFER)
    connection.receive(hello())
    connection.receive(open_context(1))
    for number in range(2, 5):
        connection.receive(prefill(number, (number - 2) * 3, 3))
    (refused,) = replies(connection.receive(prefill(5, 9, 3)))
    assert isinstance(refused, Error)
    assert refused.code is ErrorCode.LIMIT


def test_an_answer_nobody_waits_for_is_our_own_mistake(opened: ServerConnection) -> None:
    opened.receive(update(3, 10, 1))
    with pytest.raises(LocalProtocolError, match="no acknowledgement of round 3"):
        opened.send_ack(3)
    with pytest.raises(LocalProtocolError, match="no draft of round 9"):
        drafted(opened, 9, DraftTree.root_only(1, 12), 0, 0)
    with pytest.raises(LocalProtocolError, match="a tree on 5 tokens"):
        drafted(opened, 3, DraftTree.root_only(1, 5), 0, 0)


def test_ping_waits_for_the_loop_and_close_frees_the_session(opened: ServerConnection) -> None:
    assert opened.receive(Ping(Head(5), 42)) == [Pinged(42)]
    assert decode(opened.send_pong(42, 9)) == Pong(Head(5, BOOT), 42, 9)
    assert opened.receive(Close(Head(5))) == [Closed()]
    assert opened.held_len == 0


# ------------------------------------------------------------------------------------------ the table


def test_only_a_hello_takes_a_seat() -> None:
    table = SessionTable(OFFER)
    _, events = table.receive("jet1", update(1, 0, 1), 0.0)
    assert isinstance(replies(events)[0], NeedPrefill)
    assert table.receive("jet1", Ping(Head(5), 1), 0.0)[1] == [Pinged(1)]
    assert len(table) == 0
    table.receive("jet1", hello(), 0.0)
    assert list(table) == [SessionKey("jet1", 5)]


def test_one_device_cannot_reach_the_session_of_another() -> None:
    """The session id is the edge's own choice: it counts only together with the authenticated device."""
    table = SessionTable(OFFER)
    first, _ = table.receive("jet1", hello(), 0.0)
    first.receive(open_context(1))
    other, events = table.receive("jet2", update(2, 0, 1), 0.0)
    assert other is not first
    assert isinstance(replies(events)[0], NeedPrefill)
    table.receive("jet2", Close(Head(5)), 0.0)
    assert first.state is ServerState.OPENED


def test_a_device_has_a_bounded_number_of_sessions_and_old_ones_expire() -> None:
    table = SessionTable(OFFER, max_sessions_per_device=2)
    for session in range(2):
        table.receive("jet1", replace(hello(), head=Head(session)), 0.0)
    _, events = table.receive("jet1", replace(hello(), head=Head(9)), 1.0)
    (busy,) = replies(events)
    assert isinstance(busy, Busy)
    assert busy.reason is BusyReason.SESSIONS
    assert table.receive("jet2", hello(), 1.0)[0].state is ServerState.GREETED
    table.receive("jet1", Ping(Head(1), 1), 50.0)
    assert table.expire(61.5) == [SessionKey("jet1", 0), SessionKey("jet2", 5)]
    assert table.receive("jet1", replace(hello(), head=Head(9)), 62.0)[0].state is ServerState.GREETED


def test_a_revoked_device_loses_all_its_sessions() -> None:
    table = SessionTable(OFFER)
    connection, _ = table.receive("jet1", hello(), 0.0)
    assert table.drop_device("jet1") == [SessionKey("jet1", 5)]
    assert (connection.state, len(table)) == (ServerState.CLOSED, 0)


def test_a_table_that_drains_refuses_new_sessions() -> None:
    table = SessionTable(OFFER)
    table.receive("jet1", hello(), 0.0)
    table.drain()
    (busy,) = replies(table.receive("jet2", hello(), 0.0)[1])
    assert isinstance(busy, Busy)
    assert busy.reason is BusyReason.DRAINING


def test_every_reply_decodes_again_for_its_session(opened: ServerConnection) -> None:
    for event in [*opened.receive(hello()), *opened.receive(update(9, 50, 1))]:
        if isinstance(event, Reply):
            assert decode(event.frames).head.session == 5
    assert isinstance(decode(encode(PrefillAck(Head(5)))), PrefillAck)
    assert kinds(opened.receive(open_context(10, epoch=3))) == [Opened]
