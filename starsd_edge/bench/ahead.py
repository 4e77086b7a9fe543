"""What drafting ahead brings: the real decode loop in virtual time, with and without it.

One device, a service with nothing else to do. The policy is the adaptive one both times; what is drafted
ahead is a trace's (`Trace.ahead`), after the time that its steps take.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from starsd_edge.bench.idle_service import IdleService
from starsd_edge.bench.policy import Decoded, decode
from starsd_edge.bench.trace import Trace
from starsd_edge.bench.virtual import Conditions
from starsd_edge.decoding.costs import DeviceProfile
from starsd_edge.decoding.policy import AdaptivePolicy

__all__ = ["Compared", "compare", "mean_gain"]


@dataclass(frozen=True, slots=True)
class Compared:
    """A device on a line, decoding the same texts both ways."""

    profile: str
    prompts: str
    rtt_ms: float
    plain_tokens_per_s: float
    without: Decoded
    ahead: Decoded

    @property
    def tokens_gain(self) -> float:
        return self.ahead.tokens_per_s / self.without.tokens_per_s

    @property
    def rounds_gain(self) -> float:
        return self.ahead.rounds_per_s / self.without.rounds_per_s

    def as_dict(self) -> dict[str, object]:
        return {
            "profile": self.profile,
            "prompts": self.prompts,
            "rtt_ms": self.rtt_ms,
            "plain_tokens_per_s": self.plain_tokens_per_s,
            "without_tokens_per_s": self.without.tokens_per_s,
            "ahead_tokens_per_s": self.ahead.tokens_per_s,
            "tokens_gain": self.tokens_gain,
            "rounds_gain": self.rounds_gain,
            "hit_rate": self.ahead.ahead_share,
        }


def compare(
    profiles: Sequence[DeviceProfile], rtts_ms: Sequence[float], prompts: dict[str, list[Trace]]
) -> Iterator[Compared]:
    """`prompts`: traces by name, with what was drafted ahead."""
    for rtt_ms in rtts_ms:
        for name, traces in prompts.items():
            for profile in profiles:
                conditions = Conditions(rtt_ms, 0.0, 0)
                without, ahead = (
                    decode(
                        profile, conditions, traces, AdaptivePolicy(profile.curve, ahead=wanted), IdleService
                    )
                    for wanted in (False, True)
                )
                plain = 1.0 / profile.curve.plain_s
                yield Compared(profile.name, name, rtt_ms, plain, without, ahead)


def mean_gain(gains: Sequence[float]) -> float:
    """Geometric."""
    return math.exp(sum(map(math.log, gains)) / len(gains))
