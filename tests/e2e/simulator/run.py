"""One seed: a text decoded under faults, then in peace, and what must hold of both."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from starsd_edge.decoding.costs import CostCurve
from starsd_edge.decoding.decoder import Decoder
from starsd_edge.decoding.policy import AdaptivePolicy, FixedPolicy, Outlook, Policy
from starsd_edge.decoding.roles import Update
from starsd_edge.decoding.sampling import SamplingParams
from starsd_server.scheduling import Limits
from tests.e2e.simulator.line import EdgeLink, Weather
from tests.e2e.simulator.service import SimulatedService
from tests.e2e.simulator.target import VOCAB_SIZE, TableTarget, features, plain_text
from tests.e2e.simulator.world import World

__all__ = ["Outcome", "run_seed"]

FIRST_TURN_TOKENS, SECOND_TURN_TOKENS = 12, 4
PROMPT_TOKENS = 20
# After the line is good again: the longest pause of a probe, an answer that was waited for in vain, a BUSY,
# and the prompt.
RECOVERY_S = 45.0
FIXED_WAIT_S = 0.5
TICK_S = 1e-9  # what sums of floats are off by


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a seed came to, for tests that ask whether the simulator exercises what it should."""

    trees: int
    stale_trees: int
    outages: int
    misses: int
    restarts: int
    evictions: int
    verify_rounds: int
    ahead_rounds: int
    in_flight: int


def run_seed(seed: int) -> Outcome:
    """Raises AssertionError when a promise is broken."""
    world = World(seed)
    chance = world.chance
    crowded = chance.random() < 0.2
    service = SimulatedService(world, Limits(max_sessions=1 if crowded else 4, idle_lease_s=30.0))
    weather = bad_weather(world)
    link = EdgeLink(world, service, weather, "edge")
    rival = Rival(world, service) if crowded else None
    plain_s = chance.choice([0.02, 0.1, 0.5])
    faults = Faults(world, service, link, weather, duration_s=FIRST_TURN_TOKENS * plain_s)
    params = SamplingParams(temperature=chance.choice([0.0, 0.0, 1.0]), seed=seed)
    policy: Policy = (
        AdaptivePolicy(CostCurve((1, 32), (plain_s, plain_s * 1.62)))
        if chance.random() < 0.5
        else FixedPolicy(9, FIXED_WAIT_S)
    )
    watched = Watched(policy, link)
    target = TableTarget(world, plain_s)
    decoder = Decoder(target, link, watched, world.clock)
    prompt = [chance.randrange(VOCAB_SIZE) for _ in range(chance.randrange(1, PROMPT_TOKENS))]

    text = decode(decoder, watched, prompt, params, FIRST_TURN_TOKENS)
    faults.end()
    recover(world, link, decoder)
    if rival is not None:
        rival.leave()
    # Another turn of the conversation: what both have in common stays, the rest is sent anew.
    second = [*prompt, *text[: chance.randrange(len(text))], chance.randrange(VOCAB_SIZE)]
    decode(decoder, watched, second, params, SECOND_TURN_TOKENS)

    counters = link.connection.counters
    assert counters.violations == 0, link.connection.reason
    return Outcome(
        counters.trees,
        counters.stale_trees,
        counters.outages,
        counters.misses,
        service.generation - 1,
        service.evictions,
        decoder.stats.rounds - decoder.stats.plain_rounds,
        decoder.stats.ahead,
        service.in_flight,
    )


class Watched:
    """The policy, and how long it would wait in the round under way."""

    def __init__(self, policy: Policy, link: EdgeLink) -> None:
        self._policy, self._link = policy, link
        self.granted_s = 0.0

    def patience_s(self, outlook: Outlook) -> float:
        patience_s = self._policy.patience_s(outlook)
        assert patience_s == 0.0 or self._link.state().ready, "a link that does not draft is waited for"
        self.granted_s = self.granted_s or patience_s  # asked again in the same round, it can only say less
        return patience_s

    def __getattr__(self, name: str) -> Any:
        return getattr(self._policy, name)


def decode(
    decoder: Decoder, policy: Watched, prompt: list[int], params: SamplingParams, count: int
) -> list[int]:
    text: list[int] = []
    for committed in decoder.generate(prompt, params, count):
        text += committed.tokens
        took = committed.stats
        assert took.waited_s <= policy.granted_s + TICK_S, "a wait was longer than the policy granted"
        assert took.total_s <= took.waited_s + took.forward_s + TICK_S, "something else blocked the loop"
        policy.granted_s = 0.0
    assert text == plain_text(prompt, params, count), "the text is not the target's own"
    return text


def recover(world: World, link: EdgeLink, decoder: Decoder) -> None:
    """In peace every session gets trees again that lead on from what is committed."""
    world.run_until(world.now_s + RECOVERY_S, lambda: link.state().ready)
    assert link.state().ready, f"not recovered after {RECOVERY_S} s: {link.state().reason}"
    prefix = decoder.prefix
    told_len = link.told_len
    if told_len == 0:
        link.start(int(prefix[0]))
    start = max(told_len, 1) - 1
    if start + 1 == len(prefix):
        start -= 1  # nothing new to tell: say the last token once more
    positions = np.arange(start, len(prefix) - 1)
    link.update(Update(start, prefix[start + 1 :], features(prefix[start:-1], positions)))
    deadline_s = world.now_s + RECOVERY_S
    left = None
    while world.now_s < deadline_s and left is None:
        tree = link.poll(deadline_s - world.now_s)
        if tree is not None:
            assert int(tree.tokens[0]) == int(prefix[tree.base_len - 1])
            left = tree.descend(prefix[tree.base_len :].tolist())
    assert left is not None, f"no tree in peace: {link.state().reason}"
    if told_len:
        link.rollback(told_len)  # as the decode loop believes


def bad_weather(world: World) -> Weather:
    chance = world.chance
    return Weather(
        delay_s=chance.choice([0.0005, 0.005, 0.05, 0.15]),
        jitter_s=chance.choice([0.0, 0.002, 0.1]),
        drop=chance.choice([0.0, 0.0, 0.05, 0.3]),
        double=chance.choice([0.0, 0.0, 0.1]),
        reorder=chance.choice([0.0, 0.0, 0.1]),
    )


class Faults:
    """Things that break while the text is made, at times the seed decides."""

    def __init__(
        self,
        world: World,
        service: SimulatedService,
        link: EdgeLink,
        weather: Weather,
        duration_s: float,
    ) -> None:
        self._world, self._service, self._link, self._weather = world, service, link, weather
        self._over = False
        kinds = [self._partition, self._reset, self._restart, self._hang, self._drain, self._gateway]
        for _ in range(world.chance.randrange(5)):
            self._at(world.chance.random() * duration_s, world.chance.choice(kinds))
        self._at(1.0, self._tick)

    def end(self) -> None:
        """The line is good and the service works from now on; what is under way still arrives."""
        self._over = True
        self._service.go_on()
        self._weather.down = False
        self._weather.drop = self._weather.double = self._weather.reorder = 0.0

    def _at(self, delay_s: float, act: Callable[[], None]) -> None:
        self._world.after(delay_s, act)

    def _tick(self) -> None:
        self._service.tick()
        self._at(1.0, self._tick)

    def _for_a_while(self, begin: Callable[[], None], end: Callable[[], None]) -> None:
        if not self._over:
            begin()
            self._at(self._world.chance.expovariate(0.3), end)

    def _partition(self) -> None:
        """Cable out: nobody is told."""
        self._for_a_while(
            lambda: setattr(self._weather, "down", True), lambda: setattr(self._weather, "down", False)
        )

    def _hang(self) -> None:
        """The engine stands, the sockets live: SIGSTOP, or a kernel that does not return."""
        keeps = self._world.chance.random() < 0.5
        self._for_a_while(lambda: self._service.hang(keeps=keeps), self._service.go_on)

    def _reset(self) -> None:
        if not self._over:
            self._link.cut()

    def _gateway(self) -> None:
        """The socket process restarts: connections are gone, sessions are not."""
        if not self._over:
            self._service.replies.clear()
            self._link.cut()

    def _restart(self) -> None:
        if not self._over:
            self._service.restart()
            if self._world.chance.random() < 0.5:
                self._gateway()

    def _drain(self) -> None:
        """Told to leave, gone a second later, another one in its place."""
        if not self._over:
            self._service.drain()
            self._at(1.0, self._restart_after_drain)

    def _restart_after_drain(self) -> None:
        self._service.restart()
        self._service.replies.clear()
        self._link.cut()


def main() -> None:
    """`python -m tests.e2e.simulator.run SEED...` runs them again, with a traceback."""
    for word in sys.argv[1:]:
        print(word, run_seed(int(word)))  # noqa: T201  # this is what running the file is for


class Rival:
    """Another device on a service with a single KV slot: it opens contexts and so takes the slot away."""

    def __init__(self, world: World, service: SimulatedService) -> None:
        self._world = world
        self._link = EdgeLink(world, service, Weather(), "rival")
        self._gone = False
        self._open()

    def leave(self) -> None:
        self._gone = True
        self._link.close()

    def _open(self) -> None:
        if self._gone:
            return
        self._link.start(1)
        tokens = np.array([1, 2, 3], np.int32)
        self._link.update(Update(0, tokens[1:], features(tokens[:2], np.arange(2))))
        chance = self._world.chance
        hurries = chance.random() < 0.3  # while its rows are still worked on
        self._world.after(chance.uniform(0.0, 0.1) if hurries else chance.uniform(0.2, 4.0), self._open)


if __name__ == "__main__":
    main()
