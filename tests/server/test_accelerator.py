"""A head that computes by itself, on a queue that is done when a test says so: the same drafts, and nothing
that the host asks in between."""

from __future__ import annotations

from dataclasses import dataclass, replace

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor

from starsd_edge.errors import UsageError
from starsd_edge.testing import FakeClock
from starsd_server import rows
from starsd_server.accelerator import CudaQueue, QueuedEngine
from starsd_server.config import ServiceConfig
from starsd_server.engine import Engine
from starsd_server.heads.candidates import candidates, candidates_by_key
from starsd_server.heads.grow import AheadLimits, GrowthLimits
from starsd_server.heads.head import HeadKind
from starsd_server.rows import Precision, RowHead
from starsd_server.step import (
    Advanced,
    Extend,
    GoAhead,
    Grow,
    Outcome,
    Refused,
    SessionRows,
    TreeReady,
    WorkItem,
)
from starsd_server.transfers import PinnedMemory
from starsd_server.worker import choose_precision

from .hand_queue import HandQueue, Launched, launched
from .heads import HIDDEN, random_head
from .test_engine import MAX_LEN, POISON, Player, Script, play

LIMITS = GrowthLimits(max_nodes=24, top_k=6, steps=4)
AHEAD = AheadLimits(max_nodes=80, rows=12, width=10, steps=5)
SHORT = GrowthLimits(max_nodes=8, top_k=4, steps=3, ahead=AHEAD)
KINDS = list(HeadKind)


def launched_of(kind: HeadKind, precision: Precision = Precision.FLOAT32, slots: int = 8) -> Launched:
    return launched(RowHead(random_head(kind), precision), slots, MAX_LEN)


def alone(kind: HeadKind, script: Script, precision: Precision = Precision.FLOAT32) -> Player:
    """Played by an engine of its own, in the caller's thread."""
    player = Player(script, slot=0)
    play(Engine(RowHead(random_head(kind), precision), 1, MAX_LEN), [player])
    return player


@pytest.mark.parametrize("precision", [Precision.FLOAT32, Precision.INT8])
@pytest.mark.parametrize("kind", KINDS)
def test_interleaved_sessions_draft_byte_for_byte_what_each_drafts_alone_without_a_queue(
    kind: HeadKind, precision: Precision
) -> None:
    """For every step the host waits once, and there is one copy up and one down."""
    scripts = [Script.random(seed, kind) for seed in range(7)]
    engine = launched_of(kind, precision)
    together = [Player(script, slot) for slot, script in enumerate(scripts)]
    play(engine, together, np.random.default_rng(1))  # type: ignore[arg-type]
    assert [alone(kind, script, precision).trees for script in scripts] == [p.trees for p in together]
    queue = engine.queue
    assert [engine.steps] * 3 == [queue.waits, queue.copies_up, queue.copies_down]


@pytest.mark.parametrize("kind", KINDS)
def test_half_precision_ties_are_broken_as_ever_by_keys_that_have_none(
    kind: HeadKind, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same steps in bfloat16, where most rows have equal logits among their best."""
    scripts = [Script.random(seed, kind) for seed in range(3)]
    played: list[list[list[tuple[bytes, bytes, bytes]]]] = []
    ties = []

    def counting(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
        best = logits.topk(count + 1, dim=-1).values
        ties.append(int((best[:, 1:] == best[:, :-1]).any(-1).sum()))
        return candidates_by_key(logits, count)

    for choose in (candidates, counting):
        monkeypatch.setattr(rows, "candidates", choose)
        players = [Player(script, slot) for slot, script in enumerate(scripts)]
        play(launched_of(kind, Precision.BFLOAT16), players)  # type: ignore[arg-type]
        played.append([player.trees for player in players])
    assert sum(ties) > 50
    assert played[0] == played[1]


def test_trees_that_go_on_go_on_to_the_same_bytes() -> None:
    """Until they are done, those of three sessions side by side."""
    scripts = [Script.random(seed, HeadKind.EAGLE1, rounds=1) for seed in range(3)]
    ended: list[list[TreeReady]] = []
    head = RowHead(random_head(HeadKind.EAGLE1), Precision.FLOAT32)
    for engine in (Engine(head, 3, MAX_LEN), launched(head, 3, MAX_LEN)):
        sessions = [SessionRows(slot) for slot in range(3)]
        items: list[WorkItem] = [
            Extend(session, script.tokens[: script.cuts[0]], script.features[: script.cuts[0]], 0, SHORT)
            for session, script in zip(sessions, scripts, strict=True)
        ]
        trees = []
        while items:
            trees += [o for o in engine.step(items) if isinstance(o, TreeReady)]
            items = [Grow(session) for session in sessions if session.growth is not None]
            items = items or [GoAhead(session) for session in sessions if session.ahead is not None]
        ended.append(trees)
    (tokens, queued_tokens), (scores, queued_scores) = (
        [[getattr(tree, name).tobytes() for tree in trees] for trees in ended]
        for name in ("tokens", "probabilities")
    )
    assert len(tokens) == 6
    assert tokens == queued_tokens
    assert scores == queued_scores


@pytest.mark.parametrize("kind", KINDS)
def test_rows_that_the_head_makes_no_number_of_are_refused_alone(kind: HeadKind) -> None:
    head = random_head(kind)
    head.embedding[POISON] = np.inf
    engine = launched(RowHead(head, Precision.FLOAT32), 2, MAX_LEN)
    tokens, features = np.array([3, POISON, 4], np.int32), np.ones((3, HIDDEN), np.float16)
    bad, good = engine.engine.reset(0), engine.engine.reset(1)
    refused, other = engine.step(
        [Extend(bad, tokens, features, 0, LIMITS), Extend(good, tokens[:1], features[:1], 0, LIMITS)]
    )
    assert isinstance(refused, Refused)
    assert "NaN" in refused.reason
    assert isinstance(other, Advanced)
    kv = engine.engine.engine.kv
    assert (0, 0, 1) == (bad.committed, kv.length(0), kv.length(1))


def test_a_step_with_no_row_to_run_ends_at_once() -> None:
    engine = launched_of(HeadKind.EAGLE1, slots=1)
    session = engine.engine.reset(0)
    too_far = Extend(session, np.zeros(1, np.int32), np.zeros((1, HIDDEN), np.float16), 9, LIMITS)
    engine.engine.launch([too_far])
    assert engine.engine.left_s() <= 0
    (refused,) = engine.engine.collect()
    assert isinstance(refused, Refused)


# ------------------------------------------------------------------------------- what happens meanwhile


@dataclass
class Pair:
    """Two sessions; a step with both of them is under way when the first is rewound."""

    engine: Launched
    first: Player
    second: Player

    @classmethod
    def of(cls, kind: HeadKind, limits: GrowthLimits) -> Pair:
        scripts = [Script.random(seed, kind) for seed in (1, 2)]
        players = [Player(script, slot, limits) for slot, script in enumerate(scripts)]
        return cls(launched_of(kind), *players)

    def step(self, *, meanwhile: int | None = None) -> Outcome:
        """With `meanwhile`, the first session is rewound to so many rows; what became of its item."""
        items = [item for p in (self.first, self.second) if (item := p.next_item()) is not None]
        self.engine.engine.launch(items)
        if meanwhile is not None:
            self.engine.engine.engine.rewind(self.first.session, meanwhile)
        self.engine.queue.happen()
        first, second = self.engine.engine.collect()
        self.second.take(second)
        return first


@pytest.mark.parametrize("kept", [0, 1])
@pytest.mark.parametrize("levels", [0, 1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_a_session_that_is_rewound_while_a_step_is_under_way_grows_no_tree(
    kind: HeadKind, levels: int, kept: int
) -> None:
    """Whichever level is under way. It drafts next what a session does that never had those rows, and the
    other one misses nothing."""
    pair = Pair.of(kind, LIMITS)
    for _ in range(levels):
        pair.first.take(pair.step())
    assert pair.step(meanwhile=kept) == Advanced(0)
    session, kv = pair.first.session, pair.engine.engine.engine.kv
    assert (kept, kept, None, None) == (
        session.committed,
        kv.length(session.slot),
        session.growth,
        session.output,
    )
    play(pair.engine, [pair.second])  # type: ignore[arg-type]
    script = Script.random(3, kind)
    first_rows = Script.random(1, kind)
    tokens = np.concatenate([first_rows.tokens[:kept], script.tokens[kept:]])
    features = np.concatenate([first_rows.features[:kept], script.features[kept:]])
    mixed = Script(tokens, features, script.cuts)
    again = Player(mixed, 0)
    again.session = session
    play(pair.engine, [again])  # type: ignore[arg-type]
    assert alone(kind, mixed).trees == again.trees
    assert alone(kind, Script.random(2, kind)).trees == pair.second.trees


def test_a_tree_that_goes_on_is_dropped_while_its_step_is_under_way() -> None:
    engine = launched_of(HeadKind.EAGLE1)
    script = Script.random(4, HeadKind.EAGLE1)
    session = engine.engine.reset(0)
    n = script.cuts[0]
    (outcome,) = engine.step([Extend(session, script.tokens[:n], script.features[:n], 0, SHORT)])
    while isinstance(outcome, Advanced):
        (outcome,) = engine.step([Grow(session)])
    assert isinstance(outcome, TreeReady)
    assert outcome.ahead
    engine.engine.launch([GoAhead(session)])
    engine.engine.engine.rewind(session, n)
    assert [Advanced(0)] == engine.engine.collect()
    assert n == engine.engine.engine.kv.length(0)
    player = Player(replace_cuts(script), 0)
    player.session = session
    play(engine, [player])  # type: ignore[arg-type]
    assert alone(HeadKind.EAGLE1, script).trees[1:] == player.trees


def replace_cuts(script: Script) -> Script:
    """What follows its prompt."""
    return replace(script, cuts=script.cuts[1:])


def test_a_slot_is_not_reset_under_a_step_that_writes_to_it() -> None:
    engine = launched_of(HeadKind.EAGLE1).engine
    script = Script.random(4, HeadKind.EAGLE1)
    engine.launch([Extend(engine.reset(0), script.tokens[:3], script.features[:3], 0)])
    engine.reset(1)
    with pytest.raises(AssertionError):
        engine.reset(0)
    engine.collect()
    assert 0 == engine.reset(0).committed


# -------------------------------------------------------------------------------------- what the host knows


def test_what_is_left_of_a_step_is_guessed_by_the_shortest_of_the_last_and_never_nothing() -> None:
    """When it was done is known however late the host looks."""
    clock = FakeClock()
    queue = HandQueue(clock=clock)
    engine, items = one_row_at_a_time(queue, clock)
    for step, item in enumerate(items[:12]):
        engine.launch([item])
        if step >= 8:
            assert engine.left_s() == pytest.approx(0.002)
        clock.advance(0.002 if step % 2 else 0.003)
        assert 0 < engine.left_s() <= 1e-6  # overdue
        queue.happen()
        clock.advance(0.001 * (step % 3))
        assert engine.left_s() == pytest.approx(-0.001 * (step % 3))
        clock.advance(0.001)
        assert engine.left_s() == pytest.approx(-0.001 * (step % 3 + 1))
        engine.collect()


def test_a_step_behind_another_heads_was_not_done_before_it_was_seen_not_to_be() -> None:
    """How long it took from its own beginning does not say when that was."""
    clock = FakeClock()
    queue = HandQueue(clock=clock, busy=True)
    engine, items = one_row_at_a_time(queue, clock)
    engine.launch(items[:1])
    clock.advance(0.004)
    assert engine.left_s() > 0
    clock.advance(0.001)
    queue.happen()
    assert engine.left_s() == pytest.approx(-0.001)


def one_row_at_a_time(queue: HandQueue, clock: FakeClock) -> tuple[QueuedEngine, list[WorkItem]]:
    """An engine and what to launch on it."""
    head = RowHead(random_head(HeadKind.EAGLE1), Precision.FLOAT32)
    engine = QueuedEngine(Engine(head, 1, MAX_LEN, PinnedMemory(queue)), queue, clock)
    session, script = engine.reset(0), Script.random(4, HeadKind.EAGLE1)
    return engine, [
        Extend(session, script.tokens[row : row + 1], script.features[row : row + 1], row)
        for row in range(len(script.tokens))
    ]


TOP_K = 6


def made_up(into: Tensor) -> None:
    """Scores of TOP_K children per row, as they come down: ids, then log-probabilities."""
    rows = len(into) // (TOP_K * 12)
    ids = torch.arange(TOP_K).repeat(rows)
    log_probs = -torch.arange(1, TOP_K + 1, dtype=torch.float32).repeat(rows)
    into.copy_(torch.cat([ids.view(torch.uint8), log_probs.view(torch.uint8)]))


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_in_a_launch_asks_the_accelerator_for_a_value(kind: HeadKind) -> None:
    """On a device whose memory cannot be read, and that refuses tensors of any other."""
    meta = torch.device("meta")
    head = RowHead(random_head(kind).to(meta), Precision.BFLOAT16)
    head.draft_to_target = torch.arange(head.config.draft_vocab_size)
    engine = launched(head, 3, MAX_LEN, HandQueue(meta, scores=made_up))
    ahead = AheadLimits(max_nodes=80, rows=12, width=TOP_K, steps=2)
    scripts = [Script.random(seed, kind) for seed in range(3)]
    players = [
        Player(script, slot, msgspec.structs.replace(LIMITS, ahead=ahead))
        for slot, script in enumerate(scripts)
    ]
    play(engine, players, np.random.default_rng(1))  # type: ignore[arg-type]
    assert [7] * 3 == [len(player.trees) for player in players]
    sessions = [player.session for player in players]
    while items := [GoAhead(session) for session in sessions if session.ahead is not None]:
        engine.step(list(items))
    empty = np.empty(0, np.int32), np.empty((0, HIDDEN), np.float16)
    again: list[WorkItem] = [Extend(s, *empty, s.committed, LIMITS) for s in sessions]
    assert [Advanced(TOP_K)] * 3 == engine.step(again)


@pytest.mark.parametrize("precision", ["int8", "float32"])
def test_a_precision_that_only_a_cpu_has_is_refused(precision: str) -> None:
    config = ServiceConfig(heads=(), bind="", folder="", device="cuda", precision=precision)
    with pytest.raises(UsageError, match="float16 or bfloat16"):
        choose_precision(config, torch.device("cuda"))
    assert Precision(precision) is choose_precision(config, torch.device("cpu"))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("kind", KINDS)
def test_a_gpu_drafts_from_a_queue_what_it_drafts_while_waited_for(kind: HeadKind) -> None:
    """Never run: no GPU was at hand."""
    cuda = torch.device("cuda", 0)
    head = RowHead(random_head(kind).to(cuda), Precision.FLOAT16)
    scripts = [Script.random(seed, kind) for seed in range(4)]
    played = []
    for by_itself in (False, True):
        queue = CudaQueue(cuda)
        engine = Engine(head, 4, MAX_LEN, PinnedMemory(queue))
        players = [Player(script, slot) for slot, script in enumerate(scripts)]
        play(OnGpu(QueuedEngine(engine, queue)) if by_itself else engine, players)  # type: ignore[arg-type]
        played.append([player.trees for player in players])
    assert played[0] == played[1]


@dataclass
class OnGpu:
    engine: QueuedEngine

    def step(self, items: list[WorkItem]) -> list[Outcome]:
        self.engine.launch(items)
        while self.engine.left_s() > 0:
            pass
        return self.engine.collect()
