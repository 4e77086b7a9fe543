"""Promise 1 on the real model, the real runtime, the real head and a real service: the very same text."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, cast

import pytest

from starsd_edge.bundle import Bundle
from starsd_edge.cli.drafts import DraftService as DraftAddress
from starsd_edge.cli.runtime import ModelChoice, measured_curve, open_bundle, prompt_writer, target_class
from starsd_edge.decoding.ahead import AHEAD_NODES
from starsd_edge.decoding.costs import CostCurve
from starsd_edge.decoding.decoder import Decoder
from starsd_edge.decoding.policy import FixedPolicy, PlainPolicy, Policy
from starsd_edge.decoding.roles import RoundHints, Target, TargetOutput
from starsd_edge.decoding.sampling import SamplingParams
from starsd_edge.decoding.tree import DraftTree
from starsd_edge.demo.processes import DraftService
from starsd_edge.link.client import RemoteDrafter
from starsd_edge.link.placement import Place
from starsd_edge.metrics import RoundKind
from starsd_edge.text.template import Message, Role

pytestmark = [pytest.mark.model, pytest.mark.slow]

READY_S = 180.0  # bound on waiting for a link, not a measurement
AHEAD_S = 0.3  # a bound, as well: not every round brings a tree drafted ahead
MAX_TOKENS = 24
PROMPT = "Write a haiku about rain."
SAMPLING = {
    "greedy": SamplingParams(),
    "nucleus": SamplingParams(temperature=0.8, top_p=0.95, seed=7),
    "all filters": SamplingParams(
        temperature=1.1, top_k=50, top_p=0.9, min_p=0.02, repetition_penalty=1.1, seed=11
    ),
}


@dataclass(frozen=True)
class Edge:
    bundle: Bundle
    target: Target
    curve: CostCurve

    def prompt(self, text: str) -> list[int]:
        return list(prompt_writer(self.bundle).write([Message(Role.USER, text)]).tokens)

    def decoder(self, drafter: RemoteDrafter | None, policy: Policy) -> Decoder:
        return Decoder(self.target, drafter, policy, time.monotonic)

    def plain(self, prompt: list[int], params: SamplingParams) -> list[int]:
        rounds = self.decoder(None, PlainPolicy()).generate(prompt, params, MAX_TOKENS)
        return [token for committed in rounds for token in committed.tokens]

    def drafter(self, address: str) -> RemoteDrafter:
        manifest = self.bundle.manifest
        return DraftAddress((Place(address, None),)).open_drafter(manifest, self.curve, manifest.max_len)


@pytest.fixture(scope="module", params=["int8", "fp32"])
def edge(request: pytest.FixtureRequest) -> Edge:
    bundle = open_bundle(ModelChoice(quant=request.param), lambda _line: None)
    target = target_class(bundle.manifest).load(bundle, 1)
    return Edge(bundle, target, measured_curve(target))


@pytest.fixture(scope="module")
def service(edge: Edge) -> Iterator[DraftService]:
    with DraftService(["--target", str(edge.bundle.path)]) as running:
        yield running


@pytest.fixture
def drafter(edge: Edge, service: DraftService) -> Iterator[RemoteDrafter]:
    drafter = edge.drafter(service.address)
    assert drafter.wait_until_ready(READY_S).ready
    yield drafter
    drafter.close()


@pytest.mark.parametrize("sampling", SAMPLING)
def test_text_does_not_depend_on_drafting(edge: Edge, drafter: RemoteDrafter, sampling: str) -> None:
    """Chains and trees give the tokens of plain decoding, greedy and sampled."""
    params, tokens = SAMPLING[sampling], edge.prompt(PROMPT)
    expected = edge.plain(tokens, params)
    for num_nodes in (2, 16):
        decoder = edge.decoder(drafter, FixedPolicy(num_nodes))
        drafted = [t for committed in decoder.generate(tokens, params, MAX_TOKENS) for t in committed.tokens]
        assert expected == drafted
        assert decoder.stats.drafted > 0


@dataclass(frozen=True, slots=True)
class Foresighted(FixedPolicy):
    """Small trees, verified at once where one was drafted ahead."""

    def hints(self) -> RoundHints:
        return RoundHints(max_nodes=self.num_nodes, ahead_nodes=AHEAD_NODES)


@dataclass(frozen=True)
class Unhurried:
    """A target on a device so slow that what is drafted ahead has come when it has verified, if any comes:
    on a busy machine it came later."""

    target: Target
    drafter: RemoteDrafter

    def __getattr__(self, name: str) -> Any:
        return getattr(self.target, name)

    def forward(self, tree: DraftTree) -> TargetOutput:
        counters = self.drafter._connection.counters
        before = counters.ahead_trees
        output = self.target.forward(tree)
        with self.drafter._changed:
            self.drafter._changed.wait_for(lambda: counters.ahead_trees > before, AHEAD_S)
        return output


@pytest.mark.parametrize("sampling", SAMPLING)
def test_text_does_not_depend_on_what_is_drafted_ahead(edge: Edge, sampling: str) -> None:
    """Trees of the real head that go on while the target verifies, and rounds that begin with them."""
    params, tokens = SAMPLING[sampling], edge.prompt(PROMPT)
    expected = edge.plain(tokens, params)
    with DraftService(["--target", str(edge.bundle.path), "--draft-ahead", "on"]) as service:
        drafter = edge.drafter(service.address)
        assert drafter.wait_until_ready(READY_S).ready
        slow = replace(edge, target=cast(Target, Unhurried(edge.target, drafter)))
        decoder = slow.decoder(drafter, Foresighted(4, max_wait_s=10.0))
        text = [t for committed in decoder.generate(tokens, params, MAX_TOKENS) for t in committed.tokens]
        came = drafter.stats().counters.ahead_trees
        drafter.close()
    assert expected == text
    assert came > 0
    assert decoder.stats.ahead > 0


def test_service_killed_in_the_middle_of_an_answer(edge: Edge) -> None:
    """The rest is decoded plainly, the text is the same, and a service that comes back drafts again."""
    params, tokens = SAMPLING["nucleus"], edge.prompt(PROMPT)
    expected = edge.plain(tokens, params)
    options = ["--target", str(edge.bundle.path)]
    with DraftService(options) as first:
        drafter = edge.drafter(first.address)
        assert drafter.wait_until_ready(READY_S).ready
        # Patient: on a busy machine the first tree would come in the last round, and none be left to lose.
        decoder = edge.decoder(drafter, FixedPolicy(8, max_wait_s=10.0))
        text: list[int] = []
        kinds: list[RoundKind] = []
        killed_after = 0
        for committed in decoder.generate(tokens, params, MAX_TOKENS):
            text += committed.tokens
            kinds.append(committed.stats.kind)
            if RoundKind.VERIFY in kinds and not killed_after:
                first.kill()
                killed_after = len(kinds)
    assert expected == text
    assert RoundKind.PLAIN in kinds[killed_after:]
    with DraftService([*options, "--bind", first.address]):
        assert drafter.wait_until_ready(READY_S).ready
        decoder = edge.decoder(drafter, FixedPolicy(8))
        again = [t for committed in decoder.generate(tokens, params, MAX_TOKENS) for t in committed.tokens]
    drafter.close()
    assert expected == again
    assert decoder.stats.drafted > 0
