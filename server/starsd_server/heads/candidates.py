"""What a head proposes: the likeliest tokens of every row, from its logits."""

from __future__ import annotations

import functools

import torch

__all__ = ["candidates"]

BLOCK_BITS = 6
BLOCK = 1 << BLOCK_BITS  # columns whose maximum stands for all of them in the first pass


def candidates(log_probs: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities and ids of the `count` likeliest tokens of every row, likeliest first, ties by id.

    Args:
        log_probs: float32 [m, n].
        count: at most n.

    Returns:
        float32 [m, count] and int64 [m, count]. A row that holds a NaN comes back with one.
    """
    rows, columns = log_probs.shape
    ask = min(count + 1, columns)  # one more than wanted, to see a tie at the edge
    if columns % BLOCK == 0 and columns >= 4 * BLOCK * ask:
        # The best `ask` values lie in the `ask` blocks with the best maxima (up to ties, seen below).
        blocks = log_probs.view(-1, BLOCK)  # [m * B, BLOCK], B of a row
        chosen = blocks.amax(-1).view(rows, -1).topk(ask).indices  # [m, ask]
        places = chosen + _first_blocks(rows, columns // BLOCK, log_probs.device)
        near = blocks.index_select(0, places.view(-1)).view(rows, -1)  # whole blocks are copied
        best, place = near.topk(ask)
        ids = torch.add(place & (BLOCK - 1), chosen.gather(1, place >> BLOCK_BITS), alpha=BLOCK)
    else:
        best, ids = log_probs.topk(ask)
    tied = best[:, 1:] == best[:, :-1]
    if bool(tied.any()):
        for row in tied.any(-1).nonzero()[:, 0].tolist():
            order = torch.sort(log_probs[row], descending=True, stable=True)
            best[row], ids[row] = order.values[:ask], order.indices[:ask]
    return best[:, :count], ids[:, :count]


@functools.lru_cache(64)
def _first_blocks(rows: int, blocks: int, device: torch.device) -> torch.Tensor:
    """[m, 1] where the blocks of each row begin."""
    return torch.arange(0, rows * blocks, blocks, device=device)[:, None]
