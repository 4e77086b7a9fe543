"""The device's own drafter fills in while the draft service cannot answer."""

from __future__ import annotations

from starsd_edge.decoding.costs import load_profile
from starsd_edge.decoding.decoder import Decoder
from starsd_edge.decoding.fallback import FallbackDrafter
from starsd_edge.decoding.ngram import NgramDrafter
from starsd_edge.decoding.policy import AdaptivePolicy
from starsd_edge.decoding.sampling import SamplingParams
from starsd_edge.testing import EmulatedTarget, FakeClock, ScriptedDrafter, ToyTarget, plain_text

GREEDY = SamplingParams()
PROMPT = [1, 2, 3]


class Cycling(ToyTarget):
    """Its next token depends on the last two only: greedy text runs into a cycle."""

    def logits_after(self, tokens):  # type: ignore[no-untyped-def]  # as ToyTarget.logits_after
        return super().logits_after(tokens[-2:])


def test_ngrams_draft_while_the_service_is_away_and_the_service_takes_over() -> None:
    target, clock = Cycling(vocab_size=12, seed=3), FakeClock()
    service = ScriptedDrafter(
        lambda context, count: plain_text(target, GREEDY, context, count), clock, vocab_size=12
    )
    service.ready_from = 10
    drafter = FallbackDrafter(service, NgramDrafter())
    profile = load_profile("agx-orin-fp16")
    emulated = EmulatedTarget(target, profile, clock, clock.sleep)
    decoder = Decoder(emulated, drafter, AdaptivePolicy(profile.curve), clock)
    origins, text = [], []
    for round_ in decoder.generate(PROMPT, GREEDY, 200):
        text += round_.tokens
        origins.append(drafter.state().origin)
    assert plain_text(Cycling(vocab_size=12, seed=3), GREEDY, PROMPT, 200) == text
    assert origins[0] == "ngram"
    assert origins[-1] == "service"
    assert decoder.stats.mean_acceptance_length > 2


def test_its_state_is_that_of_whoever_drafts_and_says_why_the_service_does_not() -> None:
    clock = FakeClock()
    service = ScriptedDrafter(lambda context, count: [0] * count, clock, ready_from=1)
    drafter = FallbackDrafter(service, NgramDrafter())
    state = drafter.state()
    assert (True, "ngram", "taking the prompt") == (state.ready, state.origin, state.reason)
    service.ready_from = 0
    assert drafter.state().origin == "service"


def test_closing_it_closes_both() -> None:
    service = ScriptedDrafter(lambda context, count: [], FakeClock())
    FallbackDrafter(service, NgramDrafter()).close()
    assert service.closed
