"""`starsd draft train` from end to end: texts, draft vocabulary, updates, held-out acceptance, the head.

Everything lives in one work folder and every part goes on where it was interrupted:

    WORK/corpus    tokens and features (`store`)
    WORK/state.pt  the trainer's checkpoint
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from starsd_edge.bundle import Bundle
from starsd_edge.cli.drafts import identity_of
from starsd_edge.decoding.roles import Target
from starsd_edge.errors import BundleError, ResourceError, UsageError
from starsd_edge.text.prompt import PromptWriter
from starsd_edge.text.template import ChatTemplate
from starsd_edge.text.tokenizer import Tokenizer
from starsd_server.heads.checkpoint import HeadManifest, save_head
from starsd_server.heads.head import EagleHead, HeadConfig, HeadKind
from starsd_server.heads.target import open_target_rows
from starsd_server.train.data import Corpus, draft_vocabulary
from starsd_server.train.evaluate import Acceptance, TreeShape, acceptance
from starsd_server.train.loop import Progress, Settings, Trainer
from starsd_server.train.start import embedding_scale, finished_head, new_head
from starsd_server.train.store import CorpusWriter, open_corpus
from starsd_server.train.texts import chats_of, windows_of
from starsd_server.train.write import ChatWriter, read_text

__all__ = ["EVALUATED", "Listener", "Plan", "TrainedHead", "collect_texts", "train_head"]

HELD_OUT_SHARE = 0.01
MIN_HELD_OUT, MAX_EVALUATED = 2, 40  # sequences; forty give tau to about 0.03
EVALUATED = [TreeShape(4, 1, 5), *(TreeShape(4, 4, size) for size in (4, 8, 16)), TreeShape(5, 6, 30)]


@dataclass(frozen=True, slots=True)
class Plan:
    """What a run is to do.

    chat_tokens       tokens of chats that the target writes
    texts             files of plain text that it reads besides
    chats             files of chats it wrote before (`texts.chats_of`), read likewise
    intermediate_size of the head's MLP; 0 takes the target's
    device            where the head is trained: "cpu" or "cuda" (not tried on a GPU so far)
    eval_every        updates between two points of the acceptance curve; checkpoints are written there
    """

    chat_tokens: int
    texts: Sequence[Path] = ()
    chats: Sequence[Path] = ()
    max_answer_tokens: int = 256
    draft_vocab_size: int = 8192
    intermediate_size: int = 0
    eval_every: int = 250
    device: str = "cpu"
    settings: Settings = dataclasses.field(default_factory=Settings)


@dataclass(frozen=True, slots=True)
class Listener:
    """Who wants to know: of progress, and of each point of the curve (updates, acceptance)."""

    progress: Callable[[Progress], None]
    curve: Callable[[int, list[Acceptance]], None]


@dataclass(frozen=True, slots=True)
class TrainedHead:
    """The result, and what it reached on held-out text."""

    manifest: HeadManifest
    acceptance: list[Acceptance]


def collect_texts(
    bundle: Bundle, load: Callable[[], Target], plan: Plan, folder: Path, told: Callable[[int], None]
) -> None:
    """Have the target read and write until the corpus in `folder` is as large as planned.

    Args:
        load: makes the target; not called when all is there already.
        told: gets the number of tokens after each sequence.
    """
    manifest = bundle.manifest
    tokenizer = Tokenizer(bundle.tokenizer_path.read_text("utf-8"))
    known = [text for path in plan.texts for text in windows_of(tokenizer, path)]
    for path in plan.chats:
        known += chats_of(path, manifest.shapes.vocab_size, manifest.max_len)
    wanted = sum(len(text.tokens) for text in known) + plan.chat_tokens
    about = {
        "target": manifest.identity.source_sha256,
        "quantisation": manifest.quantisation,
        "texts": " ".join(path.name for path in (*plan.texts, *plan.chats)),
    }
    with CorpusWriter(folder, manifest.shapes.feature_size, about) as corpus:
        if corpus.num_tokens >= wanted:
            return
        target = load()
        for text in known[corpus.num_sequences :]:
            read_text(target, text, corpus)
            told(corpus.num_tokens)
        prompts = _prompts(bundle, tokenizer)
        writer = ChatWriter(target, prompts, manifest.stop_tokens, plan.max_answer_tokens)
        while corpus.num_tokens < wanted:
            writer.write(corpus.num_sequences - len(known), corpus)
            told(corpus.num_tokens)


def train_head(
    bundle: Bundle, name: str, plan: Plan, work: Path, out: Path, listener: Listener
) -> TrainedHead:
    """Train on the corpus in `work` and write the head to `out`.

    Raises:
        BundleError: the bundle's features are not the ones EAGLE-1 reads, or there are no texts.
        ResourceError: too few texts to train on and to hold some out.
        UsageError: a name that no head can have.
    """
    config = head_config(bundle, plan)
    try:
        manifest = HeadManifest(name=name, head=config, identity=identity_of(bundle.manifest))
    except ValueError as error:
        raise UsageError(f"{out}: {error}") from error
    corpus = open_corpus(work / "corpus")
    held, taught = split(corpus, plan.settings.seed)
    vocabulary = draft_vocabulary(corpus, taught, config.vocab_size, config.draft_vocab_size)
    rows = open_target_rows(bundle.path)
    embedding = torch.from_numpy(rows.embedding())
    lm_head = torch.from_numpy(rows.lm_head(vocabulary.numpy()))
    scale = embedding_scale(embedding, torch.from_numpy(np.array(corpus.features[:4096])))
    head = new_head(config, embedding, lm_head, vocabulary, scale, plan.settings.seed)
    head.embedding = head.embedding.to(plan.settings.dtype)

    trainer = Trainer(head.to(plan.device), corpus, taught, plan.settings)
    checkpoint = work / "state.pt"
    if checkpoint.exists():
        trainer.resume(checkpoint)
    while trainer.step < plan.settings.steps:
        trainer.run((trainer.step // plan.eval_every + 1) * plan.eval_every, listener.progress)
        trainer.save(checkpoint)
        so_far = _finished(trainer, embedding, scale)
        listener.curve(trainer.step, acceptance(so_far, corpus, held, EVALUATED, plan.settings.dtype))
    result = _finished(trainer, embedding, scale)
    save_head(result, manifest, out)
    return TrainedHead(manifest, acceptance(result, corpus, held, EVALUATED))


def head_config(bundle: Bundle, plan: Plan) -> HeadConfig:
    """A head shaped like one layer of its target. Raises BundleError for features EAGLE-1 cannot read."""
    manifest, shapes = bundle.manifest, bundle.manifest.shapes
    if manifest.feature_layers or shapes.feature_size != shapes.hidden_size:
        raise BundleError(
            f"{bundle.path}: its features are layers {list(manifest.feature_layers)}, for an EAGLE-3 head; "
            "only EAGLE-1 heads are trained here: export the model without feature layers"
        )
    return HeadConfig(
        kind=HeadKind.EAGLE1,
        hidden_size=shapes.hidden_size,
        intermediate_size=plan.intermediate_size or shapes.ffn_size,
        num_heads=shapes.num_heads,
        num_kv_heads=shapes.num_kv_heads,
        head_dim=shapes.head_dim,
        vocab_size=shapes.vocab_size,
        draft_vocab_size=min(plan.draft_vocab_size, shapes.vocab_size),
        feature_size=shapes.feature_size,
        rms_eps=shapes.norm_eps,
        rope_theta=shapes.rope_theta,
    )


def split(corpus: Corpus, seed: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(held out, taught). Held out are greedy answers only: they are what acceptance is measured on.

    Raises ResourceError when there are too few.
    """
    answers = np.flatnonzero(corpus.greedy)
    count = max(MIN_HELD_OUT, round(HELD_OUT_SHARE * len(corpus.starts)))
    if len(answers) <= count:
        raise ResourceError(
            f"{len(answers)} greedy answers are too few to hold {count} out; give more --tokens"
        )
    held = np.random.default_rng(seed).permutation(answers)[: min(count, MAX_EVALUATED)]
    return held, np.setdiff1d(np.arange(len(corpus.starts)), held)


def _finished(trainer: Trainer, embedding: Tensor, scale: float) -> EagleHead:
    return finished_head(trainer.head, trainer.averaged(), embedding, scale).to(trainer.head.embedding.device)


def _prompts(bundle: Bundle, tokenizer: Tokenizer) -> PromptWriter:
    """As `starsd chat` writes prompts for this bundle."""
    manifest = bundle.manifest
    bos = tokenizer.token_text(manifest.bos_token) if manifest.bos_token >= 0 else ""
    return PromptWriter(tokenizer, ChatTemplate(manifest.chat_template, bos), bos if manifest.add_bos else "")
