"""Published heads from their files to trees on a device, on small stand-ins."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from starsd_edge.bundle import Bundle
from starsd_edge.cli.drafts import DraftService, identity_of
from starsd_edge.decoding.costs import CostCurve
from starsd_edge.decoding.decoder import Decoder
from starsd_edge.decoding.policy import FixedPolicy, PlainPolicy, Policy
from starsd_edge.decoding.sampling import SamplingParams
from starsd_edge.link.client import RemoteDrafter
from starsd_edge.link.placement import Place
from starsd_edge.protocol.limits import DEFAULT_TIMING
from starsd_jetson.export import ExportSettings, export
from starsd_jetson.onnx_target import OnnxTarget
from starsd_server.engine import Engine
from starsd_server.heads.checkpoint import HeadManifest, load_head, save_head
from starsd_server.heads.convert import convert
from starsd_server.heads.grow import GrowthLimits
from starsd_server.heads.head import HeadKind
from starsd_server.rows import Precision, RowHead
from starsd_server.step import Extend, Grow, SessionRows, TreeReady, WorkItem
from tests.e2e.drafting import IDENTITY, PATIENCE_S, Edge, Running, serving
from tests.e2e.published import EAGLE1, EAGLE3, GOLDEN, SOURCES, vicuna_folder
from tests.server.heads import random_head

CURVE = CostCurve([1, 16], [0.01, 0.012])
NUM_NODES = 16
NUM_TOKENS = 32
TRAINED_LEN = 64
WAIT_S = 30.0  # a tree is waited for, however busy the machine is


@pytest.mark.parametrize("kind", SOURCES)
@pytest.mark.parametrize("head", [EAGLE1, EAGLE3])
def test_a_head_and_a_bundle_of_the_same_files_fit(kind: str, head: Path, tmp_path: Path) -> None:
    """Whatever the tokenizer is read from; and a head that was converted from the bundle is the same."""
    source = SOURCES[kind](tmp_path)
    identity = convert(head, source, tmp_path / "head").identity
    eagle3 = tmp_path / "head" if head is EAGLE3 else None
    template = "vicuna_v1.1" if kind == "tokenizer.json" else None
    bundle = export(
        source, tmp_path / "bundle", ExportSettings("fp32", eagle3=eagle3, chat_template=template)
    )
    assert identity_of(bundle.manifest) == identity
    assert convert(head, bundle.path, tmp_path / "again").identity == identity


@dataclass(frozen=True)
class Pair:
    """A published head, converted, and a bundle that was exported for it."""

    published: Path
    head: Path
    bundle: Bundle

    def prompts(self) -> list[list[int]]:
        """Those of the recordings, of whose drafts the random target accepts some."""
        data = np.load(GOLDEN / "cases" / f"{self.published.name}.npz")
        return [data[f"p{prompt}/ids"].tolist() for prompt in range(3)]

    def text(self, prompt: list[int], drafter: RemoteDrafter | None) -> tuple[list[int], Decoder]:
        policy: Policy = PlainPolicy() if drafter is None else FixedPolicy(NUM_NODES, WAIT_S)
        decoder = Decoder(OnnxTarget.load(self.bundle, 1), drafter, policy, time.monotonic)
        rounds = decoder.generate(prompt, SamplingParams(), NUM_TOKENS)
        return [token for committed in rounds for token in committed.tokens], decoder


@pytest.fixture(scope="module", params=[EAGLE1, EAGLE3], ids=lambda path: path.name)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    folder = tmp_path_factory.mktemp("pair")
    source = vicuna_folder(folder)
    convert(request.param, source, folder / "head", torch.float32)
    eagle3 = folder / "head" if request.param is EAGLE3 else None
    bundle = export(source, folder / "bundle", ExportSettings("fp32", eagle3=eagle3))
    return Pair(request.param, folder / "head", bundle)


@pytest.fixture(scope="module")
def service(pair: Pair) -> Iterator[Running]:
    with serving(pair.head, "--precision", "float32") as running:
        yield running


def drafter_of(bundle: Bundle, service: Running) -> RemoteDrafter:
    manifest = bundle.manifest
    return DraftService((Place(service.address, None),)).open_drafter(manifest, CURVE, manifest.max_len)


def test_its_trees_are_verified_and_the_text_is_the_targets_own(pair: Pair, service: Running) -> None:
    drafter = drafter_of(pair.bundle, service)
    try:
        assert drafter.wait_until_ready(PATIENCE_S).ready, drafter.state().reason
        deadline_s, accepted = time.monotonic() + PATIENCE_S, 0
        while not accepted:  # on a machine so busy that trees are late, there may be none in a short text
            assert time.monotonic() < deadline_s, drafter.state()
            for prompt in pair.prompts():
                text, decoder = pair.text(prompt, drafter)
                assert pair.text(prompt, None)[0] == text
                accepted += decoder.stats.accepted
    finally:
        drafter.close()


@torch.inference_mode()
def test_what_the_device_sends_grows_the_references_trees(pair: Pair) -> None:
    """Features that the bundle's graph made, against trees of the reference, which projects at the head."""
    target = OnnxTarget.load(pair.bundle, 1)
    engine = Engine(RowHead(load_head(pair.head), Precision.FLOAT32), 1, max_len=256)
    data = np.load(GOLDEN / "cases" / f"{pair.published.name}.npz")
    for index, prompt in enumerate(pair.prompts()):
        target.truncate(0)
        features = target.prefill(np.array(prompt, np.int32)).features
        kept = load_head(pair.head).project(torch.from_numpy(data[f"p{index}/features"]))
        np.testing.assert_allclose(kept, features, atol=1e-4 * float(kept.abs().max()))
        items: list[WorkItem] = [
            Extend(
                SessionRows(0),
                data[f"p{index}/ext_ids"].astype(np.int32),
                features,
                0,
                GrowthLimits(60, 10, 5),
            )
        ]
        while not isinstance(outcome := engine.step(items)[0], TreeReady):
            items = [Grow(items[0].session)]
        scores = data[f"p{index}/t60k10/r0/scores"]
        order = np.argsort(-scores[1:], kind="stable") + 1
        np.testing.assert_array_equal(data[f"p{index}/t60k10/r0/tokens"][order], outcome.tokens)


def test_a_bundle_with_the_projection_of_another_head_is_refused_by_name(tmp_path: Path) -> None:
    """Two heads of one target: what one reads of it means nothing to the other."""
    source = vicuna_folder(tmp_path)
    convert(EAGLE3, source, tmp_path / "head")
    other = Path(shutil.copytree(EAGLE3, tmp_path / "other"))
    weights = torch.load(other / "pytorch_model.bin", weights_only=True)
    torch.save(weights | {"fc.weight": weights["fc.weight"] * 1.5}, other / "pytorch_model.bin")
    convert(other, source, tmp_path / "other-head")
    bundle = export(source, tmp_path / "bundle", ExportSettings("fp32", eagle3=tmp_path / "other-head"))
    with serving(tmp_path / "head") as service:
        drafter = drafter_of(bundle, service)
        assert not drafter.wait_until_ready(1.0).ready
        deadline_s = time.monotonic() + PATIENCE_S
        while "projection is" not in (reason := drafter.state().reason):
            assert time.monotonic() < deadline_s, reason
            time.sleep(0.01)
        drafter.close()


def test_beyond_what_the_head_was_trained_on_the_rest_is_decoded_plainly(tmp_path: Path) -> None:
    """The service has room for more. The text is the target's own; the link says why no more trees come."""
    head = random_head(HeadKind.EAGLE1)
    manifest = HeadManifest(name="short", head=head.config, identity=IDENTITY, trained_len=TRAINED_LEN)
    save_head(head, manifest, tmp_path)
    with serving(tmp_path) as service:
        edge = Edge(service.address, timing=DEFAULT_TIMING, step_s=0.0).joined()
        edge.decoder = Decoder(edge.target, edge.drafter, FixedPolicy(8, WAIT_S), time.monotonic)
        try:
            welcome = edge.drafter.welcome()
            assert welcome is not None
            assert TRAINED_LEN == welcome.max_len
            edge.drafts_again()
            edge.generate([1, 2, 3], 2 * TRAINED_LEN)
            state = edge.drafter.state()
            assert state.blocked
            assert f"contexts of at most {TRAINED_LEN} tokens" in state.reason
            edge.generate([4, 5, 6], TRAINED_LEN // 2)  # another context is drafted again
            edge.joined()
        finally:
            edge.close()
