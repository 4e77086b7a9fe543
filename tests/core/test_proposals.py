"""How long trees took, as the decode loop knows it: what waiting is decided by."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from starsd_edge.decoding.decoder import Decoder
from starsd_edge.decoding.draft import Draft
from starsd_edge.decoding.policy import FixedPolicy
from starsd_edge.decoding.sampling import SamplingParams
from starsd_edge.testing import FakeClock, ScriptedDrafter, plain_text
from tests.core.slow_target import FORWARD_S, SlowTarget

DELAY_S = 0.02
GREEDY = SamplingParams()


@dataclass(frozen=True, slots=True)
class Impatient(FixedPolicy):
    """Never waits; notes how long trees took."""

    ages_s: list[float] = field(default_factory=list)

    def arrived(self, draft: Draft) -> None:
        self.ages_s.append(draft.age_s)


@pytest.mark.parametrize("dated", [True, False])
def test_a_tree_that_came_during_a_forward_is_as_old_as_it_was_when_it_came(dated: bool) -> None:
    """A drafter that does not know when it came is taken at its expectation: a forward, here."""
    clock = FakeClock()
    target = SlowTarget(clock)
    drafter = ScriptedDrafter(
        oracle=lambda context, count: plain_text(target, GREEDY, context, count),
        clock=clock,
        delays_s=[DELAY_S],
        expected_wait_s=FORWARD_S,
        dated=dated,
    )
    policy = Impatient(8, max_wait_s=0.0)
    rounds = Decoder(target, drafter, policy, clock).generate([3, 1, 4], GREEDY, 20)
    assert [token for round_ in rounds for token in round_.tokens] == plain_text(
        target, GREEDY, [3, 1, 4], 20
    )
    assert policy.ages_s[0] == pytest.approx(DELAY_S if dated else FORWARD_S)
