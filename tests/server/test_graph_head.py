"""A draft head in graphs: exact integer products, the same bits whatever is beside a row, NaN kept."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from starsd_server.graph_head import FIRST_POSITIONS, GraphHead, GraphLinear, graphs_available
from starsd_server.heads.head import HeadKind, attention

from .heads import HIDDEN, VOCAB, random_head, small_config

pytestmark = pytest.mark.skipif(
    not graphs_available(), reason="no ONNX Runtime with exact int8 products here"
)

ROWS, COUNT = 70, 7
NOISE = 0.02  # on average, of the largest value: what int8 leaves; a wrong angle leaves ten times as much


def own_row_only(queries: Tensor, fresh: Tensor) -> Tensor:
    """The mixture of rows that see themselves alone."""
    return fresh[1].repeat_interleave(len(queries) // fresh.shape[1], dim=0)


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attention(q, k, v, torch.ones(len(q), len(q), dtype=torch.bool).tril())


def causal_by_head(queries: Tensor, fresh: Tensor) -> Tensor:
    k, v = fresh.transpose(1, 2)
    return causal(queries.transpose(0, 1) * math.sqrt(queries.shape[-1]), k, v).transpose(0, 1)


def deviation(expected: Tensor, found: Tensor) -> float:
    return float((expected - found).abs().mean() / expected.abs().max())


def inputs() -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, hidden vectors and positions of ROWS rows."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, VOCAB, (ROWS,), generator=generator)
    return tokens, torch.randn(ROWS, HIDDEN, generator=generator), torch.arange(ROWS)


@pytest.mark.parametrize("rows", [1, 3, 16, 37])
def test_products_are_exact_at_the_ends_of_their_range(rows: int) -> None:
    """All products of one sign: kernels that saturate a partial sum would show it here."""
    x, weight = torch.ones(rows, 576), torch.ones(64, 576)
    x[1::2] = -1.0
    weight[1::2] = -1.0
    expected = x.double() @ weight.double().T
    assert torch.allclose(GraphLinear(weight)(x).double(), expected, rtol=1e-5)


def test_each_part_of_an_input_keeps_its_own_scale() -> None:
    """A feature a thousand times larger than the embedding beside it does not round that away."""
    generator = torch.Generator().manual_seed(2)
    x, weight = torch.randn(5, 160, generator=generator), torch.randn(96, 160, generator=generator)
    x[:, 80:] *= 1000.0
    weight[:, 80:] = 0.0
    expected = x @ weight.T
    assert torch.allclose(GraphLinear(weight, parts=2)(x), expected, atol=0.05 * float(expected.abs().max()))


@pytest.mark.parametrize("qkv_bias", [False, True])
@pytest.mark.parametrize("kind", list(HeadKind))
@torch.inference_mode()
def test_it_computes_what_the_head_in_float32_does(kind: HeadKind, *, qkv_bias: bool) -> None:
    head = random_head(kind, config=replace(small_config(kind), qkv_bias=qkv_bias))
    int8, arguments = GraphHead(head), inputs()
    expected, found = head.forward(*arguments, causal), int8.forward(*arguments, causal_by_head)
    assert deviation(expected, found) < NOISE
    log_probs = head.logits(expected).log_softmax(-1)
    best, ids = int8.candidates(expected, COUNT)
    assert deviation(log_probs.gather(1, ids), best) < NOISE
    assert (best[:, :-1] >= best[:, 1:]).all()
    assert (best[:, -1:] >= log_probs.topk(COUNT + 5).values[:, -1:] - 0.5).all()


@torch.inference_mode()
def test_positions_have_no_end() -> None:
    """Angles are kept for as many positions as were asked for, and more when later ones come."""
    head, later = random_head(HeadKind.EAGLE1), FIRST_POSITIONS + 50
    tokens, hidden, positions = inputs()
    expected = head.forward(tokens, hidden, positions + later, causal)
    found = GraphHead(head).forward(tokens, hidden, positions + later, causal_by_head)
    assert deviation(expected, found) < NOISE


@torch.inference_mode()
def test_equally_likely_tokens_are_ordered_by_id() -> None:
    head = random_head(HeadKind.EAGLE1)
    head.lm_head.copy_(head.lm_head[torch.arange(len(head.lm_head)) % 3])
    hidden = inputs()[1]
    best, ids = GraphHead(head).candidates(hidden, COUNT)
    assert (best == best[:, :1]).all()
    assert [(ids[:, :1] + 3 * torch.arange(COUNT)).tolist()] == [ids.tolist()]


@pytest.mark.parametrize("kind", list(HeadKind))
@torch.inference_mode()
def test_a_row_has_the_same_bits_alone_and_in_a_batch(kind: HeadKind) -> None:
    head = GraphHead(random_head(kind))
    together = head.forward(*inputs(), own_row_only)
    best, ids = head.candidates(together, COUNT)
    for rows in (1, 2, 3, 5, 8, 13, 16, 33):
        for start in (0, 1, 30, ROWS - rows):
            own = slice(start, start + rows)
            alone = head.forward(*(part[own] for part in inputs()), own_row_only)
            assert torch.equal(together[own], alone)
            best_alone, ids_alone = head.candidates(alone, COUNT)
            assert torch.equal(best[own], best_alone)
            assert torch.equal(ids[own], ids_alone)


@pytest.mark.parametrize("kind", list(HeadKind))
@pytest.mark.parametrize("poison", [math.nan, math.inf])
@torch.inference_mode()
def test_a_row_that_is_not_finite_shows_it_and_leaves_the_others_alone(kind: HeadKind, poison: float) -> None:
    """The largest magnitude of a row, by which it is quantised, passes over a NaN."""
    head = GraphHead(random_head(kind))
    tokens, hidden, positions = inputs()
    clean, clean_ids = head.candidates(head.forward(tokens, hidden, positions, own_row_only), COUNT)
    hidden[7, 11] = poison
    best, ids = head.candidates(head.forward(tokens, hidden, positions, own_row_only), COUNT)
    assert [7] == torch.nonzero(~torch.isfinite(best).all(1)).flatten().tolist()
    others = torch.arange(ROWS) != 7
    assert torch.equal(clean[others], best[others])
    assert torch.equal(clean_ids[others], ids[others])
