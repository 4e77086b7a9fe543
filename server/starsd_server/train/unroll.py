"""The training step: the head drafts as it will in service, several steps deep at every position at once.

Step 0 reads the target's features. Step s > 0 reads, at row t, the head's own output of step s - 1 at row
t - 1, and sees of the past what it would see while growing a chain from row t - s: extended rows (step 0) up
to t - s, then its own rows of steps 1 to s at t - s + 1 ... t. Each step is judged by the target's own
distribution at that position.

Sources: training-time test, EAGLE-3 (arXiv 2503.01840); the same idea in HASS (arXiv 2408.15766).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from starsd_server.heads.head import EagleHead
from starsd_server.train.data import Batch

__all__ = ["UnrollLoss", "expected_rows", "soft_cross_entropy", "unroll", "unroll_loss"]

# Rows of logits held at once: few enough to stay in cache, enough to keep the matrix units busy.
LOGIT_CHUNK_ROWS = 512


@dataclass(frozen=True, slots=True)
class UnrollLoss:
    """total: to call backward on. agreement [steps]: how often the head's first choice was the target's."""

    total: Tensor
    cross_entropy: list[float] = field(default_factory=list)
    agreement: list[float] = field(default_factory=list)


def unroll_loss(
    head: EagleHead,
    batch: Batch,
    steps: int,
    decay: float,
    regression: float,
    dtype: torch.dtype,
    report: bool,
) -> UnrollLoss:
    """Soft cross-entropy over `steps` unrolled steps, weighted 1, decay, decay², ..., plus `regression` times
    the smooth L1 distance of guess and teacher feature. Matrix products run in `dtype`."""
    lm_head = head.lm_head.detach().to(dtype)
    # The first rows have no chain of `steps` behind them.
    counts = batch.valid & (torch.arange(batch.tokens.shape[1], device=batch.tokens.device) >= steps - 1)
    picked = counts.flatten().nonzero().squeeze(1)
    truth = batch.teacher.flatten(0, 1)[picked]
    wanted = expected_rows(truth, lm_head)
    weights = [decay**step for step in range(steps)]
    total: Tensor = torch.zeros((), device=batch.tokens.device)
    cross_entropy, agreement = [], []
    for weight, hidden in zip(weights, unroll(head, batch, steps, dtype), strict=True):
        guess = hidden.flatten(0, 1)[picked]
        loss, entropy, agreed = soft_cross_entropy(guess, lm_head, truth, report, wanted)
        if regression:
            loss = loss + regression * F.smooth_l1_loss(guess.float(), truth)
        total = total + weight / sum(weights) * loss
        cross_entropy.append(entropy.item())
        agreement.append(agreed.item())
    return UnrollLoss(total, cross_entropy, agreement)


def unroll(head: EagleHead, batch: Batch, steps: int, dtype: torch.dtype) -> list[Tensor]:
    """The head's output [B, T, H] of every step: row t of step s is the last of a chain of s draft tokens on
    the extended row t - s. Rows t < s have no such chain and mean nothing."""
    width = batch.tokens.shape[1]
    device = batch.tokens.device
    positions = torch.arange(width, device=device)
    rows = _UnrolledRows(positions, dtype)
    hidden, outputs = batch.features.to(dtype), []
    with torch.autocast(device.type, dtype, enabled=dtype is not torch.float32):
        for step in range(steps):
            if step:
                hidden = torch.cat([hidden[:, :1].detach(), hidden[:, :-1]], dim=1)
            hidden = head.forward(batch.tokens, hidden, positions, rows.attend)
            outputs.append(hidden)
    return outputs


class _UnrolledRows:
    """Keys and values of all steps so far, and what each step may see of them."""

    def __init__(self, positions: Tensor, dtype: torch.dtype) -> None:
        self._keys: list[Tensor] = []  # per step [B, T, kv, D]
        self._values: list[Tensor] = []
        self._age = positions[:, None] - positions  # [T, T] query row minus key row
        self._dtype = dtype

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        step = len(self._keys)
        self._keys.append(k)
        self._values.append(v)
        kv, groups, scale = k.shape[-2], q.shape[-2] // k.shape[-2], 1 / math.sqrt(q.shape[-1])
        batch, width = q.shape[:2]
        grouped = (q * scale).view(batch, width, kv, groups, -1).permute(0, 2, 3, 1, 4)  # [B, kv, g, T, D]
        stacked = grouped.reshape(batch * kv, groups * width, -1)
        keys = self._keys[0].permute(0, 2, 3, 1).reshape(batch * kv, -1, width)
        values = self._values[0].permute(0, 2, 1, 3).reshape(batch * kv, width, -1)
        bias = torch.zeros_like(self._age, dtype=self._dtype).masked_fill(self._age < step, -math.inf)
        scores = torch.baddbmm(bias.repeat(groups, 1), stacked, keys).view(batch, kv, groups, width, width)
        parts = [scores]
        own = [
            (_shift(self._keys[i], step - i), _shift(self._values[i], step - i)) for i in range(1, step + 1)
        ]
        for i, (key, _) in enumerate(own, start=1):
            score = (grouped * key.transpose(1, 2)[:, :, None]).sum(-1, keepdim=True)  # [B, kv, g, T, 1]
            parts.append(score.masked_fill(self._age[:, :1] < step - i, -math.inf).to(scores.dtype))
        shares = torch.cat(parts, dim=-1).softmax(dim=-1)
        past = shares[..., :width].reshape(batch * kv, groups * width, width)
        mixed = (past @ values).view(batch, kv, groups, width, -1)
        for i, (_, value) in enumerate(own):
            mixed = mixed + shares[..., width + i, None] * value.transpose(1, 2)[:, :, None]
        return mixed.permute(0, 3, 1, 2, 4).flatten(2, 3)


def _shift(rows: Tensor, by: int) -> Tensor:
    """Row t becomes what was row t - by; the first rows are zeros."""
    return F.pad(rows[:, : rows.shape[1] - by], (0, 0, 0, 0, by, 0)) if by else rows


@torch.no_grad()
def expected_rows(features: Tensor, lm_head: Tensor) -> Tensor:
    """[R, H]: the mean row of `lm_head` under softmax(features @ lm_head.T)."""
    features = features.to(lm_head.dtype)
    expected = torch.empty_like(features)
    for begin in range(0, len(features), LOGIT_CHUNK_ROWS):
        chunk = slice(begin, begin + LOGIT_CHUNK_ROWS)
        torch.mm((features[chunk] @ lm_head.T).softmax(dim=-1), lm_head, out=expected[chunk])
    return expected


class _SoftCrossEntropy(torch.autograd.Function):
    """Mean cross-entropy of softmax(guess @ lm_head.T) against softmax(truth @ lm_head.T), for `guess` only.

    Its gradient, (softmax(guess) - softmax(truth)) @ lm_head, is the expected LM-head row of the guess less
    that of the truth (`wanted`, the same for all steps). So one pass over the logits is enough, chunk by
    chunk while they are in the cache; the loss itself costs more passes and is computed only for a report.
    """

    @staticmethod
    def forward(
        ctx: Any, guess: Tensor, lm_head: Tensor, truth: Tensor, report: bool, wanted: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.save_for_backward((expected_rows(guess, lm_head) - wanted).to(guess.dtype) / max(1, len(guess)))
        entropy, agreed = (
            _compare(guess, truth, lm_head) if report else guess.new_zeros(2, dtype=torch.float32)
        )
        ctx.mark_non_differentiable(entropy, agreed)
        return entropy.clone(), entropy, agreed

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * grads[0], None, None, None, None


def soft_cross_entropy(
    guess: Tensor, lm_head: Tensor, truth: Tensor, report: bool, wanted: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Mean cross-entropy of the distributions that `guess` and `truth` [R, H] give under `lm_head`.

    Args:
        wanted: `expected_rows(truth, lm_head)`, when the caller has it already.

    Returns:
        The loss (its value is right only for a report; its gradient always), the cross-entropy in nats, and
        the share of rows whose most probable token is the same.
    """
    if wanted is None:
        wanted = expected_rows(truth, lm_head)
    apply: Callable[..., tuple[Tensor, Tensor, Tensor]] = _SoftCrossEntropy.apply
    return apply(guess, lm_head, truth, report, wanted)


def _compare(guess: Tensor, truth: Tensor, lm_head: Tensor) -> tuple[Tensor, Tensor]:
    """Mean cross-entropy in nats, and the share of rows whose most probable draft token is the same."""
    entropy, agreed = guess.new_zeros(2, dtype=torch.float32)
    for begin in range(0, len(guess), LOGIT_CHUNK_ROWS):
        chunk = slice(begin, begin + LOGIT_CHUNK_ROWS)
        own, target = (rows[chunk].to(lm_head.dtype) @ lm_head.T for rows in (guess, truth))
        entropy -= (target.softmax(-1) * own.log_softmax(-1)).sum(dtype=torch.float32)
        agreed += (own.argmax(-1) == target.argmax(-1)).sum()
    return entropy / max(1, len(guess)), agreed / max(1, len(guess))
