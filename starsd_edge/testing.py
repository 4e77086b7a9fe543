"""Fakes for hardware, public so that every product's tests can use them: a target, drafters, a clock.

They stand in for what a test machine lacks (an accelerator, a link, the passing of time), never for our own
code: a decoder under test is the real decoder.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum

import numpy as np

from starsd_edge.decoding.costs import DeviceProfile
from starsd_edge.decoding.prefix import prefix_crc
from starsd_edge.decoding.roles import DrafterState, Invariance, Target, TargetOutput, TargetSpec, Update
from starsd_edge.decoding.sampling import SamplingParams, pick
from starsd_edge.decoding.tree import DraftTree
from starsd_edge.types import Float32Array, TokenArray

__all__ = ["Behaviour", "EmulatedTarget", "FakeClock", "ScriptedDrafter", "ToyTarget", "plain_text"]

BITWISE = Invariance(bitwise=True)


class FakeClock:
    """Virtual time: call it for the time, `advance` it, or hand `sleep` to whatever would sleep."""

    def __init__(self, now_s: float = 0.0) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s

    def advance(self, seconds: float) -> None:
        if seconds < 0:
            raise ValueError(f"time does not run backwards: {seconds} s")
        self.now_s += seconds

    sleep = advance


class ToyTarget:
    """A target whose logits are a hash of the context, exact in float32, so that equality is bitwise.

    `levels` is how many different logits there are: few levels make ties and short greedy cycles, many make
    random texts. Features are the token and position of their row, so a test can tell what was handed over.
    With `noise` every forward of more than one row shifts each logit by up to that much, as a runtime whose
    kernels depend on the number of rows does; plain steps stay exact.

    The cache is a list of tokens: `cache` is what a runtime's KV rows stand for.
    """

    def __init__(
        self, vocab_size: int = 32, max_len: int = 256, seed: int = 0, levels: int = 12, noise: float = 0.0
    ) -> None:
        self.spec = TargetSpec(vocab_size, 2, max_len, Invariance(noise == 0.0, noise) if noise else BITWISE)
        self.cache: list[int] = []
        self.num_forwards = 0
        self._seed = seed
        self._levels = levels
        self._noise = noise
        self._last: DraftTree | None = None
        self._known: dict[int, Float32Array] = {}

    @property
    def kv_len(self) -> int:
        return len(self.cache)

    def logits_after(self, tokens: Sequence[int]) -> Float32Array:
        """float32 [V] after a context; the law that any way of decoding must keep."""
        key = prefix_crc(np.asarray(tokens, np.int32), zlib.crc32(self._seed.to_bytes(8, "little")))
        if key not in self._known:
            raw = np.random.Generator(np.random.Philox(key)).integers(0, self._levels, self.spec.vocab_size)
            self._known[key] = (raw * 0.5).astype(np.float32)
        return self._known[key]

    def prefill(self, tokens: TokenArray) -> TargetOutput:
        if len(tokens) == 0 or len(self.cache) + len(tokens) > self.spec.max_len:
            raise ValueError(f"a prefill of {len(tokens)} rows on {len(self.cache)} does not fit")
        start = len(self.cache)
        self.cache += [int(token) for token in tokens]
        self._last = None
        positions = np.arange(start, len(self.cache), dtype=np.int32)
        return TargetOutput(self.logits_after(self.cache)[None], self._features(tokens, positions))

    def forward(self, tree: DraftTree) -> TargetOutput:
        if tree.base_len - 1 != self.kv_len:
            raise ValueError(f"a tree on {tree.base_len} committed tokens meets {self.kv_len} rows")
        if len(tree) > self.max_tree_size():
            raise ValueError(f"a tree of {len(tree)} nodes does not fit, {self.max_tree_size()} do")
        if tree.tokens.min() < 0 or tree.tokens.max() >= self.spec.vocab_size:
            raise ValueError("a token is outside the vocabulary")
        self.num_forwards += 1
        rows = [
            self.logits_after([*self.cache, *(int(tree.tokens[n]) for n in tree.path(node))])
            for node in range(len(tree))
        ]
        logits = np.stack(rows)
        if self._noise and len(tree) > 1:
            rng = np.random.Generator(np.random.Philox(self.num_forwards))
            logits += rng.uniform(-self._noise, self._noise, logits.shape).astype(np.float32)
        self._last = tree
        return TargetOutput(logits, self._features(tree.tokens, tree.positions))

    def keep(self, path: list[int]) -> None:
        assert self._last is not None, "keep follows a forward"
        if path != self._last.path(path[-1]):
            raise ValueError(f"{path} is not a path from the root")
        self.cache += [int(self._last.tokens[node]) for node in path]
        self._last = None

    def truncate(self, kv_len: int) -> None:
        if not 0 <= kv_len <= len(self.cache):
            raise ValueError(f"cannot cut {len(self.cache)} rows to {kv_len}")
        del self.cache[kv_len:]
        self._last = None

    def max_tree_size(self) -> int:
        return min(64, self.spec.max_len - len(self.cache))

    def _features(self, tokens: TokenArray, positions: TokenArray) -> Float32Array:
        return np.stack([tokens, positions], axis=1).astype(np.float32)


def plain_text(target: ToyTarget, params: SamplingParams, context: Sequence[int], count: int) -> list[int]:
    """The next `count` tokens, decoded in the most direct way: what every other way must reproduce."""
    tokens = list(context)
    for _ in range(count):
        tokens.append(pick(target.logits_after(tokens), params, len(tokens), tokens).token)
    return tokens[len(context) :]


class Behaviour(Enum):
    """What a scripted drafter does with one request."""

    PERFECT = "perfect"  # a chain of the tokens the target will pick
    BRANCHING = "branching"  # the same chain with wrong siblings around it
    WRONG = "wrong"  # a chain that leaves the text at once
    PARTLY = "partly"  # right at first, then wrong
    EMPTY = "empty"  # the root alone: it has nothing to propose
    SILENT = "silent"  # the request or its answer is lost
    FOREIGN_ROOT = "foreign_root"  # a tree on a root that was never committed
    FUTURE = "future"  # a tree on more tokens than there are
    OUT_OF_VOCABULARY = "out_of_vocabulary"  # tokens the target does not have
    HUGE = "huge"  # more nodes than any device verifies


HOSTILE = (Behaviour.FOREIGN_ROOT, Behaviour.FUTURE, Behaviour.OUT_OF_VOCABULARY, Behaviour.HUGE)


@dataclass(slots=True)
class _Request:
    base_len: int
    due_s: float
    tree: DraftTree


@dataclass
class ScriptedDrafter:
    """A drafter that answers as told, `delay_s` after each update, in the virtual time of `clock`.

    oracle      tokens that the target will commit after a context (the test's plain text); fewer at its end
    behaviours  one a request, cycled
    delays_s    one a request, cycled; several trees may be under way at once
    depth       of the trees
    ready_from  requests until it says it is ready
    dated       it says when trees arrived, as a link with a thread of its own does

    Checks what a drafter is owed: updates are contiguous and carry the features of their positions (as
    ToyTarget makes them). `context` is what it was told of the text.
    """

    oracle: Callable[[Sequence[int], int], list[int]]
    clock: FakeClock
    behaviours: Sequence[Behaviour] = (Behaviour.PERFECT,)
    delays_s: Sequence[float] = (0.0,)
    depth: int = 4
    vocab_size: int = 32
    ready_from: int = 0
    expected_wait_s: float | None = None
    dated: bool = False
    answered_s: float = 0.0
    context: list[int] = field(default_factory=list)
    num_updates: int = 0
    longest_poll_s: float = 0.0
    closed: bool = False
    _under_way: list[_Request] = field(default_factory=list)

    def start(self, first_token: int) -> None:
        self.context = [first_token]
        self._under_way.clear()

    def update(self, update: Update) -> None:
        if update.start != len(self.context) - 1:
            raise ValueError(f"rows from {update.start} follow {len(self.context)} tokens")
        tokens = [self.context[-1], *(int(token) for token in update.tokens)]
        expected = [[token, update.start + i] for i, token in enumerate(tokens[:-1])]
        if update.features.tolist() != expected:
            raise ValueError(f"features {update.features.tolist()} are not those of {expected}")
        self.context += tokens[1:]
        behaviour = self.behaviours[self.num_updates % len(self.behaviours)]
        delay_s = self.delays_s[self.num_updates % len(self.delays_s)]
        self.num_updates += 1
        if behaviour is not Behaviour.SILENT:
            tree = self._tree(behaviour)
            self._under_way.append(_Request(len(self.context), self.clock() + delay_s, tree))

    def poll(self, timeout_s: float) -> DraftTree | None:
        self.longest_poll_s = max(self.longest_poll_s, timeout_s)
        deadline_s = self.clock() + timeout_s
        due = [request for request in self._under_way if request.due_s <= deadline_s]
        if not due:
            self.clock.advance(timeout_s)
            return None
        first = min(due, key=lambda request: request.due_s)
        self.clock.advance(max(0.0, first.due_s - self.clock()))
        arrived = [request for request in due if request.due_s <= self.clock()]
        self._under_way = [request for request in self._under_way if request not in arrived]
        newest = max(arrived, key=lambda request: request.base_len)
        self.answered_s = newest.due_s
        return newest.tree

    def rollback(self, committed_len: int) -> None:
        if not 1 <= committed_len <= len(self.context):
            raise ValueError(f"cannot cut {len(self.context)} tokens to {committed_len}")
        del self.context[committed_len:]
        self._under_way.clear()

    def state(self) -> DrafterState:
        ready = self.num_updates >= self.ready_from
        delay_s = self.delays_s[(self.num_updates - 1) % len(self.delays_s)]
        wait_s = delay_s if self.expected_wait_s is None else self.expected_wait_s
        answered_s = self.answered_s if self.dated else 0.0
        return DrafterState(ready, wait_s, "" if ready else "taking the prompt", answered_s=answered_s)

    def close(self) -> None:
        self.closed = True

    def _tree(self, behaviour: Behaviour) -> DraftTree:
        right = self.oracle(self.context, self.depth)
        wrong = [(token + 1) % self.vocab_size for token in right]
        root, base_len = self.context[-1], len(self.context)
        if behaviour is Behaviour.FOREIGN_ROOT:
            return DraftTree.chain([(root + 1) % self.vocab_size, *right], base_len)
        if behaviour is Behaviour.EMPTY:
            return DraftTree.chain([root], base_len)
        if behaviour is Behaviour.FUTURE:
            return DraftTree.chain([root, *right], base_len + 3)
        if behaviour is Behaviour.OUT_OF_VOCABULARY:
            return DraftTree.chain([root, self.vocab_size, -1], base_len)
        if behaviour is Behaviour.HUGE:
            return DraftTree.chain([root] + right + [0] * 400, base_len)
        if behaviour is Behaviour.WRONG:
            return DraftTree.chain([root, *wrong], base_len)
        if behaviour is Behaviour.PARTLY:
            half = len(right) // 2
            return DraftTree.chain([root, *right[:half], *wrong[half:]], base_len)
        if behaviour is Behaviour.BRANCHING:
            tokens, parents, node = [root], [-1], 0
            for good, bad in zip(right, wrong, strict=True):
                tokens += [bad, good]
                parents += [node, node]
                node = len(tokens) - 1
            return DraftTree(np.array(tokens, np.int32), np.array(parents, np.int32), base_len)
        return DraftTree.chain([root, *right], base_len)


class EmulatedTarget:
    """A target under another device's timing: arithmetic, logits and cache are the inner target's, but a
    forward answers only once the profile's T(n) has passed since the call, and a prefill at T(n) a chunk.

    The inner target must be faster than the profile; a forward that was not is counted in `num_overruns`, and
    then the figures are not the profile's.
    """

    PREFILL_CHUNK = 64  # rows; the profile's curve ends there

    def __init__(
        self,
        target: Target,
        profile: DeviceProfile,
        clock: Callable[[], float],
        sleep: Callable[[float], None],
    ) -> None:
        self.profile = profile
        self.num_overruns = 0
        self._target = target
        self._clock = clock
        self._sleep = sleep

    @property
    def spec(self) -> TargetSpec:
        return self._target.spec

    @property
    def kv_len(self) -> int:
        return self._target.kv_len

    def prefill(self, tokens: TokenArray) -> TargetOutput:
        started_s = self._clock()
        output = self._target.prefill(tokens)
        chunks, rest = divmod(len(tokens), self.PREFILL_CHUNK)
        curve = self.profile.curve
        self._hold(started_s, chunks * curve(self.PREFILL_CHUNK) + (curve(rest) if rest else 0.0))
        return output

    def forward(self, tree: DraftTree) -> TargetOutput:
        started_s = self._clock()
        output = self._target.forward(tree)
        self._hold(started_s, self.profile.curve(len(tree)))
        return output

    def keep(self, path: list[int]) -> None:
        self._target.keep(path)

    def truncate(self, kv_len: int) -> None:
        self._target.truncate(kv_len)

    def max_tree_size(self) -> int:
        return self._target.max_tree_size()

    def _hold(self, started_s: float, seconds: float) -> None:
        left_s = started_s + seconds - self._clock()
        if left_s > 0:
            self._sleep(left_s)
        elif left_s < 0:
            self.num_overruns += 1
