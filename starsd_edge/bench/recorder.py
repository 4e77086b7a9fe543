"""Record traces: a real target's greedy text, and the tree that a real draft service drafts at each position.

The text is decoded plainly, one token a round, and every round waits for a tree of the full size.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from starsd_edge.bench.trace import Trace
from starsd_edge.decoding.decoder import Decoder
from starsd_edge.decoding.draft import Draft
from starsd_edge.decoding.policy import Outlook
from starsd_edge.decoding.roles import Drafter, RoundHints, Target
from starsd_edge.decoding.sampling import SamplingParams
from starsd_edge.decoding.tree import DraftTree
from starsd_edge.errors import UnreachableError
from starsd_edge.metrics import RoundStats
from starsd_edge.types import TokenArray
from starsd_edge.whole_file import SHARED_MODE, whole

__all__ = ["CHAT", "COPY", "TREE_NODES", "dense", "load", "record", "save"]

CHAT, COPY = "chat", "copy"  # names of traces: a question answered; an answer that repeats its prompt
TREE_NODES = 60
AHEAD = "ahead_"  # of the names of arrays
PATIENCE_S = 10.0  # a recording that misses a tree is worthless: it waits


@dataclass
class _Recording:
    """A policy that verifies nothing and keeps every tree."""

    trees: dict[int, DraftTree] = field(default_factory=dict)  # by base_len
    wants_lookup: bool = False

    def patience_s(self, outlook: Outlook) -> float:
        return PATIENCE_S if outlook.elapsed_s is not None else 0.0

    def choose(self, outlook: Outlook) -> DraftTree | None:
        return None

    def hints(self) -> RoundHints:
        return RoundHints(max_nodes=TREE_NODES)

    def wants_draft(self, rows_held: int) -> bool:
        return True

    def arrived(self, draft: Draft) -> None:
        self.trees[draft.tree.base_len] = draft.tree

    def learn(self, draft: Draft, tokens: list[int]) -> None:
        pass

    def observe(self, stats: RoundStats) -> None:
        pass

    def calibration_error(self) -> list[float]:
        return []


def record(
    name: str, target: Target, drafter: Drafter, prompt: Sequence[int], num_tokens: int, stop: frozenset[int]
) -> Trace:
    """The trace of a greedy answer. Raises UnreachableError when trees are missing."""
    policy = _Recording()
    decoder = Decoder(target, drafter, policy, time.monotonic)
    for _ in decoder.generate(prompt, SamplingParams(), num_tokens, stop):
        pass
    tokens = decoder.prefix
    trees = []
    # The last token was never a root: no tree continues it.
    for committed_len in range(len(prompt) + 1, len(tokens)):
        tree = policy.trees.get(committed_len)
        if tree is None:
            at = committed_len - len(prompt) - 1
            raise UnreachableError(f"the draft service drafted nothing at token {at} of {name!r}")
        trees.append(tree)
    trees.append(DraftTree.root_only(int(tokens[-1]), len(tokens)))
    return dense(name, tokens, len(prompt), trees)


def dense(
    name: str, tokens: TokenArray, prompt_len: int, trees: list[DraftTree], ahead: Sequence[DraftTree] = ()
) -> Trace:
    """A trace with tokens numbered from 0 in the order of their ids, so that logits stay small."""
    known = np.unique(np.concatenate([tokens, *(tree.tokens for tree in (*trees, *ahead))]))

    def renumber(tokens: TokenArray) -> TokenArray:
        return np.searchsorted(known, tokens).astype(np.int32)

    renumbered, more = (
        [DraftTree(renumber(tree.tokens), tree.parents, tree.base_len) for tree in each]
        for each in (trees, ahead)
    )
    return Trace(name, renumber(tokens), prompt_len, renumbered, len(known), more)


def save(traces: Sequence[Trace], path: Path) -> None:
    """One compressed .npz; about 100 bytes a tree. Raises OSError, ValueError."""
    arrays: dict[str, NDArray[np.generic]] = {
        "names": np.array([trace.name for trace in traces]),
        "prompt_lengths": np.array([trace.prompt_len for trace in traces], np.uint16),
    }
    for i, trace in enumerate(traces):
        arrays[f"text_{i}"] = trace.tokens.astype(np.uint16)
        for prefix, trees in (("", trace.trees), (AHEAD, trace.ahead)):
            if trees:
                arrays[f"{prefix}sizes_{i}"] = np.array([len(tree) for tree in trees], np.uint16)
                arrays[f"{prefix}tokens_{i}"] = np.concatenate([t.tokens for t in trees]).astype(np.uint16)
                arrays[f"{prefix}parents_{i}"] = np.concatenate([t.parents for t in trees]).astype(np.int16)
    with whole(path, SHARED_MODE) as file:
        np.savez_compressed(file, allow_pickle=False, **arrays)


def load(path: Path) -> list[Trace]:
    """Traces that `save` wrote."""
    with np.load(path, allow_pickle=False) as data:
        traces = []
        prompt_lengths = data["prompt_lengths"].tolist()
        for i, (name, prompt_len) in enumerate(zip(data["names"].tolist(), prompt_lengths, strict=True)):
            trees = _trees(data, "", i, prompt_len)
            ahead = _trees(data, AHEAD, i, prompt_len) if f"{AHEAD}sizes_{i}" in data else []
            largest = max(int(tree.tokens.max()) for tree in (*trees, *ahead))
            text = data[f"text_{i}"].astype(np.int32)
            traces.append(Trace(name, text, prompt_len, trees, max(largest, int(text.max())) + 1, ahead))
        return traces


def _trees(data: Mapping[str, NDArray[Any]], prefix: str, i: int, prompt_len: int) -> list[DraftTree]:
    cuts = np.cumsum(data[f"{prefix}sizes_{i}"].astype(np.int64))[:-1]
    tokens = np.split(data[f"{prefix}tokens_{i}"].astype(np.int32), cuts)
    parents = np.split(data[f"{prefix}parents_{i}"].astype(np.int32), cuts)
    return [
        DraftTree(t, p, base_len)
        for base_len, (t, p) in enumerate(zip(tokens, parents, strict=True), prompt_len + 1)
    ]
