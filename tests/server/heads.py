"""Small random draft heads."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from starsd_edge.bundle import Bundle
from starsd_edge.cli.drafts import identity_of
from starsd_edge.protocol.greeting import Identity
from starsd_server.heads.checkpoint import HeadManifest, save_head
from starsd_server.heads.head import EagleHead, HeadConfig, HeadKind

HIDDEN = 64
VOCAB = 512
TOY = Identity(
    target="toy",
    target_hash="0",
    vocab_size=VOCAB,
    tokenizer_hash="1",
    hidden_size=HIDDEN,
    feature_size=HIDDEN,
)


def small_config(kind: HeadKind, draft_vocab: int = 256) -> HeadConfig:
    """Two query heads per KV head; the draft vocabulary is a part of the target's."""
    return HeadConfig(
        kind=kind,
        hidden_size=HIDDEN,
        intermediate_size=128,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        vocab_size=VOCAB,
        draft_vocab_size=draft_vocab,
        feature_size=3 * HIDDEN if kind is HeadKind.EAGLE3 else HIDDEN,
        rms_eps=1e-5,
        rope_theta=10_000.0,
    )


def random_head(kind: HeadKind, seed: int = 0, config: HeadConfig | None = None) -> EagleHead:
    """Weights large enough that its trees have clear favourites."""
    generator = torch.Generator().manual_seed(seed)
    head = EagleHead(config or small_config(kind))
    with torch.no_grad():
        for name, weight in head.named_parameters():
            if weight.ndim == 2:
                nn.init.normal_(weight, std=2.0 * weight.shape[1] ** -0.5, generator=generator)
            else:
                nn.init.normal_(weight, mean=1.0, std=0.1, generator=generator)
            assert torch.isfinite(weight).all(), name
        nn.init.normal_(head.embedding, generator=generator)
        ids = torch.randperm(head.config.vocab_size, generator=generator)[: head.config.draft_vocab_size]
        head.draft_to_target.copy_(ids.sort().values)
    return head


def save_toy_head(folder: Path) -> Path:
    """A folder with a random EAGLE-1 head for TOY."""
    manifest = HeadManifest(name="toy-head", head=small_config(HeadKind.EAGLE1), identity=TOY)
    save_head(random_head(HeadKind.EAGLE1), manifest, folder)
    return folder


def save_head_for(bundle: Path, folder: Path) -> Path:
    """A folder with a random EAGLE-1 head for the target of `bundle`, which is HIDDEN wide."""
    manifest = Bundle.open(bundle).manifest
    identity = identity_of(manifest)
    config = replace(small_config(HeadKind.EAGLE1), vocab_size=identity.vocab_size)
    head = random_head(HeadKind.EAGLE1, config=config)
    save_head(head, HeadManifest(name="head-of-bundle", head=config, identity=identity), folder)
    return folder
