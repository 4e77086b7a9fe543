"""One target of the demo: answers prompts plainly or with StarSD, as it is asked to.

Both ways run on the same loaded model, one after the other, so that what differs is the drafting alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from starsd_edge.decoding.decoder import Committed, Decoder
from starsd_edge.decoding.policy import PlainPolicy, Policy
from starsd_edge.decoding.roles import Target
from starsd_edge.decoding.sampling import SamplingParams
from starsd_edge.demo.report import Answer
from starsd_edge.demo.wire import Answered, Ask, Mode, Piece, Reply
from starsd_edge.link.client import RemoteDrafter
from starsd_edge.metrics import RoundKind
from starsd_edge.text.detokenize import Detokenizer
from starsd_edge.text.prompt import PromptWriter
from starsd_edge.text.template import Message, Role

__all__ = ["DemoTarget"]

READY_WAIT_S = 20.0  # for the link to come up before a drafted answer; the answer is right without it


@dataclass(slots=True)
class DemoTarget:
    """A loaded model with its link.

    policy    kept over the answers, as a chat keeps it
    overruns  how many forwards so far took longer than the emulated device would

    Decoding is greedy throughout, so that texts can be compared token by token.
    """

    target: Target
    writer: PromptWriter
    stop_tokens: frozenset[int]
    drafter: RemoteDrafter
    policy: Policy
    overruns: Callable[[], int] = lambda: 0

    def answer(self, ask: Ask) -> Iterator[Reply]:
        """Pieces when `ask.stream`, then the Answered."""
        prompt = self.writer.write([Message(Role.USER, ask.prompt)])
        text = Detokenizer(self.writer.tokenizer)
        committed: list[Committed] = []
        before, overruns = self.drafter.stats().counters, self.overruns()
        for round_ in self._rounds(ask, list(prompt.tokens)):
            committed.append(round_)
            if ask.stream:
                yield Piece(text.push(round_.tokens), len(round_.tokens))
        link, state = self.drafter.stats(), self.drafter.state()
        after = link.counters
        decoded = [c.stats for c in committed if c.stats.kind is not RoundKind.PREFILL]
        yield Answered(
            Answer(
                tokens=[token for c in committed for token in c.tokens],
                decode_s=sum(stats.total_s for stats in decoded),
                rounds=len(decoded),
                accepted=sum(stats.num_accepted for stats in decoded),
                verified_rounds=sum(stats.kind is RoundKind.VERIFY for stats in decoded),
                updates=after.rounds - before.rounds,
                update_bytes=after.bytes_updates - before.bytes_updates,
                downlink_bytes=after.bytes_down - before.bytes_down,
                overruns=self.overruns() - overruns,
                outage=link.last_outage
                if after.outages > before.outages
                else ""
                if state.ready
                else state.reason,
            )
        )

    def _rounds(self, ask: Ask, prompt: list[int]) -> Iterator[Committed]:
        plain = ask.mode is Mode.PLAIN
        if not plain:
            self.drafter.wait_until_ready(READY_WAIT_S)
        decoder = Decoder(
            self.target,
            None if plain else self.drafter,
            PlainPolicy() if plain else self.policy,
            time.monotonic,
        )
        yield from decoder.generate(prompt, SamplingParams(), ask.max_tokens, self.stop_tokens)
