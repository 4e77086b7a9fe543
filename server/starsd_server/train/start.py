"""Where training begins and what it leaves: a head that repeats its feature, and the head to ship.

An untrained head passes the target's feature through unchanged, so its first guess is "the same distribution
again", and training only has to learn the change a token makes. (From random weights the same head needed
several times the updates: facts of a prototype.)

Token embeddings are far smaller than features (0.1 against 2 in the embedded model), so that the part of `fc`
that reads them would have to grow twenty times larger than the rest. It is trained on embeddings that are
scaled up, and the scale is folded into `fc` afterwards, which changes nothing but the rounding.
"""

from __future__ import annotations

import torch
from torch import Tensor

from starsd_server.heads.head import EagleHead, HeadConfig, HeadKind

__all__ = ["embedding_scale", "finished_head", "new_head"]


def new_head(
    config: HeadConfig, embedding: Tensor, lm_head: Tensor, draft_to_target: Tensor, scale: float, seed: int
) -> EagleHead:
    """An EAGLE-1 head that passes features through.

    Args:
        embedding: [V, H] the target's.
        lm_head: [draft V, H] the rows of the target's LM head for `draft_to_target` [draft V].
        scale: what embeddings are multiplied by while the head is trained.
    """
    if config.kind is not HeadKind.EAGLE1:
        raise ValueError("only EAGLE-1 heads are trained here")
    torch.manual_seed(seed)
    head = EagleHead(config)
    H = config.hidden_size
    with torch.no_grad():
        head.fc.weight[:, :H].zero_()
        head.fc.weight[:, H:] = torch.eye(H)
        head.o_proj.weight.zero_()
        head.down_proj.weight.zero_()
        head.lm_head.copy_(lm_head)
        head.draft_to_target.copy_(draft_to_target)
    head.embedding = embedding * scale
    return head


def embedding_scale(embedding: Tensor, features: Tensor) -> float:
    """The power of two nearest to how much larger features are than embeddings: exact in every precision."""
    ratio = features.float().pow(2).mean().sqrt() / embedding.float().pow(2).mean().sqrt()
    return float(2.0 ** ratio.log2().round())


def finished_head(head: EagleHead, learned: dict[str, Tensor], embedding: Tensor, scale: float) -> EagleHead:
    """A head with the `learned` tensors (by name) that reads embeddings as they are."""
    finished = EagleHead(head.config)
    with torch.no_grad():
        for name, parameter in finished.named_parameters():
            parameter.copy_(learned[name] if name in learned else head.get_parameter(name))
        finished.fc.weight[:, : head.config.hidden_size] *= scale
        finished.draft_to_target.copy_(head.draft_to_target)
    finished.embedding = embedding
    finished.requires_grad_(False)
    return finished
