"""How long to wait for a tree: the best answer to a small renewal problem. docs/policy.md derives it.

A cycle begins when an update leaves and ends when its tree is used up or useless. At every point of it the
edge may wait, or take a plain step of T(1), after which the tree is one token behind and perhaps on the wrong
path. Time has a price, the speed rho that the best way of deciding reaches in the long run: an option is
worth (expected tokens) - rho (expected seconds). rho itself is found by Dinkelbach's iteration: the speed of
the ways that look best at one price is the next price, until it no longer rises.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from starsd_edge.types import Float64Array

__all__ = ["WaitPlan", "plan_waiting"]

MAX_PRICE_STEPS = 6  # it converges in two or three
# Where it pays to wait for the latest answer seen, it pays a little longer, too: an answer later than all of
# n before it is to be expected once in n + 1, and is not much later. This share of their spread is added, and
# of the latest itself while few are known.
BEYOND_THE_LATEST = 0.5
BEYOND_THE_FIRST = 0.25
FEW_AGES = 16


@dataclass(frozen=True, slots=True)
class WaitPlan:
    """What to do while a tree is under way.

    rate     rho, tokens per second in the long run; 1 / T(1) at least
    until_s  until_s[k]: with k tokens committed since the update left, wait until its age is that; 0: don't
    """

    rate: float
    until_s: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class _Option:
    """Expected tokens and seconds until the end of the cycle."""

    tokens: float
    seconds: float
    until_s: float = 0.0

    def worth(self, rate: float) -> float:
        return self.tokens - rate * self.seconds


def plan_waiting(survival: Float64Array, verify_s: float, plain_s: float, ages_s: Float64Array) -> WaitPlan:
    """The best plan for trees like these.

    survival  float64 [D + 1]: survival[d] is the probability that d draft tokens or more are accepted
    verify_s  T(n) of the size that gets verified
    plain_s   T(1)
    ages_s    answer times seen of late, from update to tree; at least one
    """
    ages_s = np.sort(ages_s)
    rate = 1.0 / plain_s
    chain: list[_Option] = []
    for _ in range(MAX_PRICE_STEPS):
        chain = _best_chain(survival, verify_s, plain_s, ages_s, rate)
        reached = chain[0].tokens / chain[0].seconds
        if reached <= rate * 1.0001:
            break
        rate = reached
    return WaitPlan(rate, tuple(option.until_s for option in chain))


def _best_chain(
    survival: Float64Array, verify_s: float, plain_s: float, ages_s: Float64Array, rate: float
) -> list[_Option]:
    """The best option after 0, 1, 2, ... plain steps without a wait, at a price of time."""
    after = _Option(0.0, 0.0)
    chain: list[_Option] = []
    for steps in range(len(survival) - 1, -1, -1):
        elapsed_s = steps * plain_s
        left_s = ages_s[ages_s > elapsed_s] - elapsed_s if steps else ages_s
        if len(left_s) == 0 or survival[steps] <= 0.0:
            after = _Option(1.0, plain_s)  # no answer ever took this long: it is not counted on
        else:
            outlook = _Ahead(survival[steps:] / survival[steps], verify_s, plain_s, left_s)
            waiting = outlook.best_wait(rate, elapsed_s)
            waiting = replace(waiting, until_s=_and_a_little_longer(waiting.until_s, ages_s))
            stepping = outlook.step(after)
            after = max(waiting, stepping, key=lambda option: option.worth(rate))
        chain.append(after)
    return chain[::-1]


def _and_a_little_longer(until_s: float, ages_s: Float64Array) -> float:
    """Past the latest answer, or the latest before those of another kind (of segments that were lost)."""
    in_time = int(ages_s.searchsorted(until_s * (1.0 + 1e-9), side="right"))
    spread_s = until_s - float(ages_s[0])
    longer_s = until_s + BEYOND_THE_LATEST * spread_s
    if in_time == len(ages_s):
        return max(longer_s, (1.0 + BEYOND_THE_FIRST) * until_s) if in_time < FEW_AGES else longer_s
    return longer_s if in_time >= FEW_AGES and ages_s[in_time] > until_s + 2 * spread_s else until_s


@dataclass(frozen=True, slots=True)
class _Ahead:
    """The situation at one point of a cycle.

    survival  as above, given that the tokens committed since are in the tree
    left_s    how much longer the answer may take: equally likely samples, rising
    """

    survival: Float64Array
    verify_s: float
    plain_s: float
    left_s: Float64Array

    @property
    def follow(self) -> float:
        """Probability that the next plain token is in the tree."""
        return float(self.survival[1]) if len(self.survival) > 1 else 0.0

    @property
    def rest(self) -> float:
        """Expected tokens of verifying what is left after the next plain token; 0 if that left the tree."""
        return float(self.survival[1:].sum())

    def step(self, after: _Option) -> _Option:
        """A plain step now. A tree that is off the path is still in the way of the next request."""
        in_time = float((self.left_s <= self.plain_s).mean())
        late = 1.0 - in_time
        useless_s = 0.0
        if late > 0:
            useless_s = float(self.left_s[self.left_s > self.plain_s].mean()) - self.plain_s
        off = late * (1.0 - self.follow)
        tokens = (
            1.0 + in_time * self.rest + late * self.follow * after.tokens + off * useless_s / self.plain_s
        )
        seconds = self.plain_s + in_time * self.follow * self.verify_s
        seconds += late * self.follow * after.seconds + off * useless_s
        return _Option(tokens, seconds)

    def best_wait(self, rate: float, elapsed_s: float) -> _Option:
        """Wait until one of the answer times seen, then take plain steps until the tree is there."""
        deadlines = self.left_s[:, None]  # against [1, samples]
        left = self.left_s[None, :]
        soon = left <= deadlines + self.plain_s
        tokens_late = 1.0 + np.where(soon, self.rest, (left - deadlines - self.plain_s) / self.plain_s)
        seconds_late = np.where(soon, deadlines + self.plain_s + self.follow * self.verify_s, left)
        hit = left <= deadlines
        tokens = np.where(hit, float(self.survival.sum()), tokens_late).mean(axis=1)
        seconds = np.where(hit, left + self.verify_s, seconds_late).mean(axis=1)
        best = int(np.argmax(tokens - rate * seconds))
        until_s = elapsed_s + float(deadlines[best, 0])
        return _Option(float(tokens[best]), float(seconds[best]), until_s)
