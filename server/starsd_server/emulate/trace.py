"""What a target said once, to be replayed without it: tokens, features, and the trees of its head.

A recording is a folder: `trace.npz` with the conversations, and a file with the tree the draft head grows
at every position. Text, features and acceptance are those of the real models; only time is made up later.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from starsd_edge.decoding.roles import Target
from starsd_edge.decoding.tree import DraftTree
from starsd_edge.errors import BundleError
from starsd_edge.protocol.features import FeatureDtype, encode_rows
from starsd_edge.types import FeatureArray, Float32Array, TokenArray
from starsd_edge.whole_file import SHARED_MODE, whole
from starsd_server.engine import Engine
from starsd_server.heads.grow import GrowthLimits
from starsd_server.step import Advanced, Extend, Grow, SessionRows, TreeReady, WorkItem

__all__ = ["Conversation", "RecordedTree", "RecordedTrees", "Trace", "record_trees", "row_key"]


TRACE_FILE = "trace.npz"
NO_PROBABILITIES = np.empty(0, np.float32)  # trees of two nodes have none


@dataclass(frozen=True, slots=True)
class Conversation:
    """A prompt and the target's own answer.

    tokens      int32 [L + T] prompt and answer
    features    float16 [L + T - 1, F] of every position but the last
    prompt_len  L
    """

    tokens: TokenArray
    features: FeatureArray
    prompt_len: int


@dataclass(frozen=True, slots=True)
class Trace:
    """Conversations of one target."""

    conversations: tuple[Conversation, ...]

    @classmethod
    def record(cls, target: Target, prompts: Sequence[TokenArray], answer_tokens: int) -> Trace:
        """Let the target answer every prompt greedily, plainly, with `answer_tokens` tokens."""
        return cls(tuple(_answer(target, prompt, answer_tokens) for prompt in prompts))

    def rounded(self, dtype: FeatureDtype) -> Trace:
        """With the features that a service sees which is sent them as `dtype`."""
        return Trace(
            tuple(replace(c, features=encode_rows(c.features, dtype).decode()) for c in self.conversations)
        )

    def save(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        with whole(folder / TRACE_FILE, SHARED_MODE) as file:
            np.savez(
                file,
                lengths=np.array([len(c.tokens) for c in self.conversations]),
                prompt_lengths=np.array([c.prompt_len for c in self.conversations]),
                tokens=np.concatenate([c.tokens for c in self.conversations]),
                features=np.concatenate([c.features for c in self.conversations]),
            )

    @classmethod
    def load(cls, folder: Path) -> Trace:
        """Raises BundleError when there is no recording."""
        try:
            with np.load(folder / TRACE_FILE) as data:
                lengths, tokens, features = data["lengths"], data["tokens"], data["features"]
                ends, rows = np.cumsum(lengths), np.cumsum(lengths - 1)
                return cls(
                    tuple(
                        Conversation(
                            tokens[end - length : end], features[row - length + 1 : row], int(prompt_len)
                        )
                        for length, end, row, prompt_len in zip(
                            lengths, ends, rows, data["prompt_lengths"], strict=True
                        )
                    )
                )
        except (OSError, KeyError, ValueError) as error:
            raise BundleError(f"{folder}: not a recording of a target ({error})") from error


def _answer(target: Target, prompt: TokenArray, answer_tokens: int) -> Conversation:
    target.truncate(0)
    output = target.prefill(prompt)
    tokens = [*prompt.tolist(), int(output.logits[-1].argmax())]
    features = [output.features]
    for _ in range(answer_tokens - 1):
        step = target.forward(DraftTree.root_only(tokens[-1], target.kv_len + 1))
        target.keep([0])
        features.append(step.features)
        tokens.append(int(step.logits[0].argmax()))
    return Conversation(np.array(tokens, np.int32), np.concatenate(features).astype(np.float16), len(prompt))


# ---------------------------------------------------------------------------------------------------- trees


@dataclass(frozen=True, slots=True)
class RecordedTree:
    """What the head grows on a prefix: the tree, and the rows of each step after the extending one by their
    cumulative probabilities, falling."""

    tree: TreeReady
    levels: tuple[Float32Array, ...]

    @property
    def beams(self) -> tuple[int, ...]:
        """Rows of each of the steps."""
        return tuple(map(len, self.levels))


def row_key(tokens: TokenArray, before: int = 0) -> int:
    """Checksum of a context's row tokens, going on from `before`: names the prefix they make."""
    return zlib.crc32(tokens.astype("<i4").tobytes(), before)


class RecordedTrees:
    """Trees by (rows, `row_key` of their tokens)."""

    def __init__(self) -> None:
        self._trees: dict[tuple[int, int], RecordedTree] = {}

    def __len__(self) -> int:
        return len(self._trees)

    def add(self, rows: int, key: int, tree: RecordedTree) -> None:
        self._trees[rows, key] = tree

    def find(self, rows: int, key: int) -> RecordedTree | None:
        return self._trees.get((rows, key))

    def save(self, file: Path) -> None:
        names = np.array(list(self._trees), np.int64).reshape(-1, 2)
        trees = list(self._trees.values())
        with whole(file, SHARED_MODE) as written:
            np.savez_compressed(
                written,
                names=names,
                sizes=np.array([len(t.tree.tokens) for t in trees]),
                steps=np.array([len(t.levels) for t in trees]),
                rows=np.array([rows for t in trees for rows in t.beams]),
                tokens=np.concatenate([t.tree.tokens for t in trees]),
                parents=np.concatenate([t.tree.parents for t in trees]),
                probabilities=np.concatenate([t.tree.probabilities for t in trees]),
                beams=np.concatenate([NO_PROBABILITIES, *(level for t in trees for level in t.levels)]),
            )

    @classmethod
    def load(cls, file: Path) -> RecordedTrees:
        """Raises BundleError when there are none."""
        made = cls()
        try:
            with np.load(file) as data:
                ends, stops = np.cumsum(data["sizes"]), np.cumsum(data["steps"])
                tokens, parents = data["tokens"], data["parents"]
                probabilities = data["probabilities"]
                beams = np.split(data["beams"], np.cumsum(data["rows"])[:-1])
                for number, (rows, key) in enumerate(data["names"].tolist()):
                    nodes = slice(ends[number] - data["sizes"][number], ends[number])
                    steps = slice(stops[number] - data["steps"][number], stops[number])
                    tree = TreeReady(tokens[nodes], parents[nodes], probabilities[nodes])
                    made.add(rows, key, RecordedTree(tree, tuple(beams[steps])))
        except (OSError, KeyError, ValueError) as error:
            raise BundleError(f"{file}: holds no recorded trees ({error})") from error
        return made


def record_trees(
    engine: Engine, trace: Trace, limits: GrowthLimits, progress: Callable[[int, int], None] | None = None
) -> RecordedTrees:
    """Let the real head grow a tree at every position of every answer.

    Conversations advance side by side, as sessions of one batch; the engine needs a slot for each.
    """
    recorded = RecordedTrees()
    sessions = [engine.reset(slot) for slot in range(len(trace.conversations))]
    lengths = [len(c.tokens) - 1 for c in trace.conversations]
    # Row i pairs the feature of position i with the token at i + 1; the prompt gives L rows.
    reached = [c.prompt_len for c in trace.conversations]
    items: list[WorkItem] = []
    for session, conversation in zip(sessions, trace.conversations, strict=True):
        items.append(_rows(session, conversation, conversation.prompt_len, limits))
    while items:
        _grow_all(engine, trace, items, recorded)
        if progress is not None:
            progress(
                min(r - c.prompt_len for r, c in zip(reached, trace.conversations, strict=True)), min(lengths)
            )
        items = []
        for number, (session, conversation) in enumerate(zip(sessions, trace.conversations, strict=True)):
            if reached[number] < lengths[number]:
                reached[number] += 1
                items.append(_rows(session, conversation, reached[number], limits))
    return recorded


def _rows(session: SessionRows, conversation: Conversation, end: int, limits: GrowthLimits) -> Extend:
    start = session.committed
    return Extend(
        session, conversation.tokens[start + 1 : end + 1], conversation.features[start:end], start, limits
    )


def _grow_all(engine: Engine, trace: Trace, items: list[WorkItem], recorded: RecordedTrees) -> None:
    beams: dict[int, list[Float32Array]] = {item.session.slot: [] for item in items}
    while items:
        following: list[WorkItem] = []
        for item, outcome in zip(items, engine.step(items), strict=True):
            slot = item.session.slot
            if isinstance(outcome, Advanced):
                beams[slot].append(item.session.tree.beam_probabilities)
                following.append(Grow(item.session))
            elif isinstance(outcome, TreeReady):
                rows = item.session.committed
                key = row_key(trace.conversations[slot].tokens[1 : rows + 1])
                recorded.add(rows, key, RecordedTree(outcome, tuple(beams[slot])))
        items = following
