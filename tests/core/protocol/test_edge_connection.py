"""The edge's side of a session: what it sends, and how it gets over everything that can go wrong."""

from __future__ import annotations

import numpy as np
import pytest

from starsd_edge.decoding.roles import RoundHints
from starsd_edge.decoding.roles import Update as CommittedRows
from starsd_edge.errors import LocalProtocolError
from starsd_edge.protocol.codec import decode, encode
from starsd_edge.protocol.edge_events import TreeArrived
from starsd_edge.protocol.features import FeatureDtype, encode_rows
from starsd_edge.protocol.greeting import Identity
from starsd_edge.protocol.messages import (
    Busy,
    BusyReason,
    Draft,
    Error,
    ErrorCode,
    GoAway,
    Head,
    Hints,
    NeedPrefill,
    PrefillAck,
    Update,
)
from starsd_edge.protocol.server_connection import HeadOffer, ServiceOffer
from starsd_edge.protocol.session_table import SessionKey, SessionTable
from starsd_edge.protocol.states import EdgeState
from starsd_edge.protocol.telemetry import EdgeReport
from tests.core.protocol.pair import IDENTITY, WIDTH, Pair, Service, committed, offer, token_at, tokens

KEY = SessionKey("jet1", 5)
NO_ROWS = encode_rows(np.zeros((0, WIDTH), np.float32), FeatureDtype.FP16)


@pytest.fixture
def pair() -> Pair:
    """Joined, with a context of 11 tokens the service holds; its first tree is with the loop."""
    pair = Pair()
    pair.join()
    pair.edge.start(token_at(0), 0.0)
    pair.edge.update(committed(0, 10), 0.0)
    pair.step()
    pair.sent.clear()
    return pair


def expected_rows(count: int) -> list[tuple[int, int]]:
    return [(position, token_at(position + 1)) for position in range(count)]


def test_a_short_prompt_goes_out_in_one_breath_and_a_tree_comes_back() -> None:
    pair = Pair()
    pair.join()
    pair.edge.start(token_at(0), 0.0)
    pair.edge.update(committed(0, 10), 0.0)
    pair.step()
    assert pair.sent_kinds() == ["Hello", "Open", "Update"]
    assert pair.trees.popleft().tokens.tolist() == tokens(10, 14).tolist()
    assert pair.service.rows == expected_rows(10)


def test_a_long_prompt_goes_out_in_chunks_with_a_window() -> None:
    pair = Pair()
    pair.join()
    pair.edge.start(token_at(0), 0.0)
    pair.edge.update(committed(0, 300), 0.0)
    assert [type(decode(frames)).__name__ for frames in pair.edge.take_frames()] == [
        "Open",
        "Prefill",
        "Prefill",
    ]
    assert not pair.edge.drafter_state().ready
    assert "giving the service the context" in pair.edge.drafter_state().reason


def test_a_long_prompt_arrives_whole() -> None:
    pair = Pair()
    pair.join()
    pair.edge.start(token_at(0), 0.0)
    pair.edge.update(committed(0, 300), 0.0)
    pair.step()
    assert pair.sent_kinds() == ["Hello", "Open", *["Prefill"] * 4, "Update"]
    assert pair.service.rows == expected_rows(300)
    assert pair.edge.drafter_state().ready


def test_a_round_sends_only_its_own_rows(pair: Pair) -> None:
    pair.edge.update(committed(10, 14), 0.0)
    pair.step()
    (update,) = pair.sent
    assert isinstance(update, Update)
    assert (update.start, len(update.tokens), update.head.base_len) == (10, 4, 15)


def test_hints_travel_with_the_update(pair: Pair) -> None:
    hints = RoundHints(24, num_accepted=3, verify_nodes=16, verify_s=0.05, plain_s=0.02, wait_s=0.004)
    pair.edge.update(committed(10, 11, hints), 0.0)
    pair.step()
    (update,) = pair.sent
    assert isinstance(update, Update)
    sent = update.hints
    assert (sent.max_nodes, sent.num_accepted, sent.verify_nodes) == (24, 3, 16)
    assert (sent.verify_us, sent.plain_us, sent.wait_us) == (50_000, 20_000, 4_000)


AHEAD = RoundHints(24, ahead_nodes=100)


def ahead_of(pair: Pair, round_id: int, base_len: int, epoch: int = 1, first: int = 11) -> list[bytes]:
    """A tree drafted ahead, as the service would send it."""
    head = Head(5, 1, epoch, round_id, base_len, pair.edge._uplink.history.crc(base_len))
    return encode(Draft(head, tokens(first, first + 3), np.arange(3, dtype=np.int32), ahead=True))


def test_what_was_drafted_ahead_comes_behind_its_tree_and_holds_no_update_back(pair: Pair) -> None:
    pair.trees.clear()
    pair.edge.update(committed(10, 14, AHEAD), 0.0)
    pair.step()
    (update,) = pair.sent
    assert isinstance(update, Update)
    assert update.hints.ahead_nodes == 100
    first, more = pair.trees
    assert (len(first), len(more)) == (4, 6)
    assert first.base_len == more.base_len == 15
    assert more.first(4).tokens.tolist() == first.tokens.tolist()
    assert pair.edge.counters.ahead_trees == 1
    assert pair.edge.counters.stale_trees == 0
    pair.sent.clear()
    pair.edge.update(committed(14, 16), 0.0)
    pair.step()
    assert ["Update"] == pair.sent_kinds()


def test_what_was_drafted_ahead_of_a_round_that_is_past_is_dropped(pair: Pair) -> None:
    """It is the newest answered round's or nobody's: another one, another context, or no answer yet."""
    newest = pair.edge._uplink._round_id
    assert pair.edge.receive(ahead_of(pair, newest, 11), 0.0) != []
    for round_id, epoch in ((newest - 1, 1), (newest + 1, 1), (newest, 2)):
        assert [] == pair.edge.receive(ahead_of(pair, round_id, 11, epoch), 0.0)
    pair.edge.update(committed(10, 12), 0.0)
    pair.step()
    assert [] == pair.edge.receive(ahead_of(pair, newest, 11), 0.0)
    assert pair.edge.counters.violations == 0


def test_what_was_drafted_ahead_may_come_when_the_next_update_is_under_way(pair: Pair) -> None:
    """It is followed as far as the text went since, and answers nothing."""
    newest = pair.edge._uplink._round_id
    pair.edge.update(committed(10, 12), 0.0)
    (event,) = pair.edge.receive(ahead_of(pair, newest, 11), 0.0)
    assert isinstance(event, TreeArrived)
    assert event.ahead
    assert pair.edge.state is EdgeState.DRAFTING
    assert pair.edge.drafter_state().asked_len == 13
    pair.step()
    assert pair.edge.state is EdgeState.IDLE


def test_rows_committed_while_a_tree_is_under_way_leave_together(pair: Pair) -> None:
    """One outstanding round: overload limits itself, and no row is sent twice."""
    pair.service.hung = True
    for start in (10, 11, 12):
        pair.edge.update(committed(start, start + 1), 0.0)
    assert len(pair.edge.take_frames()) == 1
    pair.service.hung = False
    pair.wait(2.0)  # the first one was lost on the way: it is sent again, the same round
    assert pair.service.rows == expected_rows(11)
    pair.edge.update(committed(13, 14), 2.0)
    pair.step()
    assert pair.service.rows == expected_rows(14)
    assert pair.service.rows_received == 14


def test_a_late_tree_that_can_be_followed_is_kept_and_holds_the_next_update(pair: Pair) -> None:
    pair.trees.clear()
    pair.edge.update(committed(10, 11), 0.0)
    (late,) = pair.edge.take_frames()
    pair.edge.update(committed(11, 12), 0.0)
    for reply in pair.service.receive(late, 0.0):
        pair.obey(pair.edge.receive(reply, 0.0))
    tree = pair.trees.popleft()
    rest = tree.descend([token_at(12)])
    assert rest is not None
    assert rest.tokens.tolist() == tokens(12, 15).tolist()
    assert pair.edge.take_frames() == []


def test_a_late_tree_that_left_the_text_does_not_hold_the_next_update(pair: Pair) -> None:
    pair.trees.clear()
    pair.edge.update(committed(10, 11), 0.0)
    (late,) = pair.edge.take_frames()
    other = CommittedRows(11, np.array([999], np.int32), np.ones((1, WIDTH), np.float16))
    pair.edge.update(other, 0.0)
    for reply in pair.service.receive(late, 0.0):
        pair.obey(pair.edge.receive(reply, 0.0))
    assert pair.trees.popleft().descend([999]) is None  # the loop learns from it what drafts are worth
    assert pair.edge.counters.stale_trees == 1
    (update,) = [decode(frames) for frames in pair.edge.take_frames()]
    assert isinstance(update, Update)
    assert update.tokens.tolist() == [999]


def test_a_tree_for_a_context_that_is_gone_is_dropped(pair: Pair) -> None:
    pair.edge.update(committed(10, 11), 0.0)
    (late,) = pair.edge.take_frames()
    pair.trees.clear()
    pair.edge.start(7, 0.0)
    for reply in pair.service.receive(late, 0.0):
        pair.obey(pair.edge.receive(reply, 0.0))
    assert not pair.trees


def test_a_rollback_sends_only_from_where_the_context_changed(pair: Pair) -> None:
    pair.edge.rollback(6, 0.0)
    pair.edge.update(committed(5, 8), 0.0)
    pair.step()
    (update,) = pair.sent
    assert isinstance(update, Update)
    assert (update.start, len(update.tokens)) == (5, 3)
    assert pair.service.rows == expected_rows(8)


def test_a_restarted_service_is_greeted_and_given_the_context_again(pair: Pair) -> None:
    pair.restart_service()
    pair.edge.update(committed(10, 12), 0.0)
    pair.step()
    assert pair.sent_kinds() == ["Update", "Hello", "Open", "Update"]
    assert pair.service.rows == expected_rows(12)
    assert pair.trees[-1].base_len == 13


def test_an_evicted_session_is_given_the_context_again(pair: Pair) -> None:
    connection = pair.service.table.get(KEY)
    assert connection is not None
    connection.evicted()
    pair.service.rows.clear()
    pair.edge.update(committed(10, 12), 0.0)
    pair.step()
    assert pair.sent_kinds() == ["Update", "Open", "Update"]
    assert pair.service.rows == expected_rows(12)


def test_only_what_is_missing_is_sent_again() -> None:
    """A chunk is lost with its connection: what came before it is not sent a second time."""
    pair = Pair()
    pair.join()
    pair.edge.start(token_at(0), 0.0)
    pair.edge.update(committed(0, 300), 0.0)
    opening, first, second = pair.edge.take_frames()
    for frames in (opening, first):
        for reply in pair.service.receive(frames, 0.0):
            pair.obey(pair.edge.receive(reply, 0.0))
    del second  # lost
    pair.wait(60.0)
    assert pair.service.rows == expected_rows(300)
    assert pair.service.rows_received == 300


def test_a_broken_connection_goes_on_where_it_broke(pair: Pair) -> None:
    pair.obey(pair.edge.lost("connection lost", 0.0))
    assert pair.edge.drafter_state().reason == "connection lost"
    pair.edge.update(committed(10, 12), 0.0)
    pair.wait(1.0)
    assert pair.sent_kinds() == ["Hello", "Update"]
    assert pair.service.rows == expected_rows(12)
    assert pair.service.rows_received == 12


def test_a_lost_update_is_sent_again_as_the_same_round(pair: Pair) -> None:
    pair.lose_next = 1
    pair.edge.update(committed(10, 12), 0.0)
    pair.wait(2.5)
    first, again = pair.sent
    assert first.head == again.head
    assert pair.service.rows == expected_rows(12)
    assert pair.edge.counters.misses == 1


def test_a_lost_draft_is_asked_for_again_and_made_once(pair: Pair) -> None:
    pair.trees.clear()
    pair.edge.update(committed(10, 12), 0.0)
    (update,) = pair.edge.take_frames()
    pair.service.receive(update, 0.0)  # the reply is lost
    pair.wait(2.5)
    assert len(pair.trees) == 1
    assert pair.service.rows_received == 12


def test_a_service_that_stops_answering_opens_the_breaker_and_closes_it_again(pair: Pair) -> None:
    pair.service.hung = True
    pair.edge.update(committed(10, 12), 0.0)
    pair.wait(2.1)
    assert pair.edge.drafter_state().reason == "the draft service is late"
    pair.wait(4.1)
    assert pair.edge.last_outage == "the draft service stopped answering"
    pair.service.hung = False
    pair.wait(30.0)
    assert pair.edge.drafter_state().ready
    assert pair.service.rows == expected_rows(12)


def test_a_hung_service_is_noticed_while_nobody_types(pair: Pair) -> None:
    """A PING is answered by the scheduling loop, so a hung engine is known before the next prompt."""
    pair.service.hung = True
    pair.wait(30.0)
    assert not pair.edge.drafter_state().ready


def test_probes_get_rarer_but_never_stop() -> None:
    pair = Pair()
    pair.reachable = False
    probes = []
    pair.edge.tick(0.0)
    for _ in range(12):
        pair.edge.lost("nothing listens", pair.now_s)
        due_s = pair.edge.next_wake_s()
        assert due_s is not None
        probes.append(due_s - pair.now_s)
        pair.now_s = due_s
        pair.edge.tick(pair.now_s)
    assert probes == sorted(probes)
    assert (probes[0], probes[-1]) == (0.25, 10.0)


def test_busy_is_respected_and_what_was_refused_is_sent_later(pair: Pair) -> None:
    pair.edge.update(committed(10, 12), 0.0)
    (update,) = pair.edge.take_frames()
    message = decode(update)
    connection = pair.service.table.get(KEY)
    assert connection is not None
    connection.receive(message)
    pair.obey(pair.edge.receive(connection.send_busy(message.head.round_id, 500, BusyReason.RATE), 0.0))
    assert pair.edge.drafter_state().reason == BusyReason.RATE.text
    pair.wait(0.4)
    assert pair.sent == []
    pair.wait(0.2)
    assert pair.sent_kinds() == ["Update"]
    assert pair.service.rows == expected_rows(12)


def test_busy_to_a_greeting_is_greeted_again_later() -> None:
    pair = Pair()
    pair.service = Service(SessionTable(offer(), max_sessions_per_device=0))
    pair.join()
    assert "sessions" in pair.edge.drafter_state().reason
    pair.service = Service()
    pair.wait(8.0)
    assert pair.edge.drafter_state().ready


def test_a_service_that_leaves_finishes_rounds_takes_no_context_and_is_probed(pair: Pair) -> None:
    connection = pair.service.connection
    assert connection is not None
    pair.edge.receive(connection.send_goaway(3000), 0.0)
    pair.edge.update(committed(10, 11), 0.0)
    pair.step()
    assert pair.trees[-1].base_len == 12
    pair.edge.start(token_at(0), 0.0)
    pair.edge.update(committed(0, 4), 0.0)
    pair.step()
    assert pair.sent_kinds() == ["Update"]
    assert "about to stop" in pair.edge.drafter_state().reason
    pair.restart_service()
    pair.wait(5.0)
    assert pair.service.rows == expected_rows(4)


def test_a_head_that_does_not_fit_is_named_and_tried_rarely() -> None:
    other = Identity(**{f: getattr(IDENTITY, f) for f in IDENTITY.__struct_fields__} | {"hidden_size": 9})
    pair = Pair()
    pair.service = Service(SessionTable(ServiceOffer("b", "1", 1, (HeadOffer("h", other, 4000, 60),))))
    pair.join()
    assert pair.edge.state is EdgeState.REFUSED
    assert "hidden_size is 9 here and 8 there" in pair.edge.drafter_state().reason
    assert pair.edge.next_wake_s() == 30.0


def test_a_limit_of_the_service_ends_drafting_for_the_context_only(pair: Pair) -> None:
    pair.edge.receive(encode(Error(Head(5, 1), ErrorCode.LIMIT, "too much")), 0.0)
    assert pair.edge.drafter_state().reason == "this context is not drafted: too much"
    pair.edge.update(committed(10, 12), 0.0)
    pair.edge.update(committed(12, 13), 0.0)
    assert pair.edge.take_frames() == []
    pair.edge.start(token_at(0), 0.0)
    pair.edge.update(committed(0, 3), 0.0)
    pair.step()
    assert pair.edge.drafter_state().ready


def test_a_context_that_outgrows_the_history_is_decoded_plainly_until_it_is_cut() -> None:
    pair = Pair(max_history_bytes=20 * 2 * WIDTH)
    pair.join()
    pair.edge.start(token_at(0), 0.0)
    pair.edge.update(committed(0, 15), 0.0)
    pair.step()
    pair.edge.update(committed(15, 25), 0.0)
    pair.edge.update(committed(25, 26), 0.0)
    assert "history" in pair.edge.drafter_state().reason
    pair.edge.rollback(12, 0.0)
    pair.edge.update(committed(11, 13), 0.0)
    pair.step()
    assert pair.edge.drafter_state().ready
    assert pair.service.rows == expected_rows(13)


def test_a_context_longer_than_the_service_takes_is_not_sent() -> None:
    pair = Pair()
    pair.service = Service(SessionTable(offer(max_len=20)))
    pair.join()
    pair.edge.start(token_at(0), 0.0)
    pair.edge.update(committed(0, 30), 0.0)
    state = pair.edge.drafter_state()
    assert state.blocked
    assert "at most 20 tokens" in state.reason


def test_a_context_that_is_not_drafted_is_no_link_that_is_lost(pair: Pair) -> None:
    """And a link that is lost meanwhile says so."""
    pair.edge.receive(encode(Error(Head(5, 1), ErrorCode.LIMIT, "too much")), 0.0)
    assert pair.edge.drafter_state().blocked
    pair.edge.lost("no route", 0.0)
    state = pair.edge.drafter_state()
    assert (False, False, "no route") == (state.ready, state.blocked, state.reason)


def test_features_that_are_no_numbers_end_drafting_not_decoding(pair: Pair) -> None:
    broken = CommittedRows(10, tokens(11, 12), np.full((1, WIDTH), np.nan, np.float32))
    pair.edge.update(broken, 0.0)
    assert "NaN" in pair.edge.drafter_state().reason


def test_the_dtype_the_service_takes_is_used_for_the_history_too() -> None:
    """Rows kept as fp16 before the first WELCOME are sent as the service wants them."""
    pair = Pair(dtypes=["fp16", "int8"])
    head = HeadOffer("h", IDENTITY, 4000, 60, (FeatureDtype.INT8,))
    pair.service = Service(SessionTable(ServiceOffer("b", "1", 1, (head,))))
    pair.edge.start(token_at(0), 0.0)
    pair.edge.update(committed(0, 5), 0.0)
    pair.join()
    update = pair.sent[-1]
    assert isinstance(update, Update)
    assert update.features.dtype is FeatureDtype.INT8
    assert len(pair.service.rows) == 5


def test_rows_that_do_not_join_are_our_own_mistake(pair: Pair) -> None:
    with pytest.raises(LocalProtocolError, match="rows from position 15 on a context of 11"):
        pair.edge.update(committed(15, 16), 0.0)


@pytest.mark.parametrize(
    "reply",
    [
        PrefillAck(Head(5, 1, 1, 3, 12)),  # acknowledges a round that wants a tree
        Draft(Head(5, 1, 1, 3, 99), np.array([1], np.int32), np.array([0], np.int32)),
        NeedPrefill(Head(5, 1, 1, 77, 0)),
        Busy(Head(5, 1, 1, 77), 100),
        Busy(Head(6, 1, 1, 3), 100),  # another session's
        GoAway(Head(6, 1), 0),
        Update(Head(5, 1, 1, 3, 1), np.zeros(0, np.int32), NO_ROWS, Hints()),
    ],
    ids=lambda reply: type(reply).__name__,
)
def test_an_answer_to_nothing_we_asked_does_no_harm(pair: Pair, reply: object) -> None:
    pair.edge.update(committed(10, 11), 0.0)
    (update,) = pair.edge.take_frames()
    pair.edge.receive(encode(reply), 0.0)  # type: ignore[arg-type]  # a message, by the table above
    pair.trees.clear()
    for answer in pair.service.receive(update, 0.1):
        pair.obey(pair.edge.receive(answer, 0.1))
    pair.wait(10.0)
    assert pair.edge.drafter_state().ready
    assert pair.service.rows == expected_rows(11)


def test_a_service_that_keeps_forgetting_is_left_alone_for_a_while(pair: Pair) -> None:
    for _ in range(20):
        if pair.edge.state is EdgeState.IDLE:
            pair.edge.update(committed(10, 11), 0.0)
        for frames in pair.edge.take_frames():
            head = decode(frames).head
            if head.round_id:
                pair.edge.receive(encode(NeedPrefill(Head(5, 1, head.epoch, head.round_id, 0))), 0.0)
    assert pair.edge.state is EdgeState.DOWN
    assert "forgetting" in pair.edge.drafter_state().reason


def test_times_separate_link_from_service(pair: Pair) -> None:
    pair.edge.update(committed(10, 11), 0.0)
    (update,) = pair.edge.take_frames()
    (draft,) = pair.service.receive(update, 0.0)
    pair.edge.receive(draft, 0.010)
    assert pair.edge.times.last_link_s == pytest.approx(0.0097)
    assert pair.edge.times.last_dwell_s == pytest.approx(0.0003)
    assert pair.edge.drafter_state().expected_wait_s >= 0.0003


def test_a_report_leaves_while_there_is_a_link(pair: Pair) -> None:
    pair.edge.report(EdgeReport(edge_boot="x"))
    assert len(pair.edge.take_frames()) == 1
    pair.edge.lost("gone", 0.0)
    pair.edge.report(EdgeReport(edge_boot="x"))
    assert pair.edge.take_frames() == []


def test_closing_says_goodbye_and_nothing_more_happens(pair: Pair) -> None:
    pair.edge.close(0.0)
    pair.step()
    assert pair.sent_kinds() == ["Close"]
    assert pair.edge.next_wake_s() is None
    assert pair.service.table.get(KEY) is None
    assert pair.edge.receive(encode(GoAway(Head(5, 1), 0)), 0.0) == []


def test_a_tree_of_the_root_alone_holds_nothing_up(pair: Pair) -> None:
    pair.service.depth = 0
    pair.trees.clear()
    pair.edge.update(committed(10, 11), 0.0)
    pair.step()
    assert len(pair.trees.popleft()) == 1
    assert pair.edge.counters.stale_trees == 0
    pair.edge.update(committed(11, 12), 0.0)
    pair.step()
    assert pair.service.rows == expected_rows(12)


def test_a_service_slower_than_all_attempts_together_is_measured_in_the_end(pair: Pair) -> None:
    """It answers every message 7 s later, and three misses in a row are over after 6 s: without a patience
    that grows the edge would leave and greet it again for ever."""
    delay_s, on_the_way = 7.0, []
    pair.trees.clear()
    pair.edge.update(committed(10, 12), pair.now_s)
    for _ in range(4_000):
        for frames in pair.edge.take_frames():
            on_the_way.append((pair.now_s + delay_s, pair.connections, frames))
        while on_the_way and on_the_way[0][0] <= pair.now_s:
            _, connection, frames = on_the_way.pop(0)
            for reply in pair.service.receive(frames, pair.now_s):
                if connection == pair.connections:  # an answer to a connection that was left reaches nobody
                    pair.obey(pair.edge.receive(reply, pair.now_s))
        if pair.trees:
            break
        pair.now_s += 0.1
        pair.obey(pair.edge.tick(pair.now_s))
    assert pair.trees, pair.edge.drafter_state().reason
