"""What a head proposes: the likeliest tokens of every row, from its logits."""

from __future__ import annotations

import torch

__all__ = ["candidates"]

BLOCK = 64  # columns whose maximum stands for all of them in the first pass


def candidates(logits: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities and ids of the `count` likeliest tokens of every row, likeliest first, ties by id.

    Args:
        logits: [m, n] of any floating dtype; the log-softmax is taken in float32.
        count: at most n.

    Returns:
        float32 [m, count] and int64 [m, count]. A row that holds a NaN or infinity comes back with one.
    """
    log_probs = torch.log_softmax(logits.float(), dim=-1)
    rows, columns = log_probs.shape
    ask = min(count + 1, columns)  # one more than wanted, to see a tie at the edge
    if columns % BLOCK == 0 and columns >= 4 * BLOCK * ask:
        # The best `ask` values lie in the `ask` blocks with the best maxima (up to ties, seen below).
        blocks = log_probs.view(-1, BLOCK)  # [m * B, BLOCK], B of a row
        count_of_row = columns // BLOCK
        chosen = blocks.amax(-1).view(rows, -1).topk(ask, dim=-1).indices  # [m, ask]
        first = torch.arange(0, rows * count_of_row, count_of_row, device=logits.device)[:, None]
        near = blocks.index_select(0, (chosen + first).flatten()).view(rows, -1)  # whole blocks are copied
        best, place = near.topk(ask, dim=-1)
        ids = chosen.gather(1, place // BLOCK) * BLOCK + place % BLOCK
    else:
        best, ids = log_probs.topk(ask, dim=-1)
    tied = (best[:, 1:] == best[:, :-1]).any(-1)
    if bool(tied.any()):
        for row in tied.nonzero()[:, 0].tolist():
            order = torch.sort(log_probs[row], descending=True, stable=True)
            best[row], ids[row] = order.values[:ask], order.indices[:ask]
    return best[:, :count], ids[:, :count]
