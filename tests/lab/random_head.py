"""Writes a draft head with random weights for a bundle: the lab tries deployment and link, not acceptance.

python tests/lab/random_head.py BUNDLE OUT
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch

from starsd_edge.bundle import Bundle
from starsd_edge.cli.drafts import identity_of
from starsd_server.heads.checkpoint import HeadManifest, save_head
from starsd_server.heads.head import EagleHead, HeadConfig, HeadKind
from starsd_server.heads.target import open_target_rows

DRAFT_VOCAB = 1024
HEAD_DIM = 64


def write_random_head(bundle: Path, out: Path) -> None:
    """A one-layer head with `bundle`'s shapes, its embedding and LM-head rows included."""
    manifest = Bundle.open(bundle).manifest
    rows = open_target_rows(bundle)
    hidden = manifest.shapes.hidden_size
    draft_vocab = min(DRAFT_VOCAB, manifest.shapes.vocab_size)
    config = HeadConfig(
        kind=HeadKind.EAGLE1,
        hidden_size=hidden,
        intermediate_size=256,
        num_heads=hidden // HEAD_DIM,
        num_kv_heads=hidden // HEAD_DIM,
        head_dim=HEAD_DIM,
        vocab_size=manifest.shapes.vocab_size,
        draft_vocab_size=draft_vocab,
        feature_size=manifest.shapes.feature_size,
        rms_eps=1e-5,
        rope_theta=10_000.0,
    )
    torch.manual_seed(0)
    head = EagleHead(config)
    tokens = np.arange(draft_vocab, dtype=np.int64)
    with torch.no_grad():
        for weight in head.parameters():
            torch.nn.init.normal_(weight, std=0.02)
        head.embedding.copy_(torch.from_numpy(rows.embedding()))
        head.draft_to_target.copy_(torch.from_numpy(tokens))
        head.lm_head.copy_(torch.from_numpy(rows.lm_head(tokens)))
    save_head(head, HeadManifest(name="lab-random", head=config, identity=identity_of(manifest)), out)


if __name__ == "__main__":
    write_random_head(Path(sys.argv[1]), Path(sys.argv[2]))
