"""The price of a saturated engine's time, and what is worth it."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from starsd_edge.protocol.session_table import SessionKey
from starsd_server.heads.grow import GrowthLimits, TreeGrowth, add_level
from starsd_server.scheduling import Phase, Turn
from starsd_server.sharing import Sharing, Trust

FREE_ROWS = 8


def trees(*rows: int) -> list[Turn]:
    """A step in which that many trees grow by these rows."""
    return [Turn(SessionKey(f"d{i}", 0), Phase.GROW, count) for i, count in enumerate(rows)]


def prompt(rows: int) -> Turn:
    return Turn(SessionKey("reading", 0), Phase.EXTEND, rows)


@dataclass
class Engine:
    """Steps of 1 ms and 1 ms more for every FREE_ROWS rows, one after the other or with pauses."""

    now: float = 0.0
    sharing: Sharing = field(default_factory=lambda: Sharing(FREE_ROWS))

    def step(self, turns: list[Turn], tokens: int = 0, pause_s: float = 0.0) -> float:
        seconds = 1e-3 * max(1.0, sum(turn.rows for turn in turns) / FREE_ROWS)
        self.now += seconds + pause_s
        if tokens:
            self.sharing.brought(tokens, self.now)
        return self.sharing.stepped(turns, seconds, self.now)

    def steps(self, count: int, turns: list[Turn], tokens: int = 0, pause_s: float = 0.0) -> float:
        """The last price."""
        return [self.step(turns, tokens, pause_s) for _ in range(count)][-1]


@st.composite
def steps(draw: st.DrawFn, most_rows: int, least_pause_s: float) -> list[tuple[list[Turn], int, float]]:
    """Trees and prompts as they come."""
    turns = st.lists(st.integers(0, most_rows), max_size=4).map(lambda rows: trees(*rows))
    reading = st.lists(st.integers(1, 64).map(prompt), max_size=2)
    step = st.tuples(turns, reading, st.integers(0, 5), st.floats(least_pause_s, 2.0))
    return [(grown + read, tokens, pause_s) for grown, read, tokens, pause_s in draw(st.lists(step))]


@given(steps(most_rows=64, least_pause_s=0.0))
def test_no_script_makes_a_price_that_is_none(script: list[tuple[list[Turn], int, float]]) -> None:
    """It is finite and not below zero, and nobody pays who has nobody beside."""
    engine = Engine()
    for turns, tokens, pause_s in script:
        price = engine.step(turns, tokens, pause_s)
        assert 0.0 <= price < float("inf")
        assert price == 0.0 or sum(turn.phase is Phase.GROW for turn in turns) > 1


@given(steps(most_rows=1, least_pause_s=0.0), steps(most_rows=64, least_pause_s=0.05))
def test_where_the_engine_has_room_nothing_has_a_price(
    few_rows: list[tuple[list[Turn], int, float]], many_pauses: list[tuple[list[Turn], int, float]]
) -> None:
    """Always busy with steps that carry their rows for nothing; or idle for most of the time."""
    for script in (few_rows, many_pauses):
        engine = Engine()
        assert not any(engine.step(turns, tokens, pause_s) for turns, tokens, pause_s in script)


def test_a_saturated_engine_sells_a_row_for_what_its_time_brings_elsewhere() -> None:
    """Steps of 32 rows take 4 ms and bring 2 tokens: a sixteenth of a token is what a row has to bring."""
    engine = Engine()
    assert engine.steps(2000, trees(16, 16), tokens=2) == pytest.approx(2 / 32, rel=0.01)


def test_a_prompt_beside_two_trees_saturates_nothing() -> None:
    assert Engine().steps(2000, [*trees(1, 1), prompt(60)], tokens=1) == 0.0


def test_narrow_trees_leave_it_saturated_and_fewer_sessions_do_not() -> None:
    """What was spared by narrow trees is no reason to widen them again, and to narrow them, and so on."""
    engine = Engine()
    engine.steps(2000, trees(16, 16), tokens=2)
    assert engine.steps(4000, trees(3, 3), tokens=1, pause_s=1e-3) > 2 / 32
    assert engine.steps(4000, trees(3, 3), tokens=1, pause_s=20e-3) == 0.0


# ------------------------------------------------------------------------------- what a price is good for


@st.composite
def offers(draw: st.DrawFn) -> list[np.ndarray]:
    """What the root of a small tree and its two children offer: two children each, likeliest first."""
    shape = st.tuples(st.sampled_from([0.9, 0.7, 0.5]), st.sampled_from([1.0, 0.4]))
    rows = [[first, (1.0 - first) * rest] for first, rest in draw(st.lists(shape, min_size=3, max_size=3))]
    return [np.log(rows[:1]).astype(np.float32), np.log(rows[1:]).astype(np.float32)]


IDS = np.arange(2, dtype=np.int32)


def rows_run(levels: list[np.ndarray], price: float) -> list[float]:
    """Probabilities of the rows that are run of a tree at that price, the root's left out."""
    growth = TreeGrowth(GrowthLimits(max_nodes=99, top_k=4, steps=2))
    run: list[float] = []
    for level in levels:
        rows = len(growth.beams)
        add_level([growth], level[:rows], np.tile(IDS, (rows, 1)))
        growth.narrow(price)
        if not len(growth.beams):
            break
        run += growth.beam_probabilities.tolist()
    return run


def all_ways(levels: list[np.ndarray]) -> list[list[float]]:
    """The rows of every way to run a tree: a row needs its parent, nothing else."""
    roots = np.exp(levels[0][0]).tolist()
    below = [(r * np.exp(levels[1][i])).tolist() for i, r in enumerate(roots)]
    ways: list[list[float]] = []
    for run in itertools.product([False, True], repeat=6):
        (a, b), *children = run[:2], run[2:4], run[4:]
        if all(parent or not any(own) for parent, own in zip((a, b), children, strict=True)):
            p = [*roots, *below[0], *below[1]]
            ways.append([value for value, ran in zip(p, run, strict=True) if ran])
    return ways


@settings(max_examples=60)
@given(st.lists(offers(), min_size=1, max_size=2), st.sampled_from([0.05, 0.17, 0.29, 0.41, 0.77, 1.5]))
def test_rows_run_at_a_price_are_worth_the_most_of_all_ways_to_share(
    sessions: list[list[np.ndarray]], price: float
) -> None:
    """Brute force over all ways to run the trees of all sessions together: tokens less what their time would
    bring elsewhere."""
    run = [p for levels in sessions for p in rows_run(levels, price)]
    best = max(
        sum(p - price for way in ways for p in way) for ways in itertools.product(*map(all_ways, sessions))
    )
    assert sum(run) - price * len(run) == pytest.approx(best, abs=1e-6)


@settings(max_examples=30)
@given(offers(), offers())
def test_a_saturated_engine_comes_to_bring_the_most_tokens_a_second(
    one: list[np.ndarray], other: list[np.ndarray]
) -> None:
    """Two sessions whose trees are all alike and an engine that is never idle: two rows that are needed
    anyway bring two tokens, and where the price settles no way to run the trees brings more a second."""
    engine, price = Engine(sharing=Sharing(free_rows=1)), 0.0
    for _ in range(4000):
        run = rows_run(one, price) + rows_run(other, price)
        rows = 2 + len(run)
        engine.now += rows * 1e-3
        engine.sharing.brought(2 + sum(run), engine.now)  # type: ignore[arg-type]  # on average
        price = engine.sharing.stepped(trees(1, rows - 1), rows * 1e-3, engine.now)
    reached = (2 + sum(run)) / rows
    best = max((2 + sum(a) + sum(b)) / (2 + len(a) + len(b)) for a in all_ways(one) for b in all_ways(other))
    assert reached >= 0.99 * best


# ------------------------------------------------------------------------------------------ a head's word


def test_a_new_session_is_believed() -> None:
    assert Trust().ratio == 1.0


@pytest.mark.parametrize(("brought", "ratio"), [(1, 0.5), (2, 1.0), (3, 1.5)])
def test_a_session_is_believed_as_far_as_its_trees_kept_their_word(brought: int, ratio: float) -> None:
    trust = Trust()
    for _ in range(500):
        trust.sent(2.0)
        trust.brought(brought)
    assert trust.ratio == pytest.approx(ratio, rel=0.01)


def test_a_round_without_a_tree_says_nothing_of_the_head() -> None:
    """Plain steps repeat what the round before accepted."""
    trust = Trust()
    trust.sent(2.0)
    for _ in range(100):
        trust.brought(2)
    assert trust.ratio == 1.0
