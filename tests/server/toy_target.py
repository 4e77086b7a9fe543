"""A made-up target small enough to train against in seconds, with texts it wrote."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from starsd_server.heads.head import EagleHead, HeadConfig, HeadKind
from starsd_server.train.data import Corpus, draft_vocabulary
from starsd_server.train.start import embedding_scale, new_head

HIDDEN, VOCAB, DRAFT_VOCAB = 32, 64, 48
PROMPT_TOKENS = 4


class ToyTarget:
    """The feature of a position is a fixed function of the feature before it and the token there."""

    def __init__(self, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        self.embedding = rng.standard_normal((VOCAB, HIDDEN)).astype(np.float32) / HIDDEN**0.5
        mixing, _ = np.linalg.qr(rng.standard_normal((HIDDEN, HIDDEN)))
        self.mixing = mixing.astype(np.float32)

    def feature(self, before: np.ndarray, token: int) -> np.ndarray:
        raw = 0.8 * before @ self.mixing + 12 * np.roll(self.embedding[token], 1)
        return (4 * np.tanh(raw)).astype(np.float16).astype(np.float32)

    def write(
        self, prompt: np.ndarray, length: int, rng: np.random.Generator | None
    ) -> tuple[np.ndarray, np.ndarray]:
        """`length` tokens from `prompt` on and their features; greedy without `rng`."""
        tokens, features, feature = [], [], np.zeros(HIDDEN, np.float32)
        for i in range(length):
            if i < len(prompt):
                token = int(prompt[i])
            else:
                logits = feature @ self.embedding.T
                noise = 0 if rng is None else rng.gumbel(size=VOCAB)
                token = int((logits + noise).argmax())
            feature = self.feature(feature, token)
            tokens.append(token)
            features.append(feature)
        return np.array(tokens, np.int32), np.array(features, np.float16)

    def corpus(self, sequences: int, seed: int = 1) -> Corpus:
        """Every second answer is greedy."""
        rng = np.random.default_rng(seed)
        lengths = rng.integers(20, 60, sequences)
        greedy = np.arange(sequences) % 2 == 0
        written = [
            self.write(rng.integers(0, VOCAB, PROMPT_TOKENS), int(length), None if chosen else rng)
            for length, chosen in zip(lengths, greedy, strict=True)
        ]
        return Corpus(
            np.concatenate([tokens for tokens, _ in written]),
            np.concatenate([features for _, features in written]),
            np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
            np.full(sequences, PROMPT_TOKENS, np.int64),
            greedy,
        )

    def untrained_head(self, corpus: Corpus, seed: int = 0) -> tuple[EagleHead, Tensor, float]:
        """A head that passes features through, the embedding, and its scale while training."""
        vocabulary = draft_vocabulary(corpus, np.arange(len(corpus.starts)), VOCAB, DRAFT_VOCAB)
        embedding = torch.from_numpy(self.embedding)
        scale = embedding_scale(embedding, torch.from_numpy(corpus.features[:256]))
        return (
            new_head(toy_config(), embedding, embedding[vocabulary], vocabulary, scale, seed),
            embedding,
            scale,
        )


def toy_config() -> HeadConfig:
    return HeadConfig(
        kind=HeadKind.EAGLE1,
        hidden_size=HIDDEN,
        intermediate_size=64,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        vocab_size=VOCAB,
        draft_vocab_size=DRAFT_VOCAB,
        feature_size=HIDDEN,
        rms_eps=1e-5,
        rope_theta=10_000.0,
    )
