"""Rows of the draft head: exact integer products, the same bits whatever is batched beside them."""

from __future__ import annotations

import pytest
import torch

from starsd_server.rows import Int8Linear, int8_available, padded

needs_int8 = pytest.mark.skipif(not int8_available(), reason="no exact and fast int8 products on this CPU")


@needs_int8
@pytest.mark.parametrize("rows", [1, 3, 16, 37])
def test_int8_products_are_exact_at_the_ends_of_their_range(rows: int) -> None:
    """All products of one sign: kernels that saturate a partial sum would show it here."""
    x, weight = torch.ones(rows, 576), torch.ones(64, 576)
    x[1::2] = -1.0
    weight[1::2] = -1.0
    expected = x.double() @ weight.double().T
    assert torch.allclose(Int8Linear(weight)(x).double(), expected, rtol=1e-5)


@needs_int8
def test_a_row_has_the_same_bits_alone_and_in_a_batch() -> None:
    generator = torch.Generator().manual_seed(1)
    linear = Int8Linear(torch.randn(96, 160, generator=generator), parts=2)
    x = torch.randn(37, 160, generator=generator)
    together = linear(x)
    assert all(torch.equal(linear(x[at : at + 1])[0], together[at]) for at in range(len(x)))


def test_few_numbers_of_rows_need_kernels_of_their_own() -> None:
    """Each costs compiling and memory; none is padded by much."""
    sizes = {padded(rows) for rows in range(1, 1025)}
    assert len(sizes) < 48
    assert all(rows <= padded(rows) < rows + 64 for rows in range(1, 1025))
    assert all(padded(rows) <= 1.25 * rows + 1 for rows in range(1, 1025))
