"""Training of heads, on a target small enough to learn in seconds."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from starsd_server.engine import Engine
from starsd_server.heads.grow import GrowthLimits
from starsd_server.heads.head import EagleHead, attention
from starsd_server.rows import Precision, RowHead
from starsd_server.step import Advanced, Extend, Grow, SessionRows, TreeReady
from starsd_server.train.data import Batch, batches, draft_vocabulary, gather
from starsd_server.train.evaluate import TreeShape, acceptance
from starsd_server.train.loop import Progress, Settings, Trainer
from starsd_server.train.start import finished_head
from starsd_server.train.unroll import soft_cross_entropy, unroll, unroll_loss

from .toy_target import DRAFT_VOCAB, HIDDEN, PROMPT_TOKENS, VOCAB, ToyTarget

SETTINGS = Settings(
    rows=256, steps=150, unroll=3, warmup=5, cooldown=40, matrix_lr=0.01, average=0.8, dtype=torch.float32
)
CHAIN = TreeShape(depth=3, width=1, size=4)


def ignore(progress: Progress) -> None:
    del progress


def random_toy_head(seed: int = 0) -> EagleHead:
    """All weights at work, unlike in an untrained head."""
    target = ToyTarget()
    head, _, _ = target.untrained_head(target.corpus(8), seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in (head.o_proj.weight, head.down_proj.weight, head.fc.weight[:, :HIDDEN]):
            parameter.normal_(std=0.2, generator=generator)
    return head


def test_training_lowers_the_loss_and_raises_acceptance_on_held_out_text() -> None:
    target = ToyTarget()
    corpus = target.corpus(200)
    held, taught = np.arange(0, 20, 2), np.arange(20, 200)
    head, embedding, scale = target.untrained_head(corpus)
    trainer = Trainer(head, corpus, taught, SETTINGS)
    before = acceptance(finished_head(head, trainer.averaged(), embedding, scale), corpus, held, [CHAIN])[0]
    reports: list[Progress] = []
    trainer.run(SETTINGS.steps, reports.append, report_every=10)
    after = acceptance(finished_head(head, trainer.averaged(), embedding, scale), corpus, held, [CHAIN])[0]
    assert reports[-1].cross_entropy[0] < 0.8 * reports[0].cross_entropy[0]
    assert after.tau > before.tau + 0.5
    assert 1.0 <= before.tau <= after.tau <= 1 + CHAIN.depth


def test_a_run_that_was_interrupted_ends_with_the_same_bits(tmp_path: Path) -> None:
    """Interrupted in the middle of the second epoch, so that the place in the data counts, too."""
    target = ToyTarget()
    corpus, taught = target.corpus(40), np.arange(40)

    def trainer() -> Trainer:
        return Trainer(target.untrained_head(corpus)[0], corpus, taught, replace(SETTINGS, steps=16))

    straight = trainer()
    straight.run(16, ignore)
    first = trainer()
    first.run(9, ignore)
    assert first.epoch >= 1
    first.save(tmp_path / "state.pt")
    second = trainer()
    second.resume(tmp_path / "state.pt")
    assert second.step == 9
    second.run(16, ignore)
    expected = straight.averaged() | dict(straight.head.named_parameters())
    found = second.averaged() | dict(second.head.named_parameters())
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[name], found[name]) for name in expected)


@torch.no_grad()
def test_every_unrolled_row_is_what_the_head_would_draft_there() -> None:
    """At every row and step against a chain grown from scratch: the head fed its own output, seeing the true
    features up to the chain's root and its own rows after it."""
    steps, width = 4, 16
    corpus = ToyTarget().corpus(6)
    long = gather(corpus, np.array([0, 1]), 64)
    batch = Batch(*(part[:, :width] for part in (long.tokens, long.features, long.teacher, long.valid)))
    head = random_toy_head()
    unrolled = unroll(head, batch, steps, torch.float32)
    for root in range(width - steps):
        chain, known = Chain(), slice(0, root + 1)
        features = batch.features[:, known]
        hidden = head.forward(batch.tokens[:, known], features, torch.arange(root + 1), chain.attend)[:, -1:]
        torch.testing.assert_close(hidden[:, 0], unrolled[0][:, root], atol=1e-4, rtol=1e-4)
        for step in range(1, steps):
            row = root + step
            hidden = head.forward(batch.tokens[:, row : row + 1], hidden, torch.tensor([row]), chain.attend)
            torch.testing.assert_close(hidden[:, 0], unrolled[step][:, row], atol=1e-4, rtol=1e-4)


class Chain:
    """All rows so far; each sees those before it."""

    def __init__(self) -> None:
        self.keys = self.values = torch.zeros(2, 0, 2, 8)

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        self.keys, self.values = torch.cat([self.keys, k], 1), torch.cat([self.values, v], 1)
        rows, total = k.shape[1], self.keys.shape[1]
        return attention(
            q, self.keys, self.values, torch.ones(rows, total, dtype=torch.bool).tril(total - rows)
        )


def test_the_loss_and_its_gradient_are_cross_entropys() -> None:
    """Against autograd through the plain formula."""
    generator = torch.Generator().manual_seed(0)
    guess, truth = (torch.randn(700, HIDDEN, generator=generator) for _ in range(2))
    lm_head = torch.randn(DRAFT_VOCAB, HIDDEN, generator=generator)
    guess.requires_grad_()
    expected = F.cross_entropy(guess @ lm_head.T, (truth @ lm_head.T).softmax(-1))
    (gradient,) = torch.autograd.grad(expected, guess)
    loss, entropy, agreed = soft_cross_entropy(guess, lm_head, truth, True)
    (found,) = torch.autograd.grad(loss, guess)
    torch.testing.assert_close(found, gradient, atol=1e-6, rtol=1e-4)
    torch.testing.assert_close(entropy, expected.detach())
    same = (guess @ lm_head.T).argmax(-1) == (truth @ lm_head.T).argmax(-1)
    assert agreed.item() == pytest.approx(same.float().mean().item())


def test_rows_of_the_prompt_and_of_padding_teach_nothing() -> None:
    """Another truth behind them leaves the loss as it is; behind an answer's row it does not."""
    corpus = ToyTarget().corpus(4)
    batch = gather(corpus, np.array([0]), 64)
    head = random_toy_head()
    answer = batch.valid[0].nonzero().squeeze(1)
    assert int(answer[0]) == PROMPT_TOKENS - 1
    assert int(answer[-1]) == corpus.lengths[0] - 2

    def loss(row: int | None) -> float:
        teacher = batch.teacher.clone()
        if row is not None:
            teacher[0, row] += 3
        changed = replace(batch, teacher=teacher)
        return unroll_loss(head, changed, 2, 1.0, 0.0, torch.float32, report=True).cross_entropy[0]

    assert loss(None) == loss(int(answer[0]) - 1) == loss(int(answer[-1]) + 1)
    assert loss(None) != loss(int(answer[3]))


def test_the_draft_vocabulary_is_the_most_frequent_tokens_of_answers() -> None:
    corpus = ToyTarget().corpus(3)
    tokens = np.full_like(corpus.tokens, 7)
    for i in range(3):  # prompts are full of token 1, answers of 7, with a few of 50 and 9
        begin, end = corpus.offsets[i], corpus.offsets[i + 1]
        tokens[begin : begin + PROMPT_TOKENS] = 1
        tokens[end - 3 : end - 1] = 50
        tokens[end - 1] = 9
    chosen = draft_vocabulary(replace(corpus, tokens=tokens), np.arange(3), VOCAB, 3)
    assert chosen.tolist() == [7, 9, 50]
    assert draft_vocabulary(corpus, np.arange(3), VOCAB, VOCAB).tolist() == list(range(VOCAB))


def test_an_epoch_gives_every_sequence_at_most_once_and_starts_where_it_is_told() -> None:
    corpus = ToyTarget().corpus(50)
    all_batches = list(batches(corpus, np.arange(50), rows=256, seed=3, epoch=1))
    rest = list(batches(corpus, np.arange(50), rows=256, seed=3, epoch=1, skip=2))
    assert len(rest) == len(all_batches) - 2
    assert all(torch.equal(a.tokens, b.tokens) for a, b in zip(all_batches[2:], rest, strict=True))
    assert all(batch.tokens.shape[1] % 32 == 0 for batch in all_batches)
    other = next(batches(corpus, np.arange(50), rows=256, seed=3, epoch=2))
    assert not torch.equal(all_batches[0].tokens, other.tokens)
    seen = [tuple(row.tolist()) for batch in all_batches for row in batch.tokens]
    assert len(seen) == len(set(seen)) >= 40


@pytest.mark.parametrize("shape", [TreeShape(3, 1, 4), TreeShape(3, 3, 6), TreeShape(4, 4, 12)])
def test_measured_acceptance_is_what_the_engines_trees_would_have_got(shape: TreeShape) -> None:
    """Against the service's own engine, round by round over the same answers."""
    corpus = ToyTarget().corpus(12)
    held = np.arange(0, 12, 2)
    head = random_toy_head().requires_grad_(False)
    measured = acceptance(head, corpus, held, [shape])[0]
    engine = Engine(RowHead(head, Precision.FLOAT32), len(held), 128)
    limits = GrowthLimits(max_nodes=shape.size, top_k=shape.width, steps=shape.depth - 1)
    accepted = []
    for slot, i in enumerate(held):
        begin, end = corpus.offsets[i], corpus.offsets[i + 1]
        tokens, features = corpus.tokens[begin:end], corpus.features[begin:end]
        session, root = SessionRows(slot), PROMPT_TOKENS  # index of the root in `tokens`
        while root + shape.depth < len(tokens):
            done = session.committed
            item: Extend | Grow = Extend(
                session, tokens[done + 1 : root + 1], features[done:root], done, limits
            )
            outcome = engine.step([item])[0]
            while isinstance(outcome, Advanced):
                outcome = engine.step([Grow(session)])[0]
            assert isinstance(outcome, TreeReady)
            node, depth = 0, 0
            edges = zip(outcome.parents.tolist(), outcome.tokens.tolist(), strict=True)
            children = {edge: index for index, edge in enumerate(edges, start=1)}  # node 0 is the root
            while (node, int(tokens[root + depth + 1])) in children:
                node, depth = children[node, int(tokens[root + depth + 1])], depth + 1
            accepted.append(depth)
            root += depth + 1
    assert measured.rounds == len(accepted)
    assert measured.tau == pytest.approx(1 + np.mean(accepted))
