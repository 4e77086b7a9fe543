"""What a head proposes: the likeliest tokens of every row, from its logits."""

from __future__ import annotations

import torch

__all__ = ["candidates", "candidates_by_key"]

BLOCK = 64  # columns whose maximum stands for all of them in the first pass
ID_BITS = 32  # of a key
MAGNITUDE = 0x7FFFFFFF  # of a float32, without its sign


def candidates(logits: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities and ids of the `count` likeliest tokens of every row, likeliest first, ties by id.

    Args:
        logits: [m, n] of any floating dtype; the log-softmax is taken in float32.
        count: at most n.

    Returns:
        float32 [m, count] and int64 [m, count]. A row that holds a NaN or infinity comes back with one.
    """
    log_probs = torch.log_softmax(logits.float(), dim=-1)
    ask = min(count + 1, log_probs.shape[1])  # one more than wanted, to see a tie at the edge
    best, ids = _largest(log_probs, ask)
    tied = (best[:, 1:] == best[:, :-1]).any(-1)
    if bool(tied.any()):
        for row in tied.nonzero()[:, 0].tolist():
            order = torch.sort(log_probs[row], descending=True, stable=True)
            best[row], ids[row] = order.values[:ask], order.indices[:ask]
    return best[:, :count], ids[:, :count]


def candidates_by_key(logits: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The same, without the host looking at anything: for an accelerator, which it would have to wait for.

    Half-precision logits tie in most rows. So what is ordered are keys without ties: above the
    log-probability, as an integer of the same order, below it the id, counted down.
    """
    log_probs = torch.log_softmax(logits.float(), dim=-1)
    bits = (log_probs + 0.0).view(torch.int32)  # of both zeros only the positive one
    ordered = torch.where(bits < 0, bits ^ MAGNITUDE, bits).long()
    keys = (ordered << ID_BITS) - torch.arange(log_probs.shape[1], device=logits.device)
    _, ids = _largest(keys, count)
    return log_probs.gather(1, ids), ids


def _largest(values: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest `count` of every row [m, n] and where they are; of equal ones, any."""
    rows, columns = values.shape
    if columns % BLOCK or columns < 4 * BLOCK * count:
        best, places = values.topk(count, dim=-1)
        return best, places
    # The best `count` values lie in the `count` blocks with the best maxima, up to ties.
    blocks = values.view(-1, BLOCK)  # [m * B, BLOCK], B of a row
    count_of_row = columns // BLOCK
    chosen = blocks.amax(-1).view(rows, -1).topk(count, dim=-1).indices  # [m, count]
    first = torch.arange(0, rows * count_of_row, count_of_row, device=values.device)[:, None]
    near = blocks.index_select(0, (chosen + first).flatten()).view(rows, -1)  # whole blocks are copied
    best, place = near.topk(count, dim=-1)
    return best, chosen.gather(1, place // BLOCK) * BLOCK + place % BLOCK
