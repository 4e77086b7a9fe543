"""A bundle's self-test: a prompt, and what greedy decoding says after it.

Another machine's vector units round differently, so the recorded answer ends before the first token that
was a near tie: what is left must come out everywhere.
"""

from __future__ import annotations

import numpy as np
from tokenizers import Tokenizer

from starsd_edge.bundle import Bundle, SelfTest
from starsd_edge.decoding.roles import Target
from starsd_edge.decoding.tree import DraftTree
from starsd_edge.errors import BundleError

__all__ = ["make_self_test", "run_self_test"]

# Texts whose continuation is plain to any language model.
PROMPTS = (
    "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11,",
    "Monday, Tuesday, Wednesday, Thursday,",
    "The capital of France is",
)
MAX_TOKENS = 16
SAFE_MARGIN = 1.0  # logits; int8 activations move a logit by up to 0.7 when something else rounds (measured)


def make_self_test(bundle: Bundle, target: Target) -> SelfTest:
    """The prompt whose answer is certain for longest. A model of random weights may have none: then the test
    is one token, and what it checks is that the graph runs."""
    tokenizer = Tokenizer.from_file(str(bundle.tokenizer_path))
    tests = []
    for text in PROMPTS:
        prompt = [int(token) for token in tokenizer.encode(text).ids]
        if prompt:
            tokens, margins = greedy(target, prompt, MAX_TOKENS)
            unsure = [index for index, margin in enumerate(margins) if margin < SAFE_MARGIN]
            certain = unsure[0] if unsure else MAX_TOKENS
            tests.append(SelfTest(tuple(prompt), tuple(tokens[: max(certain, 1)])))
    if not tests:
        raise BundleError(f"{bundle.path}: its tokenizer makes no tokens of plain text")
    return max(tests, key=lambda test: len(test.expected))


def run_self_test(target: Target, test: SelfTest, limit: int = MAX_TOKENS) -> None:
    """The first `limit` tokens of the test. Raises BundleError when the target says something else than was
    recorded. Leaves an empty cache."""
    expected = test.expected[:limit]
    if not expected:
        return  # still being exported: it is about to be recorded
    tokens, _ = greedy(target, list(test.prompt), len(expected))
    if tuple(tokens) != expected:
        raise BundleError(
            f"self-test failed: expected tokens {list(expected)}, got {tokens}; the bundle is damaged, "
            "or this runtime computes something else"
        )


def greedy(target: Target, prompt: list[int], count: int) -> tuple[list[int], list[float]]:
    """`count` tokens after `prompt` and by how many logits each won; the cache is empty before and after."""
    target.truncate(0)
    logits = target.prefill(np.array(prompt, np.int32)).logits[0]
    tokens: list[int] = []
    margins: list[float] = []
    while True:
        best = int(logits.argmax())
        margins.append(float(logits[best] - np.partition(logits, -2)[-2]))
        tokens.append(best)
        if len(tokens) == count:
            break
        logits = target.forward(DraftTree.root_only(best, target.kv_len + 1)).logits[0]
        target.keep([0])
    target.truncate(0)
    return tokens, margins
