"""The EAGLE draft head, EAGLE-1 and EAGLE-3 written once.

    EAGLE-1   x = fc(embedding, hidden); attention and MLP on x; the target's LM head on the output
    EAGLE-3   x = hidden; attention reads norm(embedding), norm(hidden); own final norm and LM head

One **row** is a token and the hidden vector of the position before it, so the head guesses the hidden vector
*of* that token, and from it the token after. What a caller does with rows:

* *Extend.* Row i of a context is (feature of position i, token at position i + 1), at head position i. The
  features come from the target. EAGLE-3's raw taps [n, 3H] went through `project` before: an edge does
  that with its copy of `fc`, so `forward` and a service take H wide vectors.
* *Grow.* The row of a tree node of depth d >= 1 pairs its token with the head's **own output** of its
  parent's row (un-normed, never projected), at head position `base_len - 2 + d`; the root's row is the last
  extended one, at `base_len - 2`.
* *Attention* belongs to the caller, who alone knows where past rows live. `forward` calls `attend(q, k, v)`
  once, q and k already rotated; the caller stores k and v where its rows belong and returns the mixture over
  all rows that each query may see: its context's extended rows, its ancestors in the tree, itself.
  `attention` below is that mixture for dense tensors.

Leading dimensions are free: an engine runs [n] rows of many sessions, training runs [B, T].

Sources: Li et al., EAGLE (arXiv 2401.15077), EAGLE-3 (arXiv 2503.01840); layouts as published by SafeAILab.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from starsd_edge.protocol.limits import MAX_FEATURE_SIZE, MAX_VOCAB_SIZE

__all__ = ["Attend", "EagleHead", "HeadConfig", "HeadKind", "attention"]

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(q [..., heads, D], k and v [..., kv_heads, D]) -> [..., heads, D]; D is the head dimension."""


class HeadKind(enum.Enum):
    EAGLE1 = "eagle1"
    EAGLE3 = "eagle3"

    @property
    def label(self) -> str:
        """`EAGLE-1`"""
        return f"EAGLE-{self.value[-1]}"


# Far beyond any head, far below what overflows or is allocated before anyone noticed.
MAX_SIZE = 1 << 18
RANGES: tuple[tuple[str, float, float], ...] = (
    ("hidden_size", 1, MAX_FEATURE_SIZE),
    ("intermediate_size", 1, MAX_SIZE),
    ("num_heads", 1, MAX_SIZE),
    ("num_kv_heads", 1, MAX_SIZE),
    ("head_dim", 2, MAX_SIZE),
    ("vocab_size", 1, MAX_VOCAB_SIZE),
    ("draft_vocab_size", 1, MAX_VOCAB_SIZE),
    ("feature_size", 1, MAX_SIZE),
    ("rms_eps", 1e-12, 1.0),
    ("rope_theta", 1.0, 1e12),
    ("rope_scale", 1e-3, 1e6),
)


@dataclass(frozen=True, slots=True)
class HeadConfig:
    """Everything that shapes a head. All sizes in elements. Raises ValueError beyond RANGES.

    feature_size      width of what the target gives: H, or the taps of EAGLE-3 side by side (3H)
    draft_vocab_size  tokens the head can propose; equal to `vocab_size` when it can propose all
    rope_scale        positions are divided by it ("linear" RoPE scaling)
    """

    kind: HeadKind
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    draft_vocab_size: int
    feature_size: int
    rms_eps: float
    rope_theta: float
    rope_scale: float = 1.0
    fc_bias: bool = False
    qkv_bias: bool = False

    def __post_init__(self) -> None:
        for name, least, most in RANGES:
            value = getattr(self, name)
            if not least <= value <= most:  # nor is NaN
                raise ValueError(f"{name} is {value}; it must be {least} to {most}")
        if self.num_heads % self.num_kv_heads or self.head_dim % 2:
            raise ValueError(
                f"{self.num_heads} heads over {self.num_kv_heads} KV heads of {self.head_dim} do not fit"
            )
        if self.draft_vocab_size > self.vocab_size:
            raise ValueError(f"a draft vocabulary of {self.draft_vocab_size} of {self.vocab_size} tokens")
        if self.kind is HeadKind.EAGLE1 and self.feature_size != self.hidden_size:
            raise ValueError(f"EAGLE-1 takes features {self.hidden_size} wide, not {self.feature_size}")


class EagleHead(nn.Module):
    """One draft head with the target's token embedding and the LM-head rows it proposes from.

    embedding        [V, H] the target's, frozen
    lm_head          [draft V, H] EAGLE-1: rows of the target's LM head, frozen; EAGLE-3: its own
    draft_to_target  int64 [draft V] the target's token id of each draft id
    """

    embedding: Tensor
    draft_to_target: Tensor
    angle_per_position: Tensor

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        self.config = config
        c = config
        eagle3 = c.kind is HeadKind.EAGLE3
        fc_in = c.feature_size if eagle3 else 2 * c.hidden_size
        attention_in = 2 * c.hidden_size if eagle3 else c.hidden_size
        self.fc = nn.Linear(fc_in, c.hidden_size, bias=c.fc_bias)
        self.embed_norm = _RMSNorm(c.hidden_size, c.rms_eps) if eagle3 else None
        self.hidden_norm = _RMSNorm(c.hidden_size, c.rms_eps) if eagle3 else None
        qkv_out = (c.num_heads + 2 * c.num_kv_heads) * c.head_dim
        self.qkv_proj = nn.Linear(attention_in, qkv_out, bias=c.qkv_bias)
        self.o_proj = nn.Linear(c.num_heads * c.head_dim, c.hidden_size, bias=False)
        self.mlp_norm = _RMSNorm(c.hidden_size, c.rms_eps)
        self.gate_up_proj = nn.Linear(c.hidden_size, 2 * c.intermediate_size, bias=False)
        self.down_proj = nn.Linear(c.intermediate_size, c.hidden_size, bias=False)
        self.out_norm = _RMSNorm(c.hidden_size, c.rms_eps) if eagle3 else None
        self.lm_head = nn.Parameter(torch.zeros(c.draft_vocab_size, c.hidden_size), requires_grad=eagle3)
        self.register_buffer("embedding", torch.zeros(c.vocab_size, c.hidden_size))
        self.register_buffer("draft_to_target", torch.arange(c.draft_vocab_size))
        # On a real device even while a checkpoint is read into a head without memory (torch.device("meta")).
        exponents = torch.arange(0, c.head_dim, 2, dtype=torch.float64, device="cpu") / c.head_dim
        angle = (c.rope_theta**-exponents / c.rope_scale).float()  # [D / 2] radians per position
        self.register_buffer("angle_per_position", angle, persistent=False)

    def forward(self, tokens: Tensor, hidden: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """One step: the head's guess of each token's hidden vector, before any norm.

        Args:
            tokens: int [...] ids of the target's vocabulary.
            hidden: [..., H] projected features, or this method's own output for the parent rows.
            positions: int [...] head positions.
            attend: stores and mixes, see the module's text; called exactly once.

        Returns:
            [..., H], to be fed back as `hidden` and to be read by `logits`.
        """
        x, attention_in = self._fuse(tokens, hidden)
        x = x + self.o_proj(self._attention(attention_in, positions, attend))
        gate, up = self.gate_up_proj(self.mlp_norm(x)).chunk(2, dim=-1)
        return x + self.down_proj(F.silu(gate) * up)  # type: ignore[no-any-return]  # nn.Module calls are Any

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., draft V] scores of the draft vocabulary for the token after each row's, in the head's dtype.
        Take log-softmax in float32: ties in half precision tear trees apart."""
        return F.linear(hidden if self.out_norm is None else self.out_norm(hidden), self.lm_head)

    def project(self, features: Tensor) -> Tensor:
        """[..., F] -> [..., H]: what the target gives becomes what `forward` takes. EAGLE-1: unchanged."""
        return self.fc(features) if self.config.kind is HeadKind.EAGLE3 else features

    def _fuse(self, tokens: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """The residual stream and what attention reads."""
        embedded = F.embedding(tokens, self.embedding).to(hidden.dtype)
        if self.embed_norm is None or self.hidden_norm is None:
            x = self.fc(torch.cat([embedded, hidden], dim=-1))
            return x, x
        return hidden, torch.cat([self.embed_norm(embedded), self.hidden_norm(hidden)], dim=-1)

    def _attention(self, x: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        c = self.config
        rows = self.qkv_proj(x).view(*x.shape[:-1], c.num_heads + 2 * c.num_kv_heads, c.head_dim)
        q, k, v = rows.split([c.num_heads, c.num_kv_heads, c.num_kv_heads], dim=-2)
        angles = positions[..., None].float() * self.angle_per_position
        cos, sin = angles.cos()[..., None, :].to(q.dtype), angles.sin()[..., None, :].to(q.dtype)
        return attend(_rotate(q, cos, sin), _rotate(k, cos, sin), v).flatten(-2)


class _RMSNorm(nn.RMSNorm):
    """As its parent, but a row of another precision than the weight (autocast) takes the fused kernel too."""

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Grouped-query attention over dense rows, softmax in float32.

    Args:
        q: [..., n, heads, D].
        k, v: [..., m, kv_heads, D].
        mask: bool [..., n, m], True where a query sees a row; every query must see at least one.

    Returns:
        [..., n, heads, D].
    """
    groups = q.shape[-2] // k.shape[-2]
    grouped = q.reshape(*q.shape[:-2], k.shape[-2], groups, q.shape[-1]).movedim(
        -4, -2
    )  # [..., kv, groups, n, D]
    keys, values = (rows.movedim(-3, -2)[..., None, :, :] for rows in (k, v))  # [..., kv, 1, m, D]
    scores = (grouped @ keys.transpose(-1, -2)).float() / math.sqrt(q.shape[-1])
    scores = scores.masked_fill(~mask[..., None, None, :, :], -math.inf)
    mixed = scores.softmax(dim=-1).to(v.dtype) @ values  # [..., kv, groups, n, D]
    return mixed.movedim(-2, -4).flatten(-3, -2)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of [..., heads, D], halves paired as in Llama (Su et al., arXiv 2104.09864)."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
