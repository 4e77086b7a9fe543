"""Models small enough for tests: real tokenizer and template, logits of a toy target."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np

from starsd_edge.chat.contexts import Pair
from starsd_edge.chat.speaker import Model, Speaker
from starsd_edge.decoding.decoder import Exactness
from starsd_edge.decoding.policy import PlainPolicy, Policy
from starsd_edge.decoding.roles import Drafter, TargetOutput
from starsd_edge.decoding.tree import DraftTree
from starsd_edge.testing import ToyTarget
from starsd_edge.text.prompt import PromptWriter
from starsd_edge.text.template import ChatTemplate
from starsd_edge.text.tokenizer import Tokenizer
from starsd_edge.types import Float32Array, TokenArray
from tests.core.text.vocabularies import byte_level

TOKENIZER = Tokenizer(byte_level())
STOP_TOKEN = 2  # <|im_end|>
PREFERENCE = 100.0  # so likely that sampling never picks another


class CountingTarget(ToyTarget):
    """A ToyTarget that counts prefilled rows and can be slow.

    script   text that it says after every prompt, and then stops; None: what its hash makes of the context
    round_s  seconds a forward takes, so that an answer can be stopped in its middle
    """

    def __init__(
        self, max_len: int = 400, seed: int = 0, script: str | None = None, round_s: float = 0.0
    ) -> None:
        super().__init__(TOKENIZER.vocab_size, max_len, seed, levels=64)
        self.num_prefilled = 0
        self._script = None if script is None else [*TOKENIZER.encode(script), STOP_TOKEN]
        self._round_s = round_s

    def prefill(self, tokens: TokenArray) -> TargetOutput:
        self.num_prefilled += len(tokens)
        return super().prefill(tokens)

    def forward(self, tree: DraftTree) -> TargetOutput:
        if self._round_s:
            time.sleep(self._round_s)
        return super().forward(tree)

    def logits_after(self, tokens: Sequence[int]) -> Float32Array:
        logits = super().logits_after(tokens)
        if self._script is not None:
            # The prompt ends with "<|im_start|>assistant\n": what stands behind it was said already.
            context = list(tokens)
            start = len(context) - context[::-1].index(1) + len(TOKENIZER.encode("assistant\n"))
            said = len(context) - start
            logits[self._script[min(max(said, 0), len(self._script) - 1)]] += np.float32(PREFERENCE)
        return logits


def toy_speaker(
    targets: list[CountingTarget] | None = None,
    *,
    target: type[CountingTarget] = CountingTarget,
    max_len: int = 400,
    seed: int = 0,
    script: str | None = None,
    round_s: float = 0.0,
    max_contexts: int = 1,
    drafter: Callable[[], Drafter] | None = None,
    policy: Callable[[], Policy] = PlainPolicy,
    service: str = "",
    exactness: Exactness = Exactness.EXACT,
    joules: Callable[[], float | None] = lambda: None,
) -> Speaker:
    """A speaker over toy targets; every target it opens is appended to `targets`."""

    def open_pair() -> Pair:
        opened = target(max_len, seed, script, round_s)
        if targets is not None:
            targets.append(opened)
        return Pair(opened, drafter() if drafter else None, policy(), exactness)

    writer = PromptWriter(TOKENIZER, ChatTemplate("chatml"))
    model = Model("toy", writer, max_len, frozenset({STOP_TOKEN}), service)
    return Speaker(model, open_pair, max_contexts=max_contexts, joules=joules)
