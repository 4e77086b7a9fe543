"""Drafting ahead over a real line: a real service process with the embedded model's head, the product's
client and policy, and a target that says recorded answers, with their features, as fast as a profile would.

`python -m tests.e2e.foresight PROFILE RTT_MS [CONVERSATIONS]` decodes them with and without what is drafted
ahead, in turn, twice. It records the answers once. On a machine whose steps take longer than a device's
verification, what is drafted ahead comes too late.
"""

from __future__ import annotations

import contextlib
import sys
import time

import click
import numpy as np

from starsd_edge.cli.runtime import ModelChoice
from starsd_edge.decoding.costs import DeviceProfile, load_profile
from starsd_edge.decoding.decoder import Decoder
from starsd_edge.decoding.policy import AdaptivePolicy
from starsd_edge.decoding.roles import Invariance, TargetOutput, TargetSpec
from starsd_edge.decoding.sampling import SamplingParams
from starsd_edge.decoding.tree import DraftTree
from starsd_edge.demo.processes import DraftService
from starsd_edge.link.client import RemoteDrafter
from starsd_edge.protocol.greeting import HelloBody
from starsd_edge.testing import EmulatedTarget
from starsd_edge.types import TokenArray
from starsd_server.emulate.ahead import ANSWER_TOKENS
from starsd_server.emulate.record import open_trace
from starsd_server.emulate.trace import Conversation
from starsd_server.heads.checkpoint import EMBEDDED_HEAD, read_manifest
from tests.e2e.bad_line import BadLine

READY_S = 120.0
IDENTITY = read_manifest(EMBEDDED_HEAD).identity


class Replay:
    """A target that says what a recording says, whatever it is asked."""

    def __init__(self, conversation: Conversation) -> None:
        length = len(conversation.tokens) + 64
        self.spec = TargetSpec(IDENTITY.vocab_size, IDENTITY.feature_size, length, Invariance(bitwise=True))
        self.kv_len = 0
        self._conversation = conversation

    def prefill(self, tokens: TokenArray) -> TargetOutput:
        output = self._at(np.arange(self.kv_len, self.kv_len + len(tokens)))
        self.kv_len += len(tokens)
        return TargetOutput(output.logits[-1:], output.features)

    def forward(self, tree: DraftTree) -> TargetOutput:
        return self._at(tree.positions)

    def keep(self, path: list[int]) -> None:
        self.kv_len += len(path)

    def truncate(self, kv_len: int) -> None:
        self.kv_len = kv_len

    def max_tree_size(self) -> int:
        return min(64, self.spec.max_len - self.kv_len)

    def _at(self, positions: np.ndarray) -> TargetOutput:
        tokens, features = self._conversation.tokens, self._conversation.features
        logits = np.zeros((len(positions), self.spec.vocab_size), np.float32)
        logits[np.arange(len(positions)), tokens[np.minimum(positions + 1, len(tokens) - 1)]] = 1.0
        return TargetOutput(logits, features[np.minimum(positions, len(features) - 1)])


def decode(
    profile: DeviceProfile, address: str, conversations: tuple[Conversation, ...], *, ahead: bool
) -> str:
    """Tokens and rounds a second, and the share of verified trees that had been drafted ahead."""
    policy = AdaptivePolicy(profile.curve, ahead=ahead)
    hello = HelloBody(
        identity=IDENTITY,
        digest=IDENTITY.digest(),
        device="foresight",
        software="0",
        dtypes=["fp16"],
        max_len=4096,
        max_nodes=64,
        cost_sizes=list(profile.curve.sizes),
        cost_seconds=list(profile.curve.seconds),
    )
    tokens = rounds = trees = hits = 0
    seconds = 0.0
    with contextlib.closing(RemoteDrafter(address, hello)) as drafter:
        assert drafter.wait_until_ready(READY_S).ready
        for conversation in conversations:
            target = EmulatedTarget(Replay(conversation), profile, time.monotonic, time.sleep)
            decoder = Decoder(target, drafter, policy, time.monotonic)
            prompt, answer = np.split(conversation.tokens, [conversation.prompt_len])
            text = [t for r in decoder.generate(prompt, SamplingParams(), len(answer)) for t in r.tokens]
            assert text == answer.tolist(), "drafting changed the text"
            stats = decoder.stats
            tokens, rounds, seconds = (
                tokens + stats.tokens - 1,
                rounds + stats.rounds,
                seconds + stats.decode_s,
            )
            trees, hits = trees + stats.rounds - stats.plain_rounds, hits + stats.ahead
    return (
        f"{tokens / seconds:.1f} tokens/s, {rounds / seconds:.1f} rounds/s, {hits / max(1, trees):.0%} hits"
    )


def main(profile_name: str, rtt_ms: float, count: int) -> None:
    profile = load_profile(profile_name)
    trace, _ = open_trace(ModelChoice(), EMBEDDED_HEAD, ANSWER_TOKENS, click.echo)
    with DraftService(["--draft-ahead", "on"]) as service:
        line = BadLine(int(service.address.rpartition(":")[2]))
        line.delay_s = rtt_ms / 2e3
        with contextlib.closing(line):
            for ahead in (False, True) * 2:
                found = decode(profile, line.address, trace.conversations[:count], ahead=ahead)
                way = "ahead" if ahead else "without"
                click.echo(f"{profile_name}, {rtt_ms:g} ms, {way}: {found}")


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]), int(sys.argv[3]) if len(sys.argv) > 3 else 4)
