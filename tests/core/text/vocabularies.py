"""Small real tokenizers of the two kinds that Llama-architecture models use, built when a test needs one."""

from __future__ import annotations

import json
from functools import lru_cache

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

SAMPLE = [
    "The quick brown fox jumps over the lazy dog. The dog sleeps; the fox runs on and on.",
    "User and assistant talk about speculative decoding, trees of tokens and the law of the target.",
    "Größe, naïve café, 你好世界, こんにちは, привет мир, 🙂🙃👩‍👩‍👧‍👦, 한국어",
    "def run(n):\n    return [i for i in range(n)]\n\n",
] * 3
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


@lru_cache(maxsize=1)
def byte_level() -> str:
    """GPT-2 style byte-level BPE with ChatML control tokens and one ordinary added token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(SAMPLE, trainer)
    tokenizer.add_tokens([AddedToken("<tool→>", special=False)])
    return tokenizer.to_str()


@lru_cache(maxsize=2)
def sentencepiece(*, legacy: bool) -> str:
    """Llama style BPE with byte fallback. `legacy` (Llama-1, Vicuna) puts a space before every stretch of
    text, the newer way only before the first."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    trainer = trainers.BpeTrainer(
        vocab_size=700,
        special_tokens=["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))],
        limit_alphabet=60,
        show_progress=False,
    )
    tokenizer.train_from_iterator([sample.replace("\n", " ") for sample in SAMPLE], trainer)
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    if not legacy:
        tokenizer.normalizer = None  # type: ignore[assignment]  # the stub has no None
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme="first", split=False)
    spec = json.loads(tokenizer.to_str())
    spec["added_tokens"] = [token for token in spec["added_tokens"] if token["id"] < 3]
    return json.dumps(spec)
