"""The two roles of a round: the Target verifies, the Drafter proposes.

Both are structural: a runtime or a link fits by having these members. The decode loop knows nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from starsd_edge.decoding.tree import DraftTree
from starsd_edge.types import FeatureArray, Float32Array, TokenArray

__all__ = [
    "Drafter",
    "DrafterState",
    "Invariance",
    "RoundHints",
    "Target",
    "TargetOutput",
    "TargetSpec",
    "Update",
]


@dataclass(frozen=True, slots=True)
class Invariance:
    """How far a row's logits depend on the rows beside it (DESIGN "Rounding").

    bitwise     a row's logits are the same bits however many rows or siblings ran beside it
    noise       otherwise: the largest logit difference measured; a decision whose margin is below a
                safe multiple of it is settled by a plain forward
    exact_tree  False where a plain step runs through kernels that a tree cannot reproduce at all
                (quantised activations amplify the difference to whole logits): exactness then
                means decoding plainly
    """

    bitwise: bool
    noise: float = 0.0
    exact_tree: bool = True


@dataclass(frozen=True, slots=True)
class TargetSpec:
    """What the decode loop and the link need to know of a target."""

    vocab_size: int
    feature_size: int  # F, width of a feature row as it leaves the target
    max_len: int  # tokens the context holds
    invariance: Invariance


@dataclass(frozen=True, slots=True)
class TargetOutput:
    """Result of one forward over n rows.

    logits    float32 [n, V] (prefill: [1, V], the last row's)
    features  float16 or float32 [n, F]
    """

    logits: Float32Array
    features: FeatureArray


class Target(Protocol):
    """The large model on the edge. Holds the KV cache of one context."""

    @property
    def spec(self) -> TargetSpec: ...

    @property
    def kv_len(self) -> int:
        """Rows in the KV cache: committed tokens less the root."""
        ...

    def prefill(self, tokens: TokenArray) -> TargetOutput:
        """Append `tokens` to the cache, in chunks that suit the runtime; logits of the last row only."""
        ...

    def forward(self, tree: DraftTree) -> TargetOutput:
        """Run all nodes in one pass. `tree.base_len - 1 == kv_len`. Commits nothing: `keep` does."""
        ...

    def keep(self, path: list[int]) -> None:
        """Make the rows of `path` (node indices of the last forward, root first) permanent; drop the rest."""
        ...

    def truncate(self, kv_len: int) -> None:
        """Forget every cache row from `kv_len` on: a new conversation, an edit, /regen."""
        ...

    def max_tree_size(self) -> int:
        """Nodes the next forward may have: what the context and the runtime's exactness allow, at least 1
        while there is room for a token, 0 when the context is full."""
        ...


@dataclass(frozen=True, slots=True)
class RoundHints:
    """What the edge knows of its own speed, so that whoever drafts can cut the tree by cost. 0: not known.

    max_nodes     largest tree wanted, root included; 1 wants none, only that the draft KV keeps up
    num_accepted  draft tokens accepted in the round before
    verify_nodes  nodes of the last verification, which took verify_s
    plain_s       what a plain step costs
    wait_s        how long the edge is likely to wait for the tree
    ahead_nodes   largest tree wanted after it, while it is verified: it goes on where this one ends; 0: none
    """

    max_nodes: int = 60
    num_accepted: int = 0
    verify_nodes: int = 0
    verify_s: float = 0.0
    plain_s: float = 0.0
    wait_s: float = 0.0
    ahead_nodes: int = 0


@dataclass(frozen=True, slots=True)
class Update:
    """Head rows for the draft service: row i pairs the feature of position `start + i` with the token at
    position `start + i + 1` (EAGLE's shift by one).

    A round that accepted A tokens gives A + 1 rows: features of the root and the accepted nodes, tokens
    accepted and bonus. A prefill of L prompt tokens gives L rows, the last one with the first sampled token.
    After it `committed_len == start + n + 1`.

    start     position of the first feature
    tokens    int32 [n]
    features  [n, F]; never changed afterwards: a drafter may keep them
    hints     for the tree asked for
    """

    start: int
    tokens: TokenArray
    features: FeatureArray
    hints: RoundHints = RoundHints()

    def __post_init__(self) -> None:
        if (
            self.features.ndim != 2
            or self.features.shape[0] != len(self.tokens)
            or self.tokens.dtype != np.int32
        ):
            raise ValueError(
                f"an update needs as many features {self.features.shape} as tokens {self.tokens.shape}"
            )

    @property
    def committed_len(self) -> int:
        return self.start + len(self.tokens) + 1


@dataclass(frozen=True, slots=True)
class DrafterState:
    """What the policy and the user may know of a drafter.

    ready            it can answer: False while unreachable, refused, or still taking the prompt
    expected_wait_s  when the outstanding tree is expected, from the moment its update left
    reason           why not ready, for the status line ("" when ready)
    blocked          it answers, but drafts for this context no more, for `reason`
    asked_len        committed_len of the update whose tree is under way, 0 if none is; None: it does not say
    asked_s          when that update left, in monotonic seconds
    answered_s       when the newest tree that `poll` gave arrived, likewise; 0: it does not say
    draft_s          of that time, what the newest tree took to be drafted; 0: it does not say
    origin           who drafts now: what is learnt of one drafter's trees does not hold for another's
    """

    ready: bool
    expected_wait_s: float
    reason: str = ""
    blocked: bool = False
    asked_len: int | None = None
    asked_s: float = 0.0
    answered_s: float = 0.0
    draft_s: float = 0.0
    origin: str = "service"


class Drafter(Protocol):
    """Whatever proposes trees. Nothing here blocks except `poll`, and that for no longer than it is told."""

    def start(self, first_token: int) -> None:
        """Begin a new context whose position 0 holds `first_token`."""
        ...

    def update(self, update: Update) -> None:
        """Hand over newly committed rows; asks for a tree on top of them."""
        ...

    def poll(self, timeout_s: float) -> DraftTree | None:
        """The newest tree that arrived, waiting up to `timeout_s`; None when there is none. Its `base_len`
        may lie behind what is committed by now: `DraftTree.descend` says what is left of it."""
        ...

    def rollback(self, committed_len: int) -> None:
        """The context was cut back to `committed_len` tokens."""
        ...

    def state(self) -> DrafterState: ...

    def close(self) -> None: ...
