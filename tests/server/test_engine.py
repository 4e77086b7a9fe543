"""The engine's step: what a session gets does not depend on whom it shares the step with."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from starsd_server import rows
from starsd_server.engine import Engine
from starsd_server.heads.grow import GrowthLimits
from starsd_server.heads.head import HeadKind
from starsd_server.rows import Precision, RowHead
from starsd_server.step import Advanced, Extend, Grow, Outcome, Refused, SessionRows, TreeReady, WorkItem

from .heads import HIDDEN, VOCAB, random_head

LIMITS = GrowthLimits(max_nodes=24, top_k=6, steps=4)
MAX_LEN = 256
POISON = 7  # a token whose embedding no head can use
KINDS = list(HeadKind)
NETWORKS = {"graphs": Precision.INT8, "torch int8": Precision.INT8, "float32": Precision.FLOAT32}


@dataclass
class Script:
    """What one session sends: a prompt, then rounds of a few rows each."""

    tokens: np.ndarray
    features: np.ndarray
    cuts: list[int]  # row numbers at which a round ends; the first is the prompt's

    @classmethod
    def random(cls, seed: int, kind: HeadKind, rounds: int = 6) -> Script:
        rng = np.random.default_rng(seed)
        cuts = np.cumsum([rng.integers(1, 40), *rng.integers(1, 6, rounds)]).tolist()
        return cls(
            rng.integers(0, VOCAB, cuts[-1]).astype(np.int32),
            rng.standard_normal((cuts[-1], HIDDEN)).astype(np.float16),
            cuts,
        )


def engine_of(kind: HeadKind, precision: Precision = Precision.INT8, slots: int = 8) -> Engine:
    return Engine(RowHead(random_head(kind), precision), slots, MAX_LEN)


class Player:
    """Plays a script, one item per step, and collects the trees."""

    def __init__(self, script: Script, slot: int, limits: GrowthLimits = LIMITS) -> None:
        self.session = SessionRows(slot)
        self.trees: list[tuple[bytes, bytes, bytes]] = []
        self._script, self._round, self._limits = script, 0, limits

    def next_item(self) -> WorkItem | None:
        if self.session.growth is not None:
            return Grow(self.session)
        if self._round == len(self._script.cuts):
            return None
        start = self.session.committed
        rows = slice(start, self._script.cuts[self._round])
        self._round += 1
        return Extend(
            self.session, self._script.tokens[rows], self._script.features[rows], start, self._limits
        )

    def take(self, outcome: Outcome) -> None:
        if isinstance(outcome, TreeReady):
            self.trees.append(
                (outcome.tokens.tobytes(), outcome.parents.tobytes(), outcome.probabilities.tobytes())
            )
        else:
            assert isinstance(outcome, Advanced)


def play(engine: Engine, players: list[Player], rng: np.random.Generator | None = None) -> None:
    """Step until all scripts are done; `rng` draws who takes part in each step, and in which order."""
    waiting = [(p, item) for p in players if (item := p.next_item()) is not None]
    while waiting:
        chosen = waiting
        if rng is not None:
            order = rng.permutation(len(waiting))[: rng.integers(1, len(waiting) + 1)]
            chosen = [waiting[i] for i in order]
        for (player, _), outcome in zip(chosen, engine.step([item for _, item in chosen]), strict=True):
            player.take(outcome)
        served = {id(player) for player, _ in chosen}
        left = [(p, item) for p, item in waiting if id(p) not in served]
        waiting = left + [(p, item) for p, _ in chosen if (item := p.next_item()) is not None]


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("kind", KINDS)
def test_interleaved_sessions_draft_byte_for_byte_what_each_drafts_alone(
    kind: HeadKind, network: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seven sessions in steps of random company, against each in an engine of its own."""
    precision = NETWORKS[network]
    if network == "torch int8":
        monkeypatch.setattr(rows, "MAX_WEIGHTS", 0)
    scripts = [Script.random(seed, kind) for seed in range(7)]
    alone = []
    for script in scripts:
        player = Player(script, slot=0)
        play(engine_of(kind, precision), [player])
        alone.append(player.trees)
    engine = engine_of(kind, precision)
    together = [Player(script, slot) for slot, script in enumerate(scripts)]
    play(engine, together, np.random.default_rng(1))
    assert all(len(trees) == 7 for trees in alone)
    assert alone == [player.trees for player in together]


def test_a_reused_slot_shows_nothing_of_the_session_before() -> None:
    engine = engine_of(HeadKind.EAGLE1, slots=1)
    first, second = (Script.random(seed, HeadKind.EAGLE1) for seed in (1, 2))
    fresh = Player(second, slot=0)
    play(engine_of(HeadKind.EAGLE1, slots=1), [fresh])
    play(engine, [Player(first, slot=0)])
    engine.kv.truncate(0, 0)
    reused = Player(second, slot=0)
    play(engine, [reused])
    assert fresh.trees == reused.trees


def test_rows_that_replace_others_draft_as_if_those_had_never_been() -> None:
    """A rollback: rows from 10 on are sent again with other content."""
    engine = engine_of(HeadKind.EAGLE1)
    script, other = Script.random(3, HeadKind.EAGLE1), Script.random(4, HeadKind.EAGLE1)
    tokens = np.concatenate([script.tokens[:10], other.tokens[:5]])
    features = np.concatenate([script.features[:10], other.features[:5]])
    straight, detour = SessionRows(0), SessionRows(1)
    engine.step([Extend(straight, tokens[:10], features[:10], 0)])
    engine.step([Extend(detour, tokens[:10], features[:10], 0)])
    engine.step([Extend(detour, script.tokens[10:14], script.features[10:14], 10, LIMITS)])  # tree dropped
    last = [Extend(s, tokens[10:], features[10:], 10, GrowthLimits(7, 6, 0)) for s in (straight, detour)]
    one, two = engine.step(list(last))
    assert isinstance(one, TreeReady)
    assert isinstance(two, TreeReady)
    assert one.tokens.tolist() == two.tokens.tolist()
    assert one.probabilities.tobytes() == two.probabilities.tobytes()


def broken_items(session: SessionRows) -> dict[str, Extend]:
    tokens = np.arange(3, dtype=np.int32)
    features = np.zeros((3, HIDDEN), np.float16)
    poisoned = features.copy()
    poisoned[1, 5] = np.nan
    long = MAX_LEN + 1
    return {
        "NaN": Extend(session, tokens, poisoned, 0, LIMITS),
        "feature rows": Extend(session, tokens, features[:2], 0, LIMITS),
        "wide": Extend(session, tokens, np.zeros((3, 17), np.float16), 0, LIMITS),
        "limit": Extend(session, np.zeros(long, np.int32), np.zeros((long, HIDDEN), np.float16), 0, LIMITS),
        "vocabulary": Extend(session, tokens + VOCAB, features, 0, LIMITS),
        "the session holds": Extend(session, tokens, features, 9, LIMITS),
    }


@pytest.mark.parametrize("fault", ["NaN", "feature rows", "wide", "limit", "vocabulary", "the session holds"])
def test_a_session_that_sends_rubbish_is_refused_alone(fault: str) -> None:
    """The neighbour in the same step drafts the same bytes as without it."""
    script = Script.random(5, HeadKind.EAGLE1)
    alone = Player(script, slot=1)
    play(engine_of(HeadKind.EAGLE1), [alone])
    engine = engine_of(HeadKind.EAGLE1)
    neighbour = Player(script, slot=1)
    item = neighbour.next_item()
    assert item is not None
    bad = SessionRows(0)
    refused, outcome = engine.step([broken_items(bad)[fault], item])
    assert isinstance(refused, Refused)
    assert fault in refused.reason
    assert bad.committed == engine.kv.length(0) == 0
    neighbour.take(outcome)
    play(engine, [neighbour])
    assert alone.trees == neighbour.trees


@pytest.mark.parametrize("kind", list(HeadKind))
@pytest.mark.parametrize("alone", [True, False])
def test_rows_that_the_head_makes_no_number_of_are_refused_alone(kind: HeadKind, alone: bool) -> None:
    """Sound tokens and features, and a product that overflows; nobody else need be in the step."""
    head = random_head(kind)
    head.embedding[POISON] = np.inf
    engine = Engine(RowHead(head, Precision.FLOAT32), 2, MAX_LEN)
    tokens, features = np.array([3, POISON, 4], np.int32), np.ones((3, HIDDEN), np.float16)
    items: list[WorkItem] = [Extend(engine.reset(0), tokens, features, 0, LIMITS)]
    if not alone:
        items.append(Extend(engine.reset(1), tokens[:1], features[:1], 0, LIMITS))
    refused, *others = engine.step(items)
    assert isinstance(refused, Refused)
    assert "NaN" in refused.reason
    assert [Advanced] * len(others) == [type(outcome) for outcome in others]


def test_a_full_slot_ends_the_tree_and_not_the_service() -> None:
    """The tree's rows live behind the committed ones: with one row free, six beams do not fit."""
    engine = engine_of(HeadKind.EAGLE1)
    session = SessionRows(0)
    n = MAX_LEN - 1
    script = Script.random(6, HeadKind.EAGLE1, rounds=80)
    (outcome,) = engine.step([Extend(session, script.tokens[:n], script.features[:n], 0, LIMITS)])
    assert isinstance(outcome, TreeReady)
    assert len(outcome.tokens) > 0


def test_the_kv_budget_is_exactly_slots_times_rows() -> None:
    """64 sessions of 2,048 tokens: no page, no padding, no spare."""
    head = RowHead(random_head(HeadKind.EAGLE1), Precision.INT8)
    engine = Engine(head, slots=64, max_len=2048)
    row = engine.kv.row_bytes(head.config, head.dtype)
    assert row == 2 * 2 * 16 * 4
    assert engine.kv.num_bytes == 64 * 2048 * row


def test_a_tree_on_rows_that_are_held_needs_no_row() -> None:
    """An edge that reconnects asks for a tree on what the service holds: the same tree again."""
    engine = engine_of(HeadKind.EAGLE1)
    script = Script.random(7, HeadKind.EAGLE1)
    session = SessionRows(0)
    flat = GrowthLimits(6, 5, 0)
    none = np.empty(0, np.int32), np.empty((0, HIDDEN), np.float16)
    (first,) = engine.step([Extend(session, script.tokens[:9], script.features[:9], 0, flat)])
    other = SessionRows(1)
    again, _ = engine.step(
        [Extend(session, *none, 9, flat), Extend(other, script.tokens[:3], script.features[:3], 0)]
    )
    assert isinstance(first, TreeReady)
    assert isinstance(again, TreeReady)
    assert first.tokens.tolist() == again.tokens.tolist()
    assert first.probabilities.tobytes() == again.probabilities.tobytes()
    (cut_back,) = engine.step([Extend(session, *none, 5, flat)])
    assert isinstance(cut_back, TreeReady)
    assert len(cut_back.tokens) == 0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("levels", [1, 2, 3])
def test_a_tree_may_end_as_it_has_grown_so_far(kind: HeadKind, levels: int) -> None:
    """It is the tree that as many levels give, byte for byte, and the next round knows nothing of it."""
    script = Script.random(5, kind)
    short = Player(script, 0, GrowthLimits(LIMITS.max_nodes, LIMITS.top_k, levels - 1))
    whole, ended = Player(script, 0), Player(script, 0)
    for player in (short, whole):
        play(engine_of(kind), [player])
    engine, depth = engine_of(kind), 0
    while (item := ended.next_item()) is not None:
        (outcome,) = engine.step([item])
        depth = depth + 1 if isinstance(item, Grow) else 1
        # Every other tree is ended.
        if isinstance(outcome, Advanced) and outcome.beams and depth == levels and len(ended.trees) % 2 == 0:
            outcome = engine.narrow(ended.session, 2.0)
            assert isinstance(outcome, TreeReady)
        ended.take(outcome)
    assert ended.trees[::2] == short.trees[::2]
    assert ended.trees[1::2] == whole.trees[1::2]


def test_a_narrowed_level_runs_the_likeliest_of_its_rows() -> None:
    script = Script.random(6, HeadKind.EAGLE1)
    engine, player = engine_of(HeadKind.EAGLE1), Player(script, 0)
    (outcome,) = engine.step([item for item in [player.next_item()] if item is not None])
    assert isinstance(outcome, Advanced)
    assert player.session.growth is not None
    floor = float(player.session.growth.beam_probabilities[1])
    assert engine.narrow(player.session, floor) == Advanced(2)
    player.take(outcome)
    while not player.trees:
        item = player.next_item()
        assert item is not None
        (outcome,) = engine.step([item])
        player.take(outcome)
