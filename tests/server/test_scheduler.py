"""The scheduler under scripts of events: nobody idles, nobody starves, nobody takes more than allowed."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from starsd_edge.errors import LocalProtocolError
from starsd_edge.protocol.session_table import SessionKey
from starsd_server.scheduler import Scheduler
from starsd_server.scheduling import (
    Action,
    Admit,
    Arrive,
    Close,
    Drain,
    Drained,
    EngineFree,
    Event,
    Evict,
    EvictReason,
    Heard,
    Limits,
    Open,
    Phase,
    Policy,
    Refuse,
    RefuseReason,
    RunStep,
    StepEnded,
    Tick,
    Turn,
)

SMALL = Limits(max_sessions=4, device_sessions=3, step_rows=24, chunk_rows=8, device_rows_per_s=1e9)
WIDE = Limits(max_sessions=64, device_sessions=64, step_rows=4096, chunk_rows=64, device_rows_per_s=1e9)


def key(device: str, session: int = 0) -> SessionKey:
    return SessionKey(device, session)


class Desk:
    """A scheduler, and an engine that keeps to what it is told: trees take `levels` steps, and once they are
    done, `ahead` more."""

    def __init__(
        self, limits: Limits = WIDE, policy: Policy = Policy.BATCHED, levels: int = 3, ahead: int = 0
    ) -> None:
        self.scheduler = Scheduler(limits, ("head",), policy)
        self.step: tuple[Turn, ...] | None = None
        self.trees: list[SessionKey] = []
        self.steps = 0
        self.served_rows: dict[str, int] = {}
        self.rows: dict[SessionKey, int] = {}  # of every open session, run since it was opened
        self.rooted_at: dict[SessionKey, int] = {}  # how many of them its newest tree stands on
        self.growing: set[SessionKey] = set()  # whose tree is not done
        self._replaced: set[SessionKey] = set()  # closed or opened since the step began
        self._levels, self._limits, self._ahead = levels, limits, ahead
        self._ahead_left: dict[SessionKey, int] = {}  # steps that the session's newest tree may go on for
        self._arrived: set[SessionKey] = set()  # since the step began
        self.steps_ahead = 0
        self._left: dict[SessionKey, int] = {}
        self.open_keys: set[SessionKey] = set()

    def send(self, event: Event) -> list[Action]:
        """Tell it, and when the engine is free, say so: as the worker does after every batch of messages."""
        if isinstance(event, (Arrive, Close)):
            self._ahead_left.pop(event.key, None)
            self._arrived.add(event.key)
        actions = self.scheduler.handle(event)
        if self.step is None:
            actions += self.scheduler.handle(EngineFree())
        for action in actions:
            if isinstance(action, Admit):
                self.open_keys.add(action.key)
                self._forget(action.key)
                self.rows[action.key] = 0
            elif isinstance(action, Evict):
                self.open_keys.discard(action.key)
                self._left.pop(action.key, None)
                self._forget(action.key)
            elif isinstance(action, RunStep):
                assert self.step is None, "a step was started while one ran"
                self.step = action.turns
                self._replaced.clear()
                self._arrived.clear()
                self._check_ahead(action.turns)
        if isinstance(event, Close):
            self._forget(event.key)
        self._check()
        return actions

    def _forget(self, k: SessionKey) -> None:
        self.rows.pop(k, None)
        self._ahead_left.pop(k, None)
        self.rooted_at.pop(k, None)
        self.growing.discard(k)
        self._replaced.add(k)

    def _check(self) -> None:
        """What must hold after every event."""
        if self.step is None:
            assert self.scheduler.num_waiting == 0, "somebody waits and the engine idles"
            return
        keys = [turn.key for turn in self.step]
        assert len(keys) == len(set(keys)), "a session takes part twice"
        assert sum(turn.rows for turn in self.step) <= self._limits.step_rows
        for turn in self.step:
            assert 0 <= turn.rows <= self._limits.chunk_rows

    def _check_ahead(self, turns: tuple[Turn, ...]) -> None:
        """Trees go on by themselves, while nobody is ready, and none whose session has brought new rows."""
        if all(turn.phase is not Phase.AHEAD for turn in turns):
            return
        assert all(turn.phase is Phase.AHEAD for turn in turns), "a step of somebody else's had rows ahead"
        assert self.scheduler.num_waiting == 0, "a tree went on while somebody was ready"
        assert all(self._ahead_left[turn.key] > 0 for turn in turns), "an old tree went on"
        assert sum(turn.rows for turn in turns) <= max(self._limits.free_rows, turns[0].rows)
        self.steps_ahead += 1

    def end_step(self, failed: frozenset[SessionKey] = frozenset()) -> list[Action]:
        assert self.step is not None
        beams = []
        ahead: dict[SessionKey, int] = {}
        for turn in self.step:
            if turn.phase is Phase.AHEAD:
                beams.append(0)
                if self._ahead_left.get(turn.key, 0) > 1:
                    self._ahead_left[turn.key] -= 1
                    ahead[turn.key] = 5
                continue
            self.served_rows[turn.key.device] = self.served_rows.get(turn.key.device, 0) + turn.rows
            self._note(turn)
            if turn.starts_tree:
                self._left[turn.key] = self._levels
            beams.append(0)
            if turn.starts_tree or turn.phase is Phase.GROW:
                self._left[turn.key] = self._left.get(turn.key, 1) - 1
                if self._left[turn.key] > 0:
                    beams[-1] = 4
                elif turn.key in self.open_keys:
                    self.trees.append(turn.key)
                    self.growing.discard(turn.key)
                    if self._ahead and turn.key not in self._arrived:
                        self._ahead_left[turn.key] = self._ahead
                        ahead[turn.key] = 5
        self.step = None
        self.steps += 1
        return self.send(StepEnded(tuple(beams), failed, ahead))

    def _note(self, turn: Turn) -> None:
        """What a turn did for the session that asked for it."""
        k = turn.key
        if k in self._replaced:
            return
        if turn.phase is Phase.EXTEND:
            self.rows[k] += turn.rows
        if turn.starts_tree:
            self.rooted_at[k] = self.rows[k]
            self.growing.add(k)

    def open(self, *keys: SessionKey) -> None:
        for k in keys:
            (action, *_) = self.send(Open(k, "head", 0.0))
            assert isinstance(action, Admit)

    def round(self, k: SessionKey, rows: int = 2, now: float = 0.0) -> list[Action]:
        return self.send(Arrive(k, rows, True, now))


@st.composite
def scripts(draw: st.DrawFn) -> list[tuple[str, int]]:
    kinds = ["open", "round", "prompt", "close", "end", "end", "end", "fail", "tick"]
    return draw(st.lists(st.tuples(st.sampled_from(kinds), st.integers(0, 8)), max_size=60))


@dataclass
class Asked:
    """What an open session has asked for since it was opened: rows, and whether a tree on top of them."""

    rows: int = 0
    tree: bool = False


@settings(max_examples=150)
@given(scripts(), st.sampled_from(list(Policy)), st.sampled_from([0, 0, 1, 3]))
def test_no_script_makes_it_idle_overfill_or_forget(
    script: list[tuple[str, int]], policy: Policy, ahead: int
) -> None:
    """The desk checks its invariants after every event; in the end everything that was asked is served: every
    row of every session that is still open, and a whole tree on top of them where one was wanted."""
    desk, now = Desk(SMALL, policy, ahead=ahead), 0.0
    names = [key(f"device{i % 3}", i // 3) for i in range(9)]
    asked: dict[SessionKey, Asked] = {}
    for what, which in script:
        k, now = names[which], now + 1.0
        if what == "open" and k not in desk.open_keys:
            asked[k] = Asked()
            desk.send(Open(k, "head", now))
        elif what in ("round", "prompt") and k in desk.open_keys:
            rows, tree = (3, True) if what == "round" else (40, False)
            actions = desk.send(Arrive(k, rows, tree, now))
            assert not any(isinstance(action, Refuse) for action in actions)
            asked[k] = Asked(asked[k].rows + rows, tree)
        elif what == "close":
            desk.open_keys.discard(k)
            desk.send(Close(k))
        elif what == "end" and desk.step is not None:
            desk.end_step()
        elif what == "fail" and desk.step is not None:
            failed = desk.step[0].key
            desk.end_step(frozenset({failed}))
            asked[failed] = Asked(desk.rows.get(failed, 0))  # what it had queued is dropped
        elif what == "tick":
            desk.send(Tick(now))
        asked = {k: n for k, n in asked.items() if k in desk.open_keys}
    for _ in range(500):
        if desk.step is None:
            break
        desk.end_step()
    assert desk.step is None
    assert desk.scheduler.num_waiting == 0
    assert {k: asked[k].rows for k in desk.open_keys} == desk.rows
    for k in desk.open_keys:
        if asked[k].tree:
            assert asked[k].rows == desk.rooted_at[k]
            assert k not in desk.growing


def test_a_tree_goes_on_while_nobody_is_ready_and_waits_while_somebody_is() -> None:
    desk = Desk(levels=1, ahead=2)
    a, b = key("a"), key("b")
    desk.open(a, b)
    desk.round(a)
    desk.end_step()
    assert desk.step == (Turn(a, Phase.AHEAD, 5),)
    desk.send(Arrive(b, 2, True, 0.0))
    desk.end_step()
    assert desk.step is not None
    assert [(b, Phase.EXTEND)] == [(turn.key, turn.phase) for turn in desk.step]
    desk.end_step()
    assert desk.step == (Turn(a, Phase.AHEAD, 5), Turn(b, Phase.AHEAD, 5))
    desk.end_step()
    assert desk.step == (Turn(b, Phase.AHEAD, 5),)
    desk.end_step()
    assert desk.step is None


def test_new_rows_of_its_session_end_a_tree_that_goes_on() -> None:
    desk = Desk(levels=1, ahead=5)
    a = key("a")
    desk.open(a)
    desk.round(a)
    desk.end_step()
    desk.round(a)
    desk.end_step()
    assert desk.step is not None
    assert [Phase.EXTEND] == [turn.phase for turn in desk.step]
    assert desk.steps_ahead == 1


def test_rows_without_a_tree_end_one_that_waits_to_go_on() -> None:
    desk = Desk(levels=1, ahead=2)
    a, b = key("a"), key("b")
    desk.open(a, b)
    desk.round(a)
    desk.end_step()
    desk.round(b)
    desk.end_step()  # of a's first step ahead: its second one waits for b's
    desk.send(Arrive(a, 3, False, 0.0))
    desk.end_step()
    desk.end_step()
    assert desk.step == (Turn(b, Phase.AHEAD, 5),)


def test_what_costs_more_than_comes_free_does_not_go_on_together() -> None:
    desk = Desk(replace(WIDE, free_rows=9), levels=1, ahead=1)
    a, b = key("a"), key("b")
    desk.open(a, b)
    desk.round(a)
    desk.round(b)
    desk.end_step()
    desk.end_step()
    assert desk.step is not None
    assert len(desk.step) == 1


def test_a_session_that_becomes_ready_joins_the_very_next_step() -> None:
    desk = Desk()
    sessions = [key(f"d{i}") for i in range(8)]
    desk.open(*sessions)
    desk.round(sessions[0])
    for late in sessions[1:]:
        desk.round(late)  # while a step runs
        desk.end_step()
        assert desk.step is not None
        assert late in {turn.key for turn in desk.step}


def test_serial_finishes_one_tree_before_it_begins_the_next() -> None:
    desk = Desk(policy=Policy.SERIAL)
    sessions = [key(f"d{i}") for i in range(3)]
    desk.open(*sessions)
    for k in sessions:
        desk.round(k)
    seen = []
    while desk.step is not None:
        assert len(desk.step) == 1
        seen.append(desk.step[0].key)
        desk.end_step()
    assert [k for k in sessions for _ in range(3)] == seen
    assert sessions == desk.trees


def test_a_prompt_takes_one_chunk_of_a_step_and_holds_up_no_tree() -> None:
    """A prompt of 512 rows beside seven sessions that want trees: each gets one every three steps."""
    limits = Limits(max_sessions=8, step_rows=96, chunk_rows=32, device_rows_per_s=1e9)
    desk = Desk(limits)
    prompt, *others = [key(f"d{i}") for i in range(8)]
    desk.open(prompt, *others)
    desk.send(Arrive(prompt, 512, False, 0.0))
    desk.end_step()
    for _ in range(12):
        for k in others:
            if k not in {turn.key for turn in desk.step or ()} and desk.scheduler.num_waiting == 0:
                desk.round(k)
        desk.end_step()
    assert len(desk.trees) >= 7
    assert desk.served_rows[prompt.device] >= 12 * 32


def test_eight_greedy_sessions_cost_another_device_no_round() -> None:
    """When a step has no room for all, devices share by cost, not by sessions."""
    limits = Limits(max_sessions=16, device_sessions=8, step_rows=16, chunk_rows=8, device_rows_per_s=1e9)
    desk = Desk(limits)
    greedy = [key("greedy", i) for i in range(8)]
    modest = key("modest")
    desk.open(*greedy, modest)
    fair = Desk(limits)
    fair.open(greedy[0], modest)

    def rounds_of_modest(where: Desk, everyone: list[SessionKey], steps: int = 300) -> int:
        done = 0
        for k in everyone:
            where.round(k)
        for _ in range(steps):
            finished = len(where.trees)
            where.end_step()
            for k in where.trees[finished:]:
                done += k == modest
                where.round(k)
        return done

    with_one = rounds_of_modest(fair, [greedy[0], modest])
    assert rounds_of_modest(desk, [*greedy, modest]) >= 0.8 * with_one > 0


def test_beyond_the_rows_that_come_free_devices_share_a_step_evenly() -> None:
    """Eight sessions of one device do not make the step eight times as long for the one of another."""
    limits = Limits(max_sessions=16, device_sessions=8, free_rows=8, device_rows_per_s=1e9)
    desk = Desk(limits)
    greedy, modest = [key("greedy", i) for i in range(8)], key("modest")
    desk.open(*greedy, modest, key("third"))
    desk.round(key("third"))  # the engine is busy
    for k in (*greedy, modest):
        desk.round(k, rows=2)
    desk.end_step()
    assert desk.step is not None
    taking = [turn.key.device for turn in desk.step]
    assert (taking.count("modest"), taking.count("third")) == (1, 1)
    assert taking.count("greedy") == 1


def test_a_device_that_is_alone_fills_the_step() -> None:
    desk = Desk(Limits(max_sessions=16, device_sessions=8, free_rows=8, device_rows_per_s=1e9))
    greedy = [key("greedy", i) for i in range(8)]
    desk.open(*greedy)
    for k in greedy:
        desk.round(k)
    desk.end_step()
    assert desk.step is not None
    assert 8 == len(desk.step)


def test_an_idle_device_cannot_save_up_service() -> None:
    """Back from a pause it shares evenly; it does not catch up on the steps it missed."""
    limits = Limits(max_sessions=4, step_rows=8, chunk_rows=8, device_rows_per_s=1e9)
    desk = Desk(limits)
    busy, pausing = key("busy"), key("pausing")
    desk.open(busy, pausing)
    for _ in range(50):
        desk.send(Arrive(busy, 8, False, 0.0))
        while desk.step is not None:
            desk.end_step()
    before = dict(desk.served_rows)
    desk.send(Arrive(busy, 400, False, 0.0))
    desk.send(Arrive(pausing, 400, False, 0.0))
    for _ in range(40):
        desk.end_step()
    gained = {name: desk.served_rows.get(name, 0) - before.get(name, 0) for name in ("busy", "pausing")}
    assert abs(gained["busy"] - gained["pausing"]) <= 2 * limits.chunk_rows


SIZES_OF_ONE_TURN_A_STEP = [5, 6, 7, 8, 16, 24, 40]  # no two turns of these fit into a step of 8 rows


@given(st.lists(st.sampled_from(SIZES_OF_ONE_TURN_A_STEP), min_size=2, max_size=5), st.integers(20, 60))
def test_backlogged_devices_are_served_within_a_constant_of_each_other(sizes: list[int], steps: int) -> None:
    """Virtual token counters: whatever the sizes of their requests, the cost served differs by a bound."""
    limits = Limits(max_sessions=8, step_rows=8, chunk_rows=8, device_rows_per_s=1e9)
    desk = Desk(limits)
    sessions = [key(f"d{i}") for i in range(len(sizes))]
    desk.open(*sessions)
    for k, size in zip(sessions, sizes, strict=True):
        for _ in range(200):
            desk.send(Arrive(k, size, False, 0.0))
    cost = dict.fromkeys((k.device for k in sessions), 0)
    for _ in range(steps):
        assert desk.step is not None
        for turn in desk.step:
            cost[turn.key.device] += turn.rows + 8
        desk.end_step()
    assert max(cost.values()) - min(cost.values()) <= 2 * (limits.chunk_rows + 8)


def test_the_session_unused_for_longest_gives_up_its_slot() -> None:
    desk = Desk(SMALL)
    sessions = [key(f"d{i}") for i in range(4)]
    desk.open(*sessions)
    for now, k in enumerate((sessions[0], sessions[2], sessions[3]), start=1):
        desk.round(k, now=now)
        while desk.step is not None:
            desk.end_step()
    actions = desk.send(Open(key("new"), "head", 9.0))
    assert Evict(sessions[1], EvictReason.ROOM) in actions
    assert any(isinstance(action, Admit) for action in actions)


def test_a_busy_session_keeps_its_slot_and_the_new_one_is_told_when_to_retry() -> None:
    desk = Desk(SMALL)
    sessions = [key(f"d{i}") for i in range(4)]
    desk.open(*sessions)
    for k in sessions:
        desk.round(k)
    (refusal,) = desk.send(Open(key("new"), "head", 1.0))
    assert isinstance(refusal, Refuse)
    assert refusal.reason is RefuseReason.MEMORY
    assert refusal.retry_after_s > 0


def test_a_device_has_as_many_sessions_as_it_may() -> None:
    desk = Desk(SMALL)
    desk.open(*(key("d", i) for i in range(3)))
    (refusal,) = desk.send(Open(key("d", 3), "head", 0.0))
    assert isinstance(refusal, Refuse)
    assert refusal.reason is RefuseReason.SESSIONS


def test_a_device_that_brings_rows_too_fast_is_told_how_long_to_wait() -> None:
    limits = Limits(device_rows_per_s=10.0, rate_window_s=2.0)
    desk = Desk(limits)
    desk.open(key("d"))
    assert not any(isinstance(a, Refuse) for a in desk.round(key("d"), rows=20, now=0.0))
    (refusal,) = desk.round(key("d"), rows=5, now=0.1)
    assert isinstance(refusal, Refuse)
    assert refusal.reason is RefuseReason.RATE
    assert refusal.retry_after_s == pytest.approx(0.4)
    assert not any(isinstance(a, Refuse) for a in desk.round(key("d"), rows=5, now=0.5))


def test_a_silent_session_loses_its_slot_when_its_lease_is_over() -> None:
    desk = Desk(SMALL)
    desk.open(key("d"))
    assert [] == desk.send(Tick(59.0))
    assert [Evict(key("d"), EvictReason.IDLE)] == desk.send(Tick(61.0))


def test_one_that_is_heard_keeps_its_slot_until_another_needs_it() -> None:
    desk = Desk(SMALL)
    sessions = [key(f"d{i}") for i in range(4)]
    desk.open(*sessions)
    desk.send(Heard(sessions[0], 50.0))
    desk.send(Heard(key("nobody"), 50.0))
    assert sessions[1:] == [action.key for action in desk.send(Tick(61.0)) if isinstance(action, Evict)]
    assert [Evict(sessions[0], EvictReason.IDLE)] == desk.send(Tick(111.0))
    desk.open(*sessions)
    desk.round(sessions[1])
    desk.send(Heard(sessions[0], 112.0))
    assert Evict(sessions[0], EvictReason.ROOM) in desk.send(Open(key("new"), "head", 112.0))


def test_a_newer_request_overtakes_an_unstarted_tree_and_loses_no_rows() -> None:
    desk = Desk()
    one, other = key("a"), key("b")
    desk.open(one, other)
    desk.round(other)  # the engine is busy
    desk.round(one, rows=3)
    desk.round(one, rows=2)
    turns = []
    while desk.step is not None:
        turns += [turn for turn in desk.step if turn.key == one and turn.phase is Phase.EXTEND]
        desk.end_step()
    assert [(3, False), (2, True)] == [(turn.rows, turn.starts_tree) for turn in turns]
    assert 1 == desk.trees.count(one)


def test_draining_finishes_what_is_under_way_and_takes_nothing_new() -> None:
    desk = Desk()
    desk.open(key("d"))
    desk.round(key("d"))
    assert [] == desk.send(Drain())
    (refusal,) = desk.send(Open(key("e"), "head", 0.0))
    assert isinstance(refusal, Refuse)
    assert refusal.reason is RefuseReason.DRAINING
    last: list[Action] = []
    while desk.step is not None:
        last = desk.end_step()
    assert [Drained()] == last
    assert [key("d")] == desk.trees


def test_a_session_closed_within_a_step_is_gone_after_it() -> None:
    desk = Desk()
    desk.open(key("d"))
    desk.round(key("d"))
    desk.open_keys.discard(key("d"))
    desk.send(Close(key("d")))
    desk.end_step()
    assert desk.step is None
    assert 0 == desk.scheduler.num_sessions


def test_events_that_cannot_happen_are_our_own_bugs() -> None:
    desk = Desk()
    with pytest.raises(LocalProtocolError, match="not open"):
        desk.round(key("nobody"))
    with pytest.raises(LocalProtocolError, match="not running"):
        desk.scheduler.handle(StepEnded(()))
    desk.open(key("d"))
    with pytest.raises(LocalProtocolError, match="open already"):
        desk.send(Open(key("d"), "head", 0.0))
    desk.round(key("d"))
    with pytest.raises(LocalProtocolError, match="while a step runs"):
        desk.scheduler.handle(EngineFree())
