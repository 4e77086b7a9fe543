"""Trees that go on after they were answered: the growth against brute force, the engine against a tree that
was as large from the start, and the sessions around it."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import numpy as np
import pytest
from msgspec.structs import replace

from starsd_edge.decoding.tree import DraftTree
from starsd_edge.protocol.messages import Draft, Hints
from starsd_server.emulate.ahead import record_ahead
from starsd_server.emulate.trace import Conversation, Trace
from starsd_server.engine import Engine
from starsd_server.heads.ahead import AheadGrowth
from starsd_server.heads.grow import AheadLimits, GrowthLimits, TreeGrowth, add_level
from starsd_server.heads.head import HeadKind
from starsd_server.rows import Precision, RowHead
from starsd_server.scheduling import Limits
from starsd_server.step import Advanced, Extend, GoAhead, Grow, SessionRows, TreeReady, WorkItem

from .hand_queue import queued
from .heads import HIDDEN, VOCAB, random_head
from .test_engine import Player, Script, engine_of, play
from .test_sessions import Room, rows

WIDTH = 4
DEEPEST = 7  # tokens of a path that are tried
EVERYTHING = AheadLimits(max_nodes=24, rows=1000, width=WIDTH, steps=20)


def offered(seed: int, path: tuple[int, ...]) -> np.ndarray:
    """float32 [WIDTH]: log-probabilities of the tokens 0, 1, ... after a path, falling."""
    rng = np.random.default_rng([seed, *path, len(path)])
    return np.sort(np.log(rng.dirichlet(2.0 * np.ones(WIDTH))).astype(np.float32))[::-1]


def grown(seed: int, limits: GrowthLimits) -> tuple[TreeGrowth, dict[int, tuple[int, ...]]]:
    """A tree that is done, and the paths of its rows."""
    growth, paths = TreeGrowth(limits), [()]
    of_rows = {}
    while len(growth.beams):
        level = [()] if growth.depth == 0 else []
        if growth.depth:
            level = [
                (*paths[parent], token)
                for parent, token in zip(growth.beam_parents, growth.beam_tokens, strict=True)
            ]
        for path in level:
            of_rows[len(of_rows)] = path
        log_probs = np.stack([offered(seed, path) for path in level])
        tokens = np.tile(np.arange(WIDTH, dtype=np.int32), (len(level), 1))
        paths = level
        add_level([growth], log_probs, tokens)
    return growth, of_rows


def run_ahead(seed: int, growth: AheadGrowth, of_rows: dict[int, tuple[int, ...]]) -> None:
    while len(growth.beams):
        beams = growth.beams
        level = [(*of_rows[p], int(t)) for p, t in zip(beams.parents.tolist(), beams.tokens, strict=True)]
        assert [len(path) for path in level] == beams.depths.tolist()
        for path in level:
            of_rows[len(of_rows)] = path
        tokens = np.tile(np.arange(WIDTH, dtype=np.int32), (len(level), 1))
        growth.add(np.stack([offered(seed, path) for path in level]), tokens)


def paths_of(tokens: np.ndarray, parents: np.ndarray) -> list[tuple[int, ...]]:
    paths: list[tuple[int, ...]] = [()]
    for token, parent in zip(tokens.tolist(), parents.tolist(), strict=True):
        paths.append((*paths[parent], token))
    return paths[1:]


@pytest.mark.parametrize("seed", range(8))
def test_given_time_it_finds_the_likeliest_of_all_nodes(seed: int) -> None:
    """Against all paths: outcomes that the answered tree left out, and what follows them."""
    limits = GrowthLimits(max_nodes=4 + seed, top_k=3, steps=2, ahead=EVERYTHING)
    done, of_rows = grown(seed, limits)
    answered = done.finish()
    growth = AheadGrowth(EVERYTHING, *done.offers)
    run_ahead(seed, growth, of_rows)
    tree = growth.finish()
    scores: dict[tuple[int, ...], float] = {}
    for length in range(DEEPEST):
        for path in itertools.product(range(WIDTH), repeat=length):
            for token, score in enumerate(offered(seed, path).tolist()):
                scores[(*path, token)] = scores.get(path, 0.0) + score
    best = sorted(scores, key=lambda path: -scores[path])[: EVERYTHING.max_nodes - 1]
    assert max(map(len, best)) < DEEPEST
    found = paths_of(tree.tokens, tree.parents)
    assert set(best) == set(found)
    assert [pytest.approx(scores[path], abs=1e-5) for path in found] == tree.scores.tolist()
    assert set(paths_of(answered.tokens, answered.parents)) <= set(found)


def test_a_beam_sees_its_ancestors_and_itself() -> None:
    limits = GrowthLimits(max_nodes=8, top_k=3, steps=2, ahead=replace(EVERYTHING, rows=3))
    done, of_rows = grown(1, limits)
    growth = AheadGrowth(limits.ahead or EVERYTHING, *done.offers)
    for _ in range(4):
        known = len(of_rows)
        mine = [(*of_rows[p], int(t)) for p, t in zip(growth.beams.parents, growth.beams.tokens, strict=True)]
        seen = growth.blocked() == 0.0
        assert seen.shape == (len(mine), known - 1 + len(mine))
        for number, path in enumerate(mine):
            ancestors = {path[:length] for length in range(1, len(path))}
            assert {of_rows[row + 1] for row in np.flatnonzero(seen[number, : known - 1])} == ancestors
            assert np.flatnonzero(seen[number, known - 1 :]).tolist() == [number]
        for path in mine:
            of_rows[len(of_rows)] = path
        tokens = np.tile(np.arange(WIDTH, dtype=np.int32), (len(mine), 1))
        growth.add(np.stack([offered(1, path) for path in mine]), tokens)


# ---------------------------------------------------------------------------------------------------- engine

AHEAD = AheadLimits(max_nodes=80, rows=12, width=10, steps=5)
SHORT = GrowthLimits(max_nodes=8, top_k=4, steps=3, ahead=AHEAD)


def finished(engine: Engine, item: WorkItem) -> TreeReady:
    outcome = engine.step([item])[0]
    while isinstance(outcome, Advanced):
        outcome = engine.step([GoAhead(item.session) if item.session.ahead else Grow(item.session)])[0]
    assert isinstance(outcome, TreeReady)
    return outcome


def probabilities(tree: TreeReady) -> dict[tuple[int, ...], float]:
    return dict(zip(paths_of(tree.tokens, tree.parents), tree.probabilities.tolist(), strict=True))


@pytest.mark.parametrize("kind", list(HeadKind))
def test_nodes_drafted_ahead_have_the_probabilities_of_a_tree_that_was_as_large_at_once(
    kind: HeadKind,
) -> None:
    """Positions, features of the parents and what a row sees are those of any tree row."""
    script = Script.random(3, kind, rounds=1)
    n = script.cuts[0]
    engine = Engine(RowHead(random_head(kind), Precision.FLOAT32), 2, 512)
    whole = finished(
        engine,
        Extend(
            engine.reset(0), script.tokens[:n], script.features[:n], 0, GrowthLimits(400, top_k=10, steps=6)
        ),
    )
    session = engine.reset(1)
    first = finished(engine, Extend(session, script.tokens[:n], script.features[:n], 0, SHORT))
    assert first.ahead == len(session.ahead.beams) > 0  # type: ignore[union-attr]
    more = finished(engine, GoAhead(session))
    assert session.ahead is None
    assert engine.kv.length(session.slot) == session.committed == n
    known, found = probabilities(whole), probabilities(more)
    common = known.keys() & found.keys()
    assert len(common) > 50
    for path in common:
        assert math.isclose(known[path], found[path], rel_tol=1e-4)
    assert probabilities(first).keys() <= found.keys()
    assert (np.diff(more.probabilities) <= 0).all()


@dataclass
class Wanderer:
    """Lets a player's trees go on for as many steps as chance has it."""

    engine: Engine
    rng: np.random.Generator

    def after(self, session: SessionRows, outcome: object) -> None:
        if not isinstance(outcome, TreeReady) or not outcome.ahead:
            return
        for _ in range(int(self.rng.integers(0, 4))):
            if session.ahead is not None:
                self.engine.step([GoAhead(session)])


@pytest.mark.parametrize("precision", [Precision.INT8, Precision.FLOAT32])
def test_trees_are_the_same_bytes_whether_older_ones_went_on_or_not(precision: Precision) -> None:
    """Seven sessions in random company, some of whose trees go on for a while between the steps."""
    scripts = [Script.random(seed, HeadKind.EAGLE1) for seed in range(7)]
    alone: list[list[tuple[bytes, bytes, bytes]]] = []
    for script in scripts:
        player = Player(script, 0, replace(SHORT, ahead=None))
        play(engine_of(HeadKind.EAGLE1, precision), [player])
        alone.append(player.trees)
    engine, rng = engine_of(HeadKind.EAGLE1, precision), np.random.default_rng(5)
    wanderer = Wanderer(engine, rng)

    class Going(Player):
        def take(self, outcome: object) -> None:
            super().take(outcome)  # type: ignore[arg-type]
            wanderer.after(self.session, outcome)

    players = [Going(script, slot, SHORT) for slot, script in enumerate(scripts)]
    play(engine, players, rng)  # type: ignore[arg-type]
    assert alone == [player.trees for player in players]


def test_a_tree_that_its_slot_has_no_room_for_does_not_go_on() -> None:
    engine = Engine(RowHead(random_head(HeadKind.EAGLE1), Precision.FLOAT32), 1, 40)
    tokens, features = rows(0, 30)
    session = engine.reset(0)
    first = finished(engine, Extend(session, tokens, features, 0, GrowthLimits(3, 2, 1, ahead=AHEAD)))
    assert len(first.tokens) == 2
    assert first.ahead == 0
    assert session.ahead is None


# -------------------------------------------------------------------------------------------------- sessions

WANTED = Hints(max_nodes=6, ahead_nodes=60)


@pytest.fixture(params=[Engine, queued])
def room(request: pytest.FixtureRequest) -> Room:
    return Room(Limits(max_sessions=4), engine=request.param, ahead=True)


def test_what_was_drafted_ahead_follows_the_answer_and_goes_on_with_it(room: Room) -> None:
    edge = room.prompted("d")
    number = edge.update(*rows(1, 2), WANTED)
    room.settle()
    first, second = room.heard("d")
    assert isinstance(first, Draft)
    assert isinstance(second, Draft)
    assert (first.ahead, second.ahead) == (False, True)
    assert first.head == second.head
    assert first.head.round_id == number
    assert len(first.tokens) < len(second.tokens) <= 59
    assert len(second.tokens) > 30
    paths = set(paths_of(second.tokens, second.parents))
    assert set(paths_of(first.tokens, first.parents)) <= paths


@pytest.mark.parametrize("hints", [Hints(max_nodes=6), Hints(max_nodes=1, ahead_nodes=60)])
def test_nothing_is_drafted_ahead_that_was_not_asked_for(room: Room, hints: Hints) -> None:
    edge = room.prompted("d")
    edge.update(*rows(1, 2), hints)
    room.settle()
    assert [Draft] == [type(message) for message in room.heard("d")]
    assert room.sessions.recorder.engine.ahead_s == 0.0


def test_a_service_that_does_not_draft_ahead_answers_as_ever() -> None:
    room = Room(Limits(max_sessions=4))
    edge = room.prompted("d")
    edge.update(*rows(1, 2), WANTED)
    room.settle()
    assert [Draft] == [type(message) for message in room.heard("d")]


def test_the_next_rows_end_it_and_wait_for_no_more_than_the_step_under_way(room: Room) -> None:
    edge = room.prompted("d")
    edge.update(*rows(1, 2), WANTED)
    while not room.heard("d"):
        room.sessions.step(room.clock)
    assert room.sessions.begin(room.clock)  # a step ahead
    newer = edge.update(*rows(2, 2), Hints(max_nodes=6))
    room.sessions.finish(room.clock)
    room.sessions.answer()
    room.settle()
    (answer,) = room.heard("d")
    assert isinstance(answer, Draft)
    assert (answer.head.round_id, answer.ahead) == (newer, False)
    quiet = Room(Limits(max_sessions=4))
    other = quiet.prompted("d")
    other.update(*rows(1, 2), Hints(max_nodes=6))
    quiet.settle()
    quiet.heard("d")
    other.update(*rows(2, 2), Hints(max_nodes=6))
    quiet.settle()
    (same,) = quiet.heard("d")
    assert isinstance(same, Draft)
    assert (same.tokens.tolist(), same.parents.tolist()) == (answer.tokens.tolist(), answer.parents.tolist())


def test_a_session_that_leaves_during_a_step_ahead_harms_nobody(room: Room) -> None:
    edge, other = room.prompted("d"), room.prompted("e", seed=4)
    edge.update(*rows(1, 2), WANTED)
    while not room.heard("d"):
        room.sessions.step(room.clock)
    assert room.sessions.begin(room.clock)
    edge.leave()
    other.update(*rows(3, 2), Hints(max_nodes=6))
    room.settle()
    assert [] == room.heard("d")
    assert [Draft] == [type(message) for message in room.heard("e")]


def test_the_service_counts_how_often_the_outcome_was_foreseen(room: Room) -> None:
    edge = room.prompted("d")
    edge.update(*rows(1, 2), WANTED)
    room.settle()
    _, ahead = room.heard("d")
    assert isinstance(ahead, Draft)
    tree = DraftTree(
        np.array([0, *ahead.tokens], np.int32), np.array([-1, *ahead.parents], np.int32), ahead.head.base_len
    )
    inner = int(tree.parents[tree.depths == 2][0])
    foreseen = tree.tokens[tree.path(inner)[1:]]
    features = np.zeros((len(foreseen), 64), np.float16)
    edge.update(foreseen, features, WANTED)
    room.settle()
    engine = room.sessions.recorder.engine
    assert (engine.ahead_drafts, engine.ahead_hits) == (1, 1)
    room.heard("d")
    edge.update(*rows(9, 3), WANTED)
    assert (engine.ahead_drafts, engine.ahead_hits) == (2, 1)


# ------------------------------------------------------------------------------------------------- recording


def test_what_a_head_drafts_ahead_is_recorded_at_every_token_of_every_answer() -> None:
    rng = np.random.default_rng(7)
    conversations = tuple(
        Conversation(
            rng.integers(0, VOCAB, length).astype(np.int32),
            rng.standard_normal((length - 1, HIDDEN)).astype(np.float16),
            prompt_len,
        )
        for length, prompt_len in ((14, 9), (12, 4))
    )
    engine = Engine(RowHead(random_head(HeadKind.EAGLE1), Precision.FLOAT32), 2, 400)
    played = record_ahead(engine, Trace(conversations))
    for trace, conversation in zip(played, conversations, strict=True):
        count = len(conversation.tokens) - conversation.prompt_len
        assert (len(trace.answer), len(trace.trees), len(trace.ahead)) == (count, count, count)
        for length in range(conversation.prompt_len + 1, len(conversation.tokens) + 1):
            tree, ahead = trace.tree_after(length), trace.ahead_after(length)
            assert ahead is not None
            assert tree.base_len == ahead.base_len == length
            assert tree.tokens[0] == ahead.tokens[0] == trace.tokens[length - 1]
            assert len(ahead) > 2 * len(tree)
            assert set(children(tree)) & set(children(ahead))


def children(tree: DraftTree) -> list[int]:
    """Tokens right below the root."""
    return tree.tokens[tree.parents == 0].tolist()
