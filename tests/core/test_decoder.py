"""The decode loop against every kind of drafter: the text is the target's own, whatever a drafter does."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from starsd_edge.decoding.costs import CostCurve
from starsd_edge.decoding.decoder import Committed, Decoder, Exactness, FinishReason
from starsd_edge.decoding.policy import AdaptivePolicy, FixedPolicy, PlainPolicy, Policy
from starsd_edge.decoding.roles import Invariance, TargetSpec
from starsd_edge.decoding.sampling import SamplingParams
from starsd_edge.errors import UsageError
from starsd_edge.metrics import RoundKind
from starsd_edge.testing import Behaviour, EmulatedTarget, FakeClock, ScriptedDrafter, ToyTarget, plain_text

FORWARD_S = 0.05
CURVE = CostCurve((1, 64), (FORWARD_S, 2 * FORWARD_S))
GREEDY = SamplingParams()
SAMPLED = SamplingParams(temperature=0.8, top_p=0.95, seed=11)
PENALISED = SamplingParams(temperature=0.7, repetition_penalty=1.2, frequency_penalty=0.1, seed=3)
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]

all_params = st.sampled_from([GREEDY, SAMPLED, PENALISED])


class TimedTarget(ToyTarget):
    """A toy target whose forwards take virtual time."""

    def __init__(self, clock: FakeClock, **options: float) -> None:
        super().__init__(**options)  # type: ignore[arg-type]  # ints and floats of a table
        self.clock = clock

    def forward(self, tree):  # type: ignore[no-untyped-def]  # as ToyTarget.forward
        self.clock.advance(CURVE(len(tree)))
        return super().forward(tree)


class Bench:
    """A decoder with everything around it in virtual time."""

    def __init__(
        self,
        policy: Policy | None = None,
        params: SamplingParams = GREEDY,
        behaviours: Sequence[Behaviour] = (Behaviour.PERFECT,),
        delays_s: Sequence[float] = (0.0,),
        drafting: bool = True,
        exactness: Exactness = Exactness.EXACT,
        **target_options: float,
    ) -> None:
        self.clock = FakeClock()
        self.target = TimedTarget(self.clock, **target_options)
        self.params = params
        self.drafter = ScriptedDrafter(
            oracle=lambda context, count: plain_text(self.target, params, context, count),
            clock=self.clock,
            behaviours=behaviours,
            delays_s=delays_s,
        )
        self.decoder = Decoder(
            self.target,
            self.drafter if drafting else None,
            policy or FixedPolicy(num_nodes=8),
            self.clock,
            exactness,
        )
        self.text = lambda context, count: plain_text(self.target, params, context, count)

    def rounds(self, prompt: list[int], count: int, stop_tokens: Sequence[int] = ()) -> list[Committed]:
        return list(self.decoder.generate(prompt, self.params, count, stop_tokens))

    def run(self, prompt: list[int], count: int, stop_tokens: Sequence[int] = ()) -> list[int]:
        return [token for round_ in self.rounds(prompt, count, stop_tokens) for token in round_.tokens]

    def assert_consistent(self) -> None:
        """Cache, prefix and drafter hold the same text: the root alone is not in the cache."""
        assert self.target.cache == self.decoder.prefix[:-1].tolist()
        told = len(self.drafter.context)
        assert self.drafter.context == self.decoder.prefix[:told].tolist()


@pytest.mark.parametrize("params", [GREEDY, SAMPLED, PENALISED])
@pytest.mark.parametrize("behaviour", list(Behaviour))
def test_no_drafter_changes_a_token(behaviour: Behaviour, params: SamplingParams) -> None:
    for policy in (FixedPolicy(8, max_wait_s=0.2), AdaptivePolicy(CURVE)):
        bench = Bench(policy, params, [behaviour], delays_s=[0.01, 0.12])
        assert bench.text(PROMPT, 40) == bench.run(PROMPT, 40)
        bench.assert_consistent()


def test_a_perfect_drafter_makes_rounds_of_its_whole_depth() -> None:
    bench = Bench()
    rounds = bench.rounds(PROMPT, 26)
    assert [1, 5, 5, 5, 5, 5] == [len(round_.tokens) for round_ in rounds]
    assert bench.decoder.stats.mean_acceptance_length == 5.0
    assert bench.decoder.stats.alpha(4) == 1.0


def test_without_a_drafter_the_loop_is_plain_decoding() -> None:
    bench = Bench(drafting=False)
    assert bench.text(PROMPT, 12) == bench.run(PROMPT, 12)
    assert bench.decoder.stats.plain_rounds == 11
    assert bench.drafter.num_updates == 0


def test_a_plain_policy_asks_nobody() -> None:
    bench = Bench(PlainPolicy())
    assert bench.text(PROMPT, 12) == bench.run(PROMPT, 12)
    assert bench.drafter.num_updates == 0


def test_a_drafter_with_nothing_to_propose_is_not_waited_for() -> None:
    """A tree of the root alone is an answer, and no other one is under way."""
    bench = Bench(FixedPolicy(8, max_wait_s=1.0), behaviours=[Behaviour.EMPTY], delays_s=[0.01])
    assert bench.text(PROMPT, 12) == bench.run(PROMPT, 12)
    assert bench.decoder.stats.waited_s == pytest.approx(11 * 0.01)


def test_a_late_tree_is_followed_along_the_tokens_committed_since() -> None:
    """The first tree arrives after two plain steps: its third and fourth tokens are still a draft."""
    policy = FixedPolicy(8, max_wait_s=0.0)
    bench = Bench(policy, delays_s=[1.5 * FORWARD_S, *[math.inf] * 20])
    rounds = bench.rounds(PROMPT, 12)
    assert [1, 1, 1, 3, 1] == [len(round_.tokens) for round_ in rounds[:5]]
    assert bench.decoder.stats.late == 1
    assert bench.text(PROMPT, 12) == [token for round_ in rounds for token in round_.tokens]


def test_a_late_tree_that_the_text_left_is_dropped_and_counted() -> None:
    policy = FixedPolicy(8, max_wait_s=0.0)
    bench = Bench(policy, behaviours=[Behaviour.WRONG], delays_s=[1.5 * FORWARD_S])
    bench.run(PROMPT, 12)
    assert bench.decoder.stats.stale > 0
    assert bench.decoder.stats.late == 0
    assert bench.decoder.stats.plain_rounds == bench.decoder.stats.rounds


@pytest.mark.parametrize("behaviour", [Behaviour.FOREIGN_ROOT, Behaviour.FUTURE, Behaviour.OUT_OF_VOCABULARY])
def test_a_tree_that_continues_nothing_is_refused_and_counted(behaviour: Behaviour) -> None:
    bench = Bench(behaviours=[behaviour])
    bench.run(PROMPT, 12)
    assert bench.decoder.stats.refused == bench.drafter.num_updates
    assert bench.decoder.stats.plain_rounds == bench.decoder.stats.rounds


def test_a_stop_token_inside_an_accepted_path_cuts_the_text_there() -> None:
    bench = Bench(levels=40)
    text = bench.text(PROMPT, 20)
    stop = text[7]
    expected = text[: text.index(stop) + 1]
    rounds = bench.rounds(PROMPT, 20, [stop])
    assert expected == [token for round_ in rounds for token in round_.tokens]
    assert rounds[-1].finish is FinishReason.STOP
    bench.assert_consistent()


@pytest.mark.parametrize("count", range(1, 14))
def test_max_tokens_are_counted_exactly(count: int) -> None:
    bench = Bench()
    rounds = bench.rounds(PROMPT, count)
    assert bench.text(PROMPT, count) == [token for round_ in rounds for token in round_.tokens]
    assert [None] * (len(rounds) - 1) + [FinishReason.LENGTH] == [round_.finish for round_ in rounds]
    bench.assert_consistent()


@pytest.mark.parametrize("max_len", range(len(PROMPT), len(PROMPT) + 9))
def test_a_full_context_ends_the_text_with_that_reason(max_len: int) -> None:
    """One token more than there are rows: the last one needs none."""
    bench = Bench(max_len=max_len)
    rounds = bench.rounds(PROMPT, 100)
    expected = bench.text(PROMPT, max_len - len(PROMPT) + 1)
    assert expected == [token for round_ in rounds for token in round_.tokens]
    assert rounds[-1].finish is FinishReason.CONTEXT_FULL


def test_the_next_turn_runs_only_what_is_new() -> None:
    bench = Bench()
    answer = bench.run(PROMPT, 9)
    following = [*PROMPT, *answer, 7, 7, 8]
    rounds = bench.rounds(following, 6)
    # The last token of the answer was never run, and the three new ones.
    assert rounds[0].stats.size == 4
    assert bench.text(following, 6) == [token for round_ in rounds for token in round_.tokens]
    bench.assert_consistent()


def test_an_edited_turn_runs_again_from_the_token_before_the_edit() -> None:
    """The drafter pairs the feature of that token with the first edited one."""
    bench = Bench()
    bench.run(PROMPT, 9)
    edited = [*PROMPT[:5], 20, 21]
    rounds = bench.rounds(edited, 6)
    assert rounds[0].stats.size == 3
    assert bench.text(edited, 6) == [token for round_ in rounds for token in round_.tokens]
    bench.assert_consistent()


def test_the_same_prompt_again_gives_the_same_text() -> None:
    bench = Bench(params=SAMPLED)
    first = bench.run(PROMPT, 15)
    rounds = bench.rounds(PROMPT, 15)
    assert first == [token for round_ in rounds for token in round_.tokens]
    assert rounds[0].stats.size == 1
    bench.assert_consistent()


class Interrupt(BaseException):
    """Stands for Ctrl-C, which may hit anywhere."""


@given(
    data=st.data(),
    params=all_params,
    behaviours=st.lists(st.sampled_from(Behaviour), min_size=1, max_size=5),
    delays_s=st.lists(st.sampled_from([0.0, 0.01, 0.06, 0.11, 0.3, math.inf]), min_size=1, max_size=5),
    policy=st.sampled_from(["fixed", "impatient", "adaptive"]),
)
@settings(max_examples=80, deadline=None)
def test_turns_cut_edited_abandoned_or_interrupted_keep_the_text_and_the_state(
    data: st.DataObject,
    params: SamplingParams,
    behaviours: list[Behaviour],
    delays_s: list[float],
    policy: str,
) -> None:
    """Several turns on one context, each ended in some way, with losses and late answers throughout."""
    policies: dict[str, Policy] = {
        "fixed": FixedPolicy(6),
        "impatient": FixedPolicy(6, max_wait_s=0.02),
        "adaptive": AdaptivePolicy(CURVE),
    }
    bench = Bench(policies[policy], params, behaviours, delays_s, vocab_size=32)
    context = list(PROMPT)
    for _ in range(data.draw(st.integers(1, 4), label="turns")):
        count = data.draw(st.integers(1, 20), label="count")
        end = data.draw(st.sampled_from(["whole", "abandoned", "interrupted"]), label="end")
        expected = bench.text(context, count)
        if end == "whole":
            assert expected == bench.run(context, count)
            bench.assert_consistent()
        elif end == "abandoned":
            rounds = bench.decoder.generate(context, params, count)
            got = next(rounds).tokens
            rounds.close()  # type: ignore[attr-defined]  # a generator
            assert expected[: len(got)] == got
            bench.assert_consistent()
        else:
            interrupt_somewhere(bench, data, context, count)
        keep = data.draw(st.integers(1, len(bench.decoder.prefix) or 1), label="keep")
        context = [
            *bench.decoder.prefix[:keep].tolist(),
            *data.draw(st.lists(st.integers(0, 31), max_size=4)),
        ]
        context = context or list(PROMPT)


def interrupt_somewhere(bench: Bench, data: st.DataObject, context: list[int], count: int) -> None:
    """Raise from one of the calls that the loop makes, before or after it took effect."""
    owner, name = data.draw(
        st.sampled_from(
            [
                (bench.target, "forward"),
                (bench.target, "keep"),
                (bench.target, "truncate"),
                (bench.target, "prefill"),
                (bench.drafter, "update"),
                (bench.drafter, "poll"),
                (bench.drafter, "rollback"),
            ]
        ),
        label="where",
    )
    after = data.draw(st.booleans(), label="after it took effect")
    calls_left = data.draw(st.integers(0, 5), label="calls before")
    original = getattr(owner, name)

    def call(*arguments: object) -> object:
        nonlocal calls_left
        calls_left -= 1
        if calls_left < 0 and not after:
            raise Interrupt
        result = original(*arguments)
        if calls_left < 0:
            raise Interrupt
        return result

    setattr(owner, name, call)
    try:
        bench.run(context, count)
    except Interrupt:
        pass
    finally:
        setattr(owner, name, original)


@given(
    delays_s=st.lists(st.floats(0.0, 0.4), min_size=1, max_size=6),
    # A huge tree is deeper than `depth`, and what that may bring is worth longer waits.
    behaviours=st.lists(
        st.sampled_from(sorted(set(Behaviour) - {Behaviour.HUGE}, key=str)), min_size=1, max_size=4
    ),
    depth=st.integers(1, 8),
)
@settings(max_examples=60, deadline=None)
def test_no_round_waits_longer_than_a_perfect_tree_would_be_worth(
    delays_s: list[float], behaviours: list[Behaviour], depth: int
) -> None:
    """A tree of depth d settles d + 1 tokens at most: waiting longer than d plain steps cannot pay."""
    bench = Bench(AdaptivePolicy(CURVE), behaviours=behaviours, delays_s=delays_s)
    bench.drafter.depth = depth
    rounds = bench.rounds(PROMPT, 60)
    assert max(round_.stats.waited_s for round_ in rounds) <= depth * FORWARD_S + 1e-9


def test_a_drafter_that_is_gone_is_not_waited_for() -> None:
    bench = Bench(AdaptivePolicy(CURVE, lookup=False), behaviours=[Behaviour.SILENT])
    bench.drafter.ready_from = 10**9
    rounds = bench.rounds(PROMPT, 60)
    assert max(round_.stats.waited_s for round_ in rounds) == 0.0
    assert bench.clock() == pytest.approx(59 * FORWARD_S)


def test_decoding_goes_on_plainly_until_the_drafter_has_taken_the_prompt() -> None:
    bench = Bench(FixedPolicy(8))
    bench.drafter.ready_from = 4
    bench.drafter.behaviours = [*[Behaviour.SILENT] * 3, *[Behaviour.PERFECT] * 100]
    kinds = [round_.stats.kind for round_ in bench.rounds(PROMPT, 20)]
    assert [RoundKind.PREFILL, RoundKind.PLAIN, RoundKind.PLAIN, RoundKind.PLAIN] == kinds[:4]
    assert RoundKind.VERIFY in kinds[4:]


@pytest.mark.parametrize("params", [GREEDY, SAMPLED])
@pytest.mark.parametrize("behaviour", [Behaviour.PERFECT, Behaviour.BRANCHING, Behaviour.PARTLY])
def test_a_noisy_runtime_settles_close_decisions_by_plain_forwards(
    behaviour: Behaviour, params: SamplingParams
) -> None:
    """Logits are multiples of 0.5 with many ties; noise flips a tie, the guard must catch every one."""
    bench = Bench(params=params, behaviours=[behaviour], noise=0.06, levels=60)
    assert bench.text(PROMPT, 60) == bench.run(PROMPT, 60)
    assert bench.decoder.stats.guarded > 0
    assert bench.decoder.stats.settled > 0
    # Each decision that ended a walk is settled once, in that round or the next.
    assert bench.decoder.stats.settled >= bench.decoder.stats.guarded
    assert bench.decoder.stats.accepted > 0
    bench.assert_consistent()


def test_noise_without_a_guard_changes_the_text() -> None:
    """The test above would prove nothing otherwise."""
    bench = Bench(exactness=Exactness.INEXACT, noise=0.06, levels=60)
    assert bench.text(PROMPT, 60) != bench.run(PROMPT, 60)


class QuantisedTarget(ToyTarget):
    """Says that a tree cannot reproduce its plain steps at all."""

    def __init__(self) -> None:
        super().__init__()
        self.spec = TargetSpec(
            self.spec.vocab_size, 2, 256, Invariance(bitwise=False, noise=1.0, exact_tree=False)
        )


def test_a_runtime_without_exact_trees_decodes_plainly_unless_told_otherwise() -> None:
    target, clock = QuantisedTarget(), FakeClock()
    drafter = ScriptedDrafter(lambda context, count: plain_text(target, GREEDY, context, count), clock)
    plain = Decoder(target, drafter, FixedPolicy(8), clock)
    assert [1] * 20 == [len(round_.tokens) for round_ in plain.generate(PROMPT, GREEDY, 20)]
    assert drafter.num_updates == 0
    target.truncate(0)
    chosen = Decoder(target, drafter, FixedPolicy(8), clock, Exactness.INEXACT)
    assert max(len(round_.tokens) for round_ in chosen.generate(PROMPT, GREEDY, 20)) == 5


@pytest.mark.parametrize(
    ("prompt", "count", "message"),
    [
        ([], 5, "empty"),
        ([1] * 257, 5, "context holds 256"),
        ([1, 32], 5, "vocabulary of 32"),
        ([-1], 5, "vocabulary of 32"),
        ([1], 0, "max_tokens"),
    ],
)
def test_what_cannot_be_generated_is_refused_before_anything_happens(
    prompt: list[int], count: int, message: str
) -> None:
    bench = Bench()
    with pytest.raises(UsageError, match=message):
        bench.decoder.generate(prompt, GREEDY, count)
    assert len(bench.decoder.prefix) == 0


def test_an_emulated_target_answers_when_its_profile_says() -> None:
    from starsd_edge.decoding.costs import load_profile

    clock = FakeClock()
    profile = load_profile("agx-orin-fp16")
    target = EmulatedTarget(ToyTarget(), profile, clock, clock.sleep)
    decoder = Decoder(target, None, PlainPolicy(), clock)
    tokens = [token for round_ in decoder.generate(PROMPT, GREEDY, 11) for token in round_.tokens]
    assert plain_text(ToyTarget(), GREEDY, PROMPT, 11) == tokens
    assert clock() == pytest.approx(profile.curve(len(PROMPT)) + 10 * profile.curve(1))
    assert target.num_overruns == 0
    np.testing.assert_allclose(decoder.stats.tokens_per_s, 1 / profile.curve(1))
